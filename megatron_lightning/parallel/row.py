"""The output border of row-split layers under sequence parallelism, and the product before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.collectives import reduce_scatter_dim
from megatron_lightning.parallel.overlap.layers import Overlap, scattered_linear


@dataclass(frozen=True)
class RowOutput:
    """Sums partial outputs over `axis` and keeps the own part of the sequence."""

    axis: MeshAxis
    sequence_dim: int
    """Dim that is reduce-scattered."""
    overlap: Overlap

    def __call__(self, y: Tensor) -> Tensor:
        """Partial sums of the whole sequence -> own part of the sum."""
        return reduce_scatter_dim(y, self.axis, self.sequence_dim)

    def linear(self, x: Tensor, weight: Tensor, *, sums: bool) -> Tensor | None:
        """Product and border in one: (S, ..., in/tp), (out, in/tp) -> (S/tp, ..., out); None where
        they are to be done one after the other.
        """
        if torch.is_autocast_enabled(x.device.type):
            return None
        if not self.overlap.scatters(x, self.sequence_dim):
            return None
        return scattered_linear(x, weight, self.overlap, sums=sums)
