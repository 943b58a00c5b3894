"""What one rank holds of one global tensor, in the form that torch's distributed checkpoint (DCP)
understands.

A `BoxedTensor` pairs boxes of the global tensor with views of the rank's own storage. It follows
the `_Checkpointable` protocol of DCP (`torch/distributed/_checkpointable.py`), so any DCP planner
saves and loads it without a copy and without a gather. It is a tensor only in name: it computes
nothing.
"""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from megatron_lightning.checkpoint.boxes import Box, split_flat_slice


class BoxedTensor(torch.Tensor):
    """Boxes of a global tensor and the local memory behind them; `shape` is the global one."""

    boxes: tuple[Box, ...]
    """Disjoint boxes in global coordinates; none if the rank holds nothing but padding."""
    views: tuple[torch.Tensor, ...]
    """One view of the rank's storage for each box, of the box's sizes."""

    @classmethod
    def from_views(
        cls,
        global_shape: Sequence[int],
        parts: Iterable[tuple[Box, torch.Tensor]],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "BoxedTensor":
        """Put together boxes (global coordinates) and their memory (of the same sizes, dtype and
        device).
        """
        shape = torch.Size(global_shape)
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # type: ignore[attr-defined]
        kept = list(parts)
        for box, view in kept:
            assert tuple(view.shape) == box.sizes
            assert (view.dtype, view.device) == (dtype, device)
        made.boxes = tuple(box for box, _ in kept)
        made.views = tuple(view for _, view in kept)
        return made

    @classmethod
    def from_local(
        cls,
        local: torch.Tensor,
        global_shape: Sequence[int],
        offsets: Sequence[int],
        sizes: Sequence[int] | None = None,
    ) -> "BoxedTensor":
        """The box at `offsets` of a tensor of `global_shape`, held in `local`.

        `sizes` are the sizes of the box. `local` may be larger (rows that pad the vocabulary): only
        its first `sizes[d]` entries of dim d are saved and loaded. A size of 0 says that the rank
        holds nothing. Without `sizes` all of `local` counts.

        Raises ValueError if the box does not fit in `global_shape` or in `local`.
        """
        held = _held_box(tuple(local.shape), global_shape, offsets, sizes)
        local = local.detach()
        parts = []
        if held.numel or not math.prod(global_shape):
            whole = held.sizes == tuple(local.shape)
            parts.append((held, local if whole else local[Box.whole(held.sizes).slices()]))
        return cls.from_views(global_shape, parts, dtype=local.dtype, device=local.device)

    @classmethod
    def from_flat(
        cls,
        flat: torch.Tensor,
        local_shape: Sequence[int],
        offsets: Sequence[int],
        global_shape: Sequence[int],
        start: int,
        sizes: Sequence[int] | None = None,
    ) -> "BoxedTensor":
        """Elements `start <= i < start + len(flat)` of the flattened local tensor, held in the 1-D
        tensor `flat`.

        The local tensor (of `local_shape`) lies at `offsets` of the global one; `sizes` as in
        `from_local`, where `local_shape` includes the padding. This is how a slice of a flat,
        sharded optimizer buffer is saved: `flat` is a view of that buffer, and so are all parts.

        Raises ValueError if the slice does not lie in `local_shape`, or the box not in
        `global_shape`.
        """
        held = _held_box(local_shape, global_shape, offsets, sizes)
        if flat.dim() != 1 or not flat.is_contiguous():
            raise ValueError(
                f"flat has shape {list(flat.shape)}; give a contiguous 1-D view of the buffer"
            )
        flat = flat.detach()
        filled = Box.whole(held.sizes)
        parts = []
        for piece in split_flat_slice(local_shape, start, start + flat.numel()):
            valid = piece.box.intersect(filled)
            if valid is None:
                continue
            begin = piece.start - start
            whole = flat[begin : begin + piece.box.numel].view(piece.box.sizes)
            view = whole[valid.shift(piece.box.offsets, sign=-1).slices()]
            parts.append((valid.shift(offsets), view))
        if not math.prod(global_shape):
            parts = [(held, flat[:0].view(held.sizes))]
        return cls.from_views(global_shape, parts, dtype=flat.dtype, device=flat.device)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "BoxedTensor":
        """A BoxedTensor as it is, a DTensor by its local shard, any other tensor as one whole
        (replicated) tensor.
        """
        if isinstance(tensor, cls):
            return tensor
        if isinstance(tensor, DTensor):
            local = tensor.to_local().detach()
            chunks = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
            parts = [(Box(tuple(c.offsets), tuple(c.sizes)), local) for c in chunks]
            parts = [(box, view) for box, view in parts if box.numel]
            return cls.from_views(tensor.shape, parts, dtype=local.dtype, device=local.device)
        return cls.from_local(tensor, tensor.shape, (0,) * tensor.dim())

    def view_of(self, box: Box) -> torch.Tensor:
        """The local memory of `box` (global coordinates), which must lie in a box that is held."""
        for held, view in zip(self.boxes, self.views, strict=True):
            if held == box:
                return view
            if held.contains(box):
                return view[box.shift(held.offsets, sign=-1).slices()]
        raise KeyError(f"{box} is not held by {self!r}")

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:  # noqa: D105
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:  # noqa: D105
        return [
            ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in self.boxes
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:  # noqa: D105
        for box, view in zip(self.boxes, self.views, strict=True):
            if index.offset is not None and box.offsets == tuple(index.offset):
                return view
        raise KeyError(f"{index} is not held by {self!r}")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: D105
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(
            f"a BoxedTensor only says where a rank's data lies; it has no {func}"
        )

    def __repr__(self, *_: object, **__: object) -> str:
        """Shape, dtype and boxes; no values."""
        boxes = ", ".join(f"{list(b.offsets)}+{list(b.sizes)}" for b in self.boxes)
        return f"BoxedTensor(shape={list(self.shape)}, dtype={self.dtype}, boxes=[{boxes}])"


def _held_box(
    local_shape: Sequence[int],
    global_shape: Sequence[int],
    offsets: Sequence[int],
    sizes: Sequence[int] | None,
) -> Box:
    held = tuple(local_shape if sizes is None else sizes)
    return _checked_box(tuple(local_shape), tuple(global_shape), tuple(offsets), held)


@lru_cache(maxsize=65536)  # asked for again in every save, of a weight and of each of its moments
def _checked_box(
    local_shape: tuple[int, ...],
    global_shape: tuple[int, ...],
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
) -> Box:
    held = Box(offsets, sizes)
    if not len(local_shape) == len(global_shape) == len(held.offsets) == len(held.sizes):
        raise ValueError(
            f"local shape {list(local_shape)}, global shape {list(global_shape)},"
            f" offsets {list(held.offsets)} and sizes {list(held.sizes)} must agree in dims"
        )
    if any(n < 0 or n > m for n, m in zip(held.sizes, local_shape, strict=True)):
        raise ValueError(
            f"sizes {list(held.sizes)} do not fit in the local shape {list(local_shape)}"
        )
    if held.numel and not Box.whole(global_shape).contains(held):
        raise ValueError(
            f"offsets {list(held.offsets)} and sizes {list(held.sizes)} reach beyond the global"
            f" shape {list(global_shape)}; if the local tensor is padded, give `sizes` without it"
        )
    return held
