"""Whether the GPUs of an axis can write to each other's memory: tried once for all that its layers
move.
"""

from __future__ import annotations

import socket
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.overlap.layers import announce, announced
from megatron_lightning.utils.env import peer_access_is_off, provide

if TYPE_CHECKING:
    from megatron_lightning.parallel.peers.symmetric import SymmetricExchange


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why memory is not shared, the same on all ranks of an axis."""

    reason: str
    """Of the first rank that has one."""
    tried: bool
    """Whether a trial failed; False: it was known beforehand."""


_refusals: weakref.WeakKeyDictionary[Any, Refusal] = weakref.WeakKeyDictionary()
"""By the group of the axis, which is not tried again for the next chunk of layers."""


def shared_memory(
    axis: MeshAxis, device: torch.device, timeout_seconds: float, *, sums: bool
) -> SymmetricExchange | Refusal:
    """The exchange of an axis through the peers' memory, or why there is none. Every rank of the
    axis must call it; whoever uses the exchange holds it.

    `sums`: whether partial sums are sent too, for all that use the axis alike.
    """
    found: Any = announced(axis, "memory") or _refusals.get(axis.group)
    if found is None:
        found = _tried(axis, device, timeout_seconds, sums)
        if isinstance(found, Refusal):
            _refusals[axis.group] = found
        else:
            announce(found)
    assert isinstance(found, Refusal) or found.sums is sums
    return found


def _tried(
    axis: MeshAxis, device: torch.device, timeout_seconds: float, sums: bool
) -> SymmetricExchange | Refusal:
    reason = _agree(axis, _why_not(axis, device))
    if reason is not None:
        return Refusal(reason=reason, tried=False)
    provide(override=False, TORCH_SYMM_MEM_DISABLE_MULTICAST="1")  # it is not used
    exchange, reason = _try(axis, device, timeout_seconds, sums)
    reason = _agree(axis, reason)
    if reason is not None:
        return Refusal(reason=reason, tried=True)
    assert exchange is not None
    return exchange


def _try(
    axis: MeshAxis, device: torch.device, timeout_seconds: float, sums: bool
) -> tuple[SymmetricExchange | None, str | None]:
    try:
        from megatron_lightning.parallel.peers.symmetric import SymmetricExchange

        exchange = SymmetricExchange(axis, device, timeout_seconds=timeout_seconds, sums=sums)
        exchange.try_out()
    except (ImportError, AttributeError, RuntimeError) as error:
        return None, str(error).strip().split("\n")[0] or type(error).__name__
    return exchange, None


def _why_not(axis: MeshAxis, device: torch.device) -> str | None:
    """What all ranks know before they try."""
    rows: list[Any] = [None] * axis.size
    dist.all_gather_object(rows, (socket.gethostname(), device.index), group=axis.group)
    if peer_access_is_off():
        return "NCCL_P2P_DISABLE or NCCL_P2P_LEVEL forbids it"
    if len({host for host, _ in rows}) > 1:
        return f"axis {axis.name} reaches over several hosts"
    for _, index in rows:
        known = index is not None and index < torch.cuda.device_count() and index != device.index
        if known and not torch.cuda.can_device_access_peer(device, index):
            return f"no peer access from GPU {device.index} to {index}"
    return None


def _agree(axis: MeshAxis, reason: str | None) -> str | None:
    """The reason of the first rank that has one."""
    reasons: list[Any] = [None] * axis.size
    dist.all_gather_object(reasons, reason, group=axis.group)
    return next((one for one in reasons if one is not None), None)
