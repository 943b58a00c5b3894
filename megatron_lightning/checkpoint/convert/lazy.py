"""Tensors that are read when they are asked for, whatever kind of file holds them.

A conversion handles whole checkpoints as dictionaries of these, and reads one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lightning.checkpoint.boxes import Box


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A global tensor in some file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    part: Callable[[Box], Tensor]
    """Reads the elements of a box, on the CPU, with the box's sizes; the result may be changed."""

    def whole(self) -> Tensor:
        """All elements."""
        return self.part(Box.whole(self.shape))

    def to(self, dtype: torch.dtype) -> LazyTensor:
        """The same values as another floating dtype, rounded to nearest where it is narrower."""
        if dtype == self.dtype:
            return self
        return LazyTensor(self.shape, dtype, lambda box: self.part(box).to(dtype))

    def select(self, index: int) -> LazyTensor:
        """Entry `index` of dim 0."""

        def part(box: Box) -> Tensor:
            whole = Box((index, *box.offsets), (1, *box.sizes))
            return self.part(whole).squeeze(0)

        return LazyTensor(self.shape[1:], self.dtype, part)

    def first(self, rows: int) -> LazyTensor:
        """The first `rows` entries of dim 0; fewer where there are fewer."""
        rows = min(rows, self.shape[0])
        return LazyTensor((rows, *self.shape[1:]), self.dtype, self.part)

    def unflatten(self, dim: int, count: int) -> LazyTensor:
        """Dim `dim` as `count` equal parts, a dim of their own before it."""
        rows = self.shape[dim] // count

        def part(box: Box) -> Tensor:
            begin, size = box.offsets[dim], box.sizes[dim]
            inner = [
                Box(
                    (*box.offsets[:dim], i * rows + box.offsets[dim + 1], *box.offsets[dim + 2 :]),
                    (*box.sizes[:dim], *box.sizes[dim + 1 :]),
                )
                for i in range(begin, begin + size)
            ]
            return torch.stack([self.part(one) for one in inner], dim=dim)

        shape = (*self.shape[:dim], count, rows, *self.shape[dim + 1 :])
        return LazyTensor(shape, self.dtype, part)

    @classmethod
    def stack(cls, parts: Sequence[LazyTensor]) -> LazyTensor:
        """Equal tensors as the entries of a new dim 0."""
        held = list(parts)

        def part(box: Box) -> Tensor:
            inner = Box(box.offsets[1:], box.sizes[1:])
            begin, size = box.offsets[0], box.sizes[0]
            return torch.stack([one.part(inner) for one in held[begin : begin + size]])

        return cls((len(held), *held[0].shape), held[0].dtype, part)

    @classmethod
    def computed(
        cls, parts: Sequence[LazyTensor], function: Callable[[list[Tensor]], Tensor]
    ) -> LazyTensor:
        """`function` of the whole `parts`. Its shape is found by a trial without values."""
        trial = function([torch.empty(p.shape, dtype=p.dtype, device="meta") for p in parts])

        def part(box: Box) -> Tensor:
            return function([p.whole() for p in parts])[box.slices()].contiguous()

        return cls(tuple(trial.shape), trial.dtype, part)

    @classmethod
    def held(cls, tensor: Tensor) -> LazyTensor:
        """A tensor that is in memory, or mapped into it, already."""
        return cls(
            tuple(tensor.shape), tensor.dtype, lambda box: tensor.detach()[box.slices()].clone()
        )
