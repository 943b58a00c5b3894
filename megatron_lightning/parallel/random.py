"""Initial values of parameters: distributions that can draw any box of a global tensor alone.

An element's value depends on (seed, canonical parameter name, its index in the global tensor) and
on nothing else. So every layout of ranks starts from bitwise the same weights and no rank draws
more than its own box (plus up to six values a row).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megatron_lightning.parallel import philox


class Initial(ABC):
    """Distribution of a parameter's initial values."""

    can_repeat: ClassVar[bool] = True
    """Values may be drawn again, to begin masters with what rounding took from the weights."""

    @abstractmethod
    def draw(
        self,
        *,
        seed: int,
        name: str,
        global_shape: Sequence[int],
        offsets: Sequence[int],
        sizes: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """The box [offsets, offsets + sizes) of the global tensor, in float32."""

    @torch.no_grad()
    def fill(
        self,
        tensor: Tensor,
        *,
        seed: int,
        name: str,
        global_shape: Sequence[int],
        offsets: Sequence[int],
        sizes: Sequence[int],
    ) -> None:
        """Write the box into the first `sizes` elements of `tensor` along each dim; padding beyond
        them becomes 0.

        Values are drawn in float32, then cast to the tensor's dtype.
        """
        if tuple(sizes) != tuple(tensor.shape):
            tensor.zero_()
        target = tensor
        for dim, size in enumerate(sizes):
            target = target.narrow(dim, 0, size)
        box = self.draw(
            seed=seed,
            name=name,
            global_shape=global_shape,
            offsets=offsets,
            sizes=sizes,
            device=tensor.device,
        )
        target.copy_(box)


@dataclass(frozen=True)
class Constant(Initial):
    """The same value everywhere."""

    value: float

    def draw(
        self,
        *,
        seed: int,
        name: str,
        global_shape: Sequence[int],
        offsets: Sequence[int],
        sizes: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """See `Initial.draw`."""
        return torch.full(tuple(sizes), self.value, dtype=torch.float32, device=device)


class _Drawn(Initial):
    """A distribution whose elements each need one group member of the counter-based generator."""

    @abstractmethod
    def transform(self, words: list[Tensor]) -> Tensor:
        """Four tensors of 32 random bits -> float64 values with a last dim of 4."""

    def draw(
        self,
        *,
        seed: int,
        name: str,
        global_shape: Sequence[int],
        offsets: Sequence[int],
        sizes: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """See `Initial.draw`. Counter: (column // 4, row's low word, row's high word, 0)."""
        device = torch.device(device)
        key = philox.make_key("initial", seed, name)
        box = torch.empty(tuple(sizes), dtype=torch.float32, device=device)
        if box.numel() == 0:
            return box
        rows = _row_indices(global_shape, offsets, sizes, device)
        start, length = (offsets[-1], sizes[-1]) if sizes else (0, 1)
        first_group, groups = start // 4, (start + length - 1) // 4 - start // 4 + 1
        flat = box.view(len(rows), length)
        zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
        for down, across in philox.tiles(len(rows), groups, device):
            left = first_group + across.start
            column = torch.arange(left, first_group + across.stop, device=device)[None]
            row = rows[down, None]
            words = philox.philox([column, row & 0xFFFFFFFF, row >> 32, zero], key)
            values = self.transform(words).flatten(-2)  # (rows, 4 groups)
            begin, end = max(start, 4 * left), min(start + length, 4 * left + values.shape[1])
            flat[down, begin - start : end - start] = values[:, begin - 4 * left : end - 4 * left]
        return box


@dataclass(frozen=True)
class Normal(_Drawn):
    """Normal distribution by Box-Muller in float64, then float32; |x - mean| is below 6.8 std."""

    std: float
    mean: float = 0.0

    def transform(self, words: list[Tensor]) -> Tensor:
        """See `_Drawn.transform`."""
        return philox.normal(words).mul_(self.std).add_(self.mean)


@dataclass(frozen=True)
class Uniform(_Drawn):
    """Uniform distribution on (low, high)."""

    low: float
    high: float

    def transform(self, words: list[Tensor]) -> Tensor:
        """See `_Drawn.transform`."""
        return philox.uniform(words).mul_(self.high - self.low).add_(self.low)


def _row_indices(
    global_shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], device: torch.device
) -> Tensor:
    """Linear indices, in the global tensor without its last dim, of the box's rows:
    (prod(sizes[:-1]),).
    """
    index = torch.zeros(1, dtype=torch.int64, device=device)
    for dim in range(len(sizes) - 1):
        stride = math.prod(global_shape[dim + 1 : -1])
        along = torch.arange(offsets[dim], offsets[dim] + sizes[dim], device=device) * stride
        index = (index[:, None] + along[None]).flatten()
    return index
