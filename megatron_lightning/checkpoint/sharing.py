"""Which rank writes which part of replicated tensors, for writers of other formats."""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed.checkpoint.planner import SavePlan

from megatron_lightning.checkpoint.boxed_tensor import BoxedTensor
from megatron_lightning.checkpoint.boxes import Box
from megatron_lightning.checkpoint.planner import share_out
from megatron_lightning.checkpoint.ranks import RankGroup


def shares(tensors: Mapping[str, BoxedTensor], ranks: RankGroup) -> dict[str, list[Box]]:
    """The boxes that this rank writes: over all ranks each element once, about equal bytes. All
    ranks call it. CheckpointError where no rank holds some part.
    """

    def plan() -> SavePlan:
        return SavePlan([i for n, t in tensors.items() for i in t.__create_write_items__(n, t)])

    plans = ranks.gather("planning an export", plan)
    mine = ranks.scatter("planning an export", lambda: share_out(plans))
    found: dict[str, list[Box]] = {}
    for item in mine.items:
        assert item.tensor_data is not None
        chunk = item.tensor_data.chunk
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        found.setdefault(item.index.fqn, []).append(box)
    return found
