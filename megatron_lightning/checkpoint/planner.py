"""Who writes what: replicas are written once, and the ranks get about the same number of bytes.

DCP's own plan drops duplicates by (name, offset) and weighs each by the size of the whole tensor;
it fails on replicas that are cut differently and balances slices of flat buffers badly. This
planner weighs the boxes themselves (longest first, Graham 1969) and cuts overlaps. It uses DCP's
public planner interface and works with `dcp.save` as well.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megatron_lightning.checkpoint.boxed_tensor import BoxedTensor
from megatron_lightning.checkpoint.boxes import Box, cut_overlaps
from megatron_lightning.checkpoint.errors import CheckpointError


class BoxSavePlanner(DefaultSavePlanner):
    """Plans the saving of a flat dictionary of BoxedTensors."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Give each part of each tensor to one rank. Raises CheckpointError for tensors with holes
        or two shapes.
        """
        return create_default_global_save_plan(share_out(all_plans))

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The local memory of the box of `write_item`."""
        assert write_item.tensor_data is not None
        held = self.state_dict[write_item.index.fqn]
        return held.view_of(_box_of(write_item))


class BoxLoadPlanner(DefaultLoadPlanner):
    """Plans the loading of a flat dictionary of BoxedTensors whose names and shapes have been
    checked.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up(self, tensors: dict[str, BoxedTensor], metadata: Metadata) -> None:
        """Begin: the same as `set_up_planner` without its replacement of tensors on the meta
        device.
        """
        self.state_dict, self.metadata, self.is_coordinator = dict(tensors), metadata, False


@dataclass(slots=True)
class _Holders:
    """One tensor over all ranks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    ranks: dict[Box, list[int]] = field(default_factory=lambda: defaultdict(list))


_Task = tuple[str, Box, list[int]]  # a box to be written, and the ranks that hold it
_SMALL_BYTES = 2**20  # smaller boxes are not worth cutting


def share_out(plans: list[SavePlan]) -> list[SavePlan]:
    """The plans of all ranks with every element of every tensor in exactly one of them."""
    tensors = _collect(plans)
    forced: list[_Task] = []
    free: list[_Task] = []
    incomplete = []
    for name, holders in tensors.items():
        pieces = cut_overlaps(holders.ranks)
        held, wanted = sum(piece.numel for piece in pieces), math.prod(holders.shape)
        if held != wanted:
            incomplete.append(
                f"{name!r} of shape {list(holders.shape)}: {held} of {wanted} elements"
            )
        for piece in pieces:
            ranks = _holders_of(piece, holders)
            (forced if len(ranks) == 1 else free).append((name, piece, ranks))
    if incomplete:
        more = f"; and {len(incomplete) - 5} more" if len(incomplete) > 5 else ""
        raise CheckpointError(
            f"tensors with parts that no rank holds: {'; '.join(incomplete[:5])}{more}"
        )

    load = [0] * len(plans)
    free = _cut_large(free, tensors, sum(map(_bytes, tensors.values())) // len(plans))
    chosen: list[dict[str, list[Box]]] = [defaultdict(list) for _ in plans]
    free.sort(key=lambda task: -task[1].numel * tensors[task[0]].dtype.itemsize)
    for name, piece, ranks in forced + free:
        rank = min(ranks, key=lambda rank: load[rank])
        load[rank] += piece.numel * tensors[name].dtype.itemsize
        chosen[rank][name].append(piece)
    return [_with_boxes(plan, chosen[rank], tensors) for rank, plan in enumerate(plans)]


def _cut_large(free: list[_Task], tensors: Mapping[str, _Holders], fair_share: int) -> list[_Task]:
    """Cut replicated boxes that are large beside the share of a rank, to make shares equal."""
    limit = max(_SMALL_BYTES, fair_share // 8)
    tasks = []
    for name, piece, ranks in free:
        parts = -(-piece.numel * tensors[name].dtype.itemsize // limit)
        tasks += [(name, part, ranks) for part in piece.cut(parts)]
    return tasks


def _bytes(holders: _Holders) -> int:
    return math.prod(holders.shape) * holders.dtype.itemsize


def _collect(plans: list[SavePlan]) -> dict[str, _Holders]:
    tensors: dict[str, _Holders] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            name, data = item.index.fqn, item.tensor_data
            if data is None:
                raise CheckpointError(
                    f"{name!r} is not a tensor; objects are saved as JSON, not by the planner"
                )
            shape, dtype = tuple(data.size), data.properties.dtype
            holders = tensors.setdefault(name, _Holders(shape, dtype))
            if (shape, dtype) != (holders.shape, holders.dtype):
                raise CheckpointError(
                    f"rank {rank} has {name!r} with shape {list(shape)} and {dtype},"
                    f" an earlier rank with shape {list(holders.shape)} and {holders.dtype}"
                )
            holders.ranks[_box_of(item)].append(rank)
    return tensors


def _holders_of(piece: Box, holders: _Holders) -> list[int]:
    if piece in holders.ranks:
        return holders.ranks[piece]
    return sorted(
        {rank for box, ranks in holders.ranks.items() if box.contains(piece) for rank in ranks}
    )


def _with_boxes(
    plan: SavePlan, chosen: dict[str, list[Box]], tensors: dict[str, _Holders]
) -> SavePlan:
    """The plan with these boxes, tensors in their old order (so that each file is written as memory
    lies).
    """
    items = []
    for name in dict.fromkeys(item.index.fqn for item in plan.items):
        for box in sorted(chosen.get(name, ()), key=lambda box: box.offsets):
            items.append(_write_item(name, box, tensors[name]))
    return replace(plan, items=items)


def _write_item(name: str, box: Box, holders: _Holders) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=holders.dtype), torch.Size(holders.shape))
    return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def _box_of(item: WriteItem) -> Box:
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))
