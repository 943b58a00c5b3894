"""Recipes of eight and four bits whose operands hold rounded values: simulation on any device, and
the scales that recipes for FP8 units share (`fp8.py`).

Per tensor and per row FP8 (arXiv 2209.05433), blocks of 128 and 128x128 (DeepSeek-V3, arXiv
2412.19437), MXFP8 (OCP Microscaling; scales rounded up, arXiv 2506.08027), NVFP4 (arXiv
2509.25149).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.precision.formats import (
    E2M1_MAX,
    E4M3_MAX,
    FP8_MAX,
    power_of_two_scale,
    round_e2m1,
    round_fp8,
    round_up_e8m0,
)
from megatron_lightning.precision.operands import (
    BOTH,
    Noise,
    Operand,
    Pair,
    Recipe,
    Reduce,
    Role,
    Wanted,
    by_blocks,
    exact,
    identity,
    largest,
    pad_to,
    row_largest,
    times,
)


class TensorRecipe(Recipe):
    """One scale for a tensor, of its own largest value."""

    splits_scales = True

    def __init__(self, gradient: str) -> None:
        self._gradient = gradient

    def format_of(self, role: Role) -> str:
        """FP8 format of a matrix."""
        return self._gradient if role == "gradient" else "e4m3"

    def scale(self, x: Tensor, role: Role, over_rows: Reduce, over_columns: Reduce) -> Tensor:
        """What values are multiplied by before they are rounded; 0-dim float32."""
        amax = over_columns(over_rows(largest(x)))
        return power_of_two_scale(amax, FP8_MAX[self.format_of(role)])

    def pair(
        self,
        x: Tensor,
        role: Role,
        *,
        over_rows: Reduce = identity,
        over_columns: Reduce = identity,
        noise: Noise | None = None,
        wanted: Wanted = BOTH,
    ) -> Pair:
        """See `Recipe.pair`."""
        scale = self.scale(x, role, over_rows, over_columns)
        values = exact(round_fp8(x.float() * scale, self.format_of(role)), x)
        inverse = scale.reciprocal()
        return Pair(Operand(values, inverse), Operand(values.t(), inverse))


class RowRecipe(TensorRecipe):
    """A scale for each row of an operand: each is rounded by itself."""

    def pair(
        self,
        x: Tensor,
        role: Role,
        *,
        over_rows: Reduce = identity,
        over_columns: Reduce = identity,
        noise: Noise | None = None,
        wanted: Wanted = BOTH,
    ) -> Pair:
        """See `Recipe.pair`."""
        itself, transposed = wanted
        return Pair(
            self._rows(x, role, over_columns) if itself else None,
            self._rows(x.t(), role, over_rows) if transposed else None,
        )

    def _rows(self, x: Tensor, role: Role, reduce: Reduce) -> Operand:
        """The operand of a matrix that is summed over its columns."""
        name = self.format_of(role)
        amax = reduce(row_largest(x).contiguous())
        scale = power_of_two_scale(amax, FP8_MAX[name])
        values = exact(round_fp8(x.float() * scale, name), x)
        return Operand(values, scale.reciprocal())


class BlockRecipe(RowRecipe):
    """A scale for each 128 values, and for each 128x128 of a weight; powers of two."""

    block = 128

    def pair(
        self,
        x: Tensor,
        role: Role,
        *,
        over_rows: Reduce = identity,
        over_columns: Reduce = identity,
        noise: Noise | None = None,
        wanted: Wanted = BOTH,
    ) -> Pair:
        """See `Recipe.pair`."""
        if role == "weight":
            both = self._blocks(x, role, self.block)
            return Pair(Operand(both, None), Operand(both.t(), None))
        return super().pair(
            x, role, over_rows=over_rows, over_columns=over_columns, noise=noise, wanted=wanted
        )

    def _rows(self, x: Tensor, role: Role, reduce: Reduce) -> Operand:
        return Operand(self._blocks(x, role, 1), None)

    def _blocks(self, x: Tensor, role: Role, height: int) -> Tensor:
        name = self.format_of(role)

        def quantise(blocks: Tensor, amax: Tensor) -> Tensor:
            scale = power_of_two_scale(amax, FP8_MAX[name])
            return round_fp8(blocks * scale, name) / scale

        return exact(by_blocks(x, height, self.block, quantise), x)


class MXFP8Recipe(RowRecipe):
    """A power of two in E8M0 for each 32 values."""

    block = 32

    def _rows(self, x: Tensor, role: Role, reduce: Reduce) -> Operand:
        name = self.format_of(role)

        def quantise(blocks: Tensor, amax: Tensor) -> Tensor:
            scale = round_up_e8m0(amax / FP8_MAX[name])
            return round_fp8(blocks / scale, name) * scale

        return Operand(exact(by_blocks(x, 1, self.block, quantise), x), None)


class NVFP4Recipe(Recipe):
    """E2M1 with an E4M3 scale for each 16 values (16x16 of a weight) and a float32 scale for the
    tensor. Gradients are rounded stochastically; the factors of a weight's gradient go through a
    random Hadamard transform over 16 tokens, which cancels in their product.
    """

    block = 16

    def __init__(self, *, stochastic: bool = True, signs: Tensor | None = None) -> None:
        """`signs`: 16 values of +1 or -1 of the transform; None: no transform."""
        self._stochastic = stochastic
        self._transform = None if signs is None else signs[:, None] * hadamard(len(signs))

    def pair(
        self,
        x: Tensor,
        role: Role,
        *,
        over_rows: Reduce = identity,
        over_columns: Reduce = identity,
        noise: Noise | None = None,
        wanted: Wanted = BOTH,
    ) -> Pair:
        """See `Recipe.pair`."""

        def reduce(amax: Tensor) -> Tensor:
            return over_columns(over_rows(amax))

        if role == "weight":
            both = self._rounded(x, reduce, self.block, None)
            return Pair(both, Operand(both.values.t(), both.scale))
        uniform = noise() if noise is not None and role == "gradient" and self._stochastic else None
        other = None if uniform is None else uniform.t()
        itself, transposed = wanted
        return Pair(
            self._rounded(x, reduce, 1, uniform) if itself else None,
            self._rounded(self._transformed(x.t()), reduce, 1, other) if transposed else None,
        )

    def _transformed(self, x: Tensor) -> Tensor:
        """Transform along the columns; their number becomes a multiple of 16."""
        if self._transform is None:
            return x
        matrix = self._transform.to(x.device)
        padded = pad_to(x.float(), 1, len(matrix)).contiguous()
        return times(padded.view(-1, len(matrix)), matrix).view(padded.shape)

    def _rounded(self, x: Tensor, reduce: Reduce, height: int, uniform: Tensor | None) -> Operand:
        amax = reduce(largest(x))
        full = torch.full_like(amax, E2M1_MAX * E4M3_MAX)  # see `power_of_two_scale`
        encode = torch.where(amax == 0, 1.0, full / amax).clamp(max=torch.finfo(torch.float32).max)
        encode = torch.where(amax.isfinite(), encode, torch.nan)
        if uniform is not None and uniform.shape != x.shape:
            uniform = F.pad(uniform, (0, x.shape[1] - uniform.shape[1]))

        def quantise(blocks: Tensor, amax: Tensor, noise: Tensor | None = None) -> Tensor:
            scale = round_fp8(amax * (encode / E2M1_MAX), "e4m3")
            into = torch.where(scale > 0, encode / scale, 0.0 * scale)
            return round_e2m1(blocks * into, noise) * scale

        values = by_blocks(x, height, self.block, quantise, uniform)
        return Operand(exact(values, x), torch.ones_like(encode) / encode)


def hadamard(size: int) -> Tensor:
    """Orthogonal matrix of +-1 / sqrt(size), size a power of two (Sylvester's construction)."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / size**0.5
