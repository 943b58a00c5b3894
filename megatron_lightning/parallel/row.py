"""The output border of row-split layers, and the product before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.collectives import reduce_from_axis, reduce_scatter_dim
from megatron_lightning.parallel.overlap.layers import Overlap, scattered_linear
from megatron_lightning.parallel.overlap.sums import summed_linear


@dataclass(frozen=True)
class RowOutput:
    """Sums partial outputs over `axis`, and of a split sequence keeps the own part."""

    axis: MeshAxis
    sequence_dim: int | None
    """Dim that is reduce-scattered; None: all ranks get the whole sum."""
    overlap: Overlap

    def __call__(self, y: Tensor) -> Tensor:
        """Partial sums of the whole sequence -> the sum, or own part of it."""
        if self.sequence_dim is None:
            return reduce_from_axis(y, self.axis)
        return reduce_scatter_dim(y, self.axis, self.sequence_dim)

    def linear(self, x: Tensor, weight: Tensor, *, sums: bool) -> Tensor | None:
        """Product and border in one: (S, ..., in/tp), (out, in/tp) -> (S/tp, ..., out), or of a
        whole sequence (S, ..., out); None where they are to be done one after the other.
        """
        if torch.is_autocast_enabled(x.device.type):
            return None
        if self.sequence_dim is None:
            return summed_linear(x, weight, self.overlap, sums=sums)
        if not self.overlap.scatters(x, self.sequence_dim):
            return None
        return scattered_linear(x, weight, self.overlap, sums=sums)
