"""By what way the products of a split sequence get its parts, and whether they hide it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_lightning.parallel.exchange import Exchange, MessageExchange
from megatron_lightning.parallel.mesh import LanedAxis, MeshAxis
from megatron_lightning.parallel.overlap import Overlap, announced
from megatron_lightning.parallel.whole_products import Collectives
from megatron_lightning.utils.env import peer_access_is_off, provide
from megatron_lightning.utils.logging import say_once, warn_once

LEAST_BYTES_ON_GPU = 4 << 20
"""Parts of a sequence below this are on their way for less time than it takes to launch the work
that would hide them."""
_NO_MEMORY = "collectives, since memory can't be shared"
"""Of an axis where that has been tried; it is not tried again for the next chunk of layers."""


def choose_overlap(
    axis: MeshAxis, device: torch.device, *, wanted: bool | None, timeout_seconds: float
) -> Overlap | None:
    """The way of the axis' layers; None: collectives apart from products. Every rank of the axis
    must call it.

    `wanted` False: by collectives. None: hidden where the ranks can write to each other's memory,
    since messages by kernels take as much from the products as they hide; True: by messages
    otherwise. On the two groups of an axis that passes share (`LanedAxis`) turns would mix, so it
    has none.
    """
    if axis.size == 1 or isinstance(axis, LanedAxis):
        return None
    if wanted is False:
        return Overlap.of(announced(axis, Collectives.kind) or Collectives(axis))
    least = LEAST_BYTES_ON_GPU if device.type == "cuda" else 0
    found = announced(axis, "memory", "messages" if wanted else _NO_MEMORY)
    if found is not None:
        return Overlap.of(found, least_bytes=least)
    exchange: Exchange | Collectives | None = None
    if device.type == "cuda":
        exchange = _symmetric(axis, device, timeout_seconds, tell=warn_once if wanted else say_once)
    if exchange is None:
        exchange = MessageExchange(axis) if wanted else Collectives(axis, _NO_MEMORY)
    return Overlap.of(exchange, least_bytes=least)


def _symmetric(
    axis: MeshAxis, device: torch.device, timeout_seconds: float, tell: Callable[[str], None]
) -> Exchange | None:
    """An exchange through the peers' memory, tried once, or None on all ranks. What is known
    beforehand to speak against it is told by `tell`, a failed trial is warned of.
    """
    reasons = _agree(axis, _why_not(axis, device))
    if not reasons:
        provide(override=False, TORCH_SYMM_MEM_DISABLE_MULTICAST="1")  # it is not used
        exchange, reason = _try(axis, device, timeout_seconds)
        reasons = _agree(axis, reason)
        if not reasons:
            return exchange
        tell = warn_once
    tell(
        "overlap of tensor parallelism: the GPUs can't write to each other's memory"
        f" ({reasons[0]}), so parts of the sequence are not moved that way; with"
        " runtime.overlap_tensor_parallel=True they are sent as messages"
    )
    return None


def _try(
    axis: MeshAxis, device: torch.device, timeout_seconds: float
) -> tuple[Exchange | None, str | None]:
    try:
        from megatron_lightning.parallel.symmetric import SymmetricExchange

        exchange = SymmetricExchange(axis, device, timeout_seconds=timeout_seconds)
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


def _agree(axis: MeshAxis, reason: str | None) -> list[str]:
    """The reasons of all ranks."""
    reasons: list[Any] = [None] * axis.size
    dist.all_gather_object(reasons, reason, group=axis.group)
    return [one for one in reasons if one is not None]
