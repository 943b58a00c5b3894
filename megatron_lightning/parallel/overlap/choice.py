"""By what way split layers get parts of a sequence, or sums, and whether their products hide it."""

from __future__ import annotations

import torch

from megatron_lightning.parallel.axes import LanedAxis, MeshAxis
from megatron_lightning.parallel.overlap.layers import Overlap, announced
from megatron_lightning.parallel.overlap.whole import Collectives
from megatron_lightning.parallel.peers.exchange import Exchange, MessageExchange
from megatron_lightning.parallel.peers.memory import Refusal, shared_memory
from megatron_lightning.utils.logging import say_once, warn_once

LEAST_BYTES_ON_GPU = 4 << 20
"""Parts of a sequence below this are on their way for less time than it takes to launch the work
that would hide them."""


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
    exchange: Exchange | Collectives | None = None
    if device.type == "cuda":
        exchange = _through_memory(axis, device, timeout_seconds, wanted=wanted is True)
    if exchange is None and wanted:
        exchange = announced(axis, MessageExchange.kind) or MessageExchange(axis)
    return Overlap.of(
        exchange or announced(axis, Collectives.kind) or Collectives(axis),
        least_bytes=LEAST_BYTES_ON_GPU if device.type == "cuda" else 0,
    )


def _through_memory(
    axis: MeshAxis, device: torch.device, timeout_seconds: float, *, wanted: bool
) -> Exchange | None:
    """An exchange through the peers' memory, or None on all ranks. That it can't be is told where
    it was asked for, and a failed trial is warned of.
    """
    found = shared_memory(axis, device, timeout_seconds, sums=True)
    if not isinstance(found, Refusal):
        return found
    tell = warn_once if wanted or found.tried else say_once
    tell(
        "overlap of tensor parallelism: the GPUs can't write to each other's memory"
        f" ({found.reason}), so parts of the sequence are not moved that way; with"
        " runtime.overlap_tensor_parallel=True they are sent as messages"
    )
    return None
