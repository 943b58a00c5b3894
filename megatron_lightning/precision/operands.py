"""Factors of matrix products in low precision: which values share a scale, by recipe.

A linear layer has three products: forward x W^T, dgrad dY W and wgrad dY^T x. Each of x, W and dY
takes part in two of them, once with its columns and once with its rows as the dim that is summed
over, and scales follow that dim. So a recipe turns a matrix into a pair of operands: itself, and
its transpose.

The rounded values are kept in a dtype that holds them exactly (bfloat16 on CUDA, else float32), so
that a product in it, summed in float32, gives what hardware of the format would give but for the
order of the sum. Recipes that do so are in `simulated.py`, those for FP8 units in `fp8.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.precision.autocast import without_autocast

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
        result = times(a.values, b.values.t())
    if a.scale is not None:
        result = result * a.scale
    if b.scale is not None:
        result = result * b.scale.t()
    return result.to(dtype)


def times(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` in their own dtype, in a part of a network too that a step under autocast calls."""
    if not torch.is_autocast_enabled(a.device.type):
        return a @ b
    with without_autocast(a.device.type):
        return a @ b
