"""Factors of matrix products in low precision: which values share a scale, by recipe.

A linear layer has three products: forward x W^T, dgrad dY W and wgrad dY^T x. Each of x, W and dY
takes part in two of them, once with its columns and once with its rows as the dim that is summed
over, and scales follow that dim. So a recipe turns a matrix into a pair of operands: itself, and
its transpose.

The rounded values are kept in a dtype that holds them exactly (bfloat16 on CUDA, else float32), so
that a product in it, summed in float32, gives what hardware of the format would give but for the
order of the sum. Recipes: per tensor and per row FP8 (arXiv 2209.05433), blocks of 128 and 128x128
(DeepSeek-V3, arXiv 2412.19437), MXFP8 (OCP Microscaling; scales rounded up, arXiv 2506.08027),
NVFP4 (arXiv 2509.25149).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.precision.autocast import without_autocast
from megatron_lightning.precision.formats import (
    E2M1_MAX,
    E4M3_MAX,
    FP8_MAX,
    power_of_two_scale,
    round_e2m1,
    round_fp8,
    round_up_e8m0,
)

Role = Literal["input", "weight", "gradient"]
Reduce = Callable[[Tensor], Tensor]
"""Largest values over the ranks that hold other parts; in place."""
Noise = Callable[[], Tensor]
"""Uniform numbers in [0, 1) of a matrix's shape."""
Wanted = tuple[bool, bool]
"""Whether each operand of a pair is wanted."""
BOTH: Wanted = (True, True)


class Operand(NamedTuple):
    """(rows, summed) values; the factor is values x scale."""

    values: Tensor
    scale: Tensor | None
    """0-dim or (rows, 1) float32; None: 1."""


class Pair(NamedTuple):
    """A matrix (R, C) as a factor of two products."""

    itself: Operand | None
    """(R, C): summed over its columns."""
    transposed: Operand | None
    """(C, R): summed over its rows."""


def identity(amax: Tensor) -> Tensor:
    """Reduce over no other rank."""
    return amax


class Recipe(ABC):
    """How matrices become operands. `block` is the number of values along the summed dim that share
    a scale, of which every rank's part must be a multiple where that dim is split; 1: no blocks.
    """

    block: int = 1
    layout: str = ""
    """"tensor", "rows" or "blocks": what shares a scale of an operand in FP8's own dtype; "": not
    known, the layer stays outside of compiled regions."""
    lends_scales: bool = False
    """Scales of operands are kept by the recipe."""
    takes_parts: bool = False
    """`pair` takes `parts`: largest values that whoever wrote a matrix has found."""
    joins_parts: bool = True
    """Operands of parts of the rows can be joined; else the matrix is, before."""
    splits_scales: bool = False
    """Ranks that hold other features of a matrix each have scales of their own. Of powers of two
    they change nothing but what falls below the format's range."""

    @property
    def is_settled(self) -> bool:
        """False while matrices become operands in another way than they will later on."""
        return True

    @abstractmethod
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
        """The wanted operands of `x` (R, C). `over_rows` and `over_columns` take the largest over
        ranks that hold other rows, or other columns, of the matrix; all of them must call this.
        """

    def product(
        self,
        a: Operand,
        b: Operand,
        dtype: torch.dtype,
        *,
        forward: bool,
        out: Tensor | None = None,
    ) -> Tensor:
        """The product a b^T, summed in float32: (M, K), (N, K) -> (M, N) in `dtype`.

        `forward` allows for what is too coarse for gradients. It is written to `out` if given.
        """
        result = product(a, b, dtype)
        return result if out is None else out.copy_(result)

    def add_product_(self, total: Tensor, a: Operand, b: Operand) -> bool:
        """`total` += a b^T within the product; False, and nothing is changed, where it can't be."""
        return False


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
        return _times(padded.view(-1, len(matrix)), matrix).view(padded.shape)

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


def largest(x: Tensor) -> Tensor:
    """Largest absolute value as 0-dim float32; 0 of no value at all."""
    return x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)


def row_largest(x: Tensor) -> Tensor:
    """Largest absolute value of each row, (rows, 1) float32."""
    if not x.shape[1]:
        return x.new_zeros((x.shape[0], 1), dtype=torch.float32)
    return x.abs().amax(dim=1, keepdim=True).float()


def exact(values: Tensor, like: Tensor) -> Tensor:
    """Rounded values in the dtype that products take."""
    return values.to(torch.bfloat16) if like.is_cuda else values


def pad_to(x: Tensor, dim: int, multiple: int) -> Tensor:
    """Zeros behind `x` (2 dims) up to a multiple of `multiple` along `dim`."""
    missing = -x.shape[dim] % multiple
    if not missing:
        return x
    return F.pad(x, (0, missing) if dim == 1 else (0, 0, 0, missing))


def by_blocks(
    x: Tensor,
    height: int,
    width: int,
    quantise: Callable[..., Tensor],
    noise: Tensor | None = None,
) -> Tensor:
    """Apply `quantise(values, amax of the block[, noise])` in blocks of height x width; blocks at
    the edges may be smaller. (R, C) -> (R, C) float32.
    """
    rows, columns = x.shape
    arguments: Sequence[Tensor] = [x.float()] if noise is None else [x.float(), noise]
    blocks = [
        pad_to(pad_to(each, 0, height), 1, width)
        .unflatten(1, (-1, width))
        .unflatten(0, (-1, height))  # (R / height, height, C / width, width)
        for each in arguments
    ]
    amax = blocks[0].abs().amax(dim=(1, 3), keepdim=True)
    return quantise(blocks[0], amax, *blocks[1:]).flatten(2).flatten(0, 1)[:rows, :columns]


def product(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    """The product a b^T, summed in float32: (M, K), (N, K) -> (M, N) in `dtype`."""
    if a.values.shape[1] != b.values.shape[1]:
        width = max(a.values.shape[1], b.values.shape[1])
        a, b = (Operand(pad_to(each.values, 1, width), each.scale) for each in (a, b))
    if a.values.is_cuda:
        result = torch.mm(a.values, b.values.t(), out_dtype=torch.float32)
    else:
        result = _times(a.values, b.values.t())
    if a.scale is not None:
        result = result * a.scale
    if b.scale is not None:
        result = result * b.scale.t()
    return result.to(dtype)


def _times(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` in their own dtype, in a part of a network too that a step under autocast calls."""
    if not torch.is_autocast_enabled(a.device.type):
        return a @ b
    with without_autocast(a.device.type):
        return a @ b
