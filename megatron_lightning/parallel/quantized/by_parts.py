"""Products of low-precision layers part by part, so that a product hides each part's way: what
`parallel/overlap/by_parts.py` does, with factors that are operands.

Parts of the input travel in the recipe's eight bits, both for the output and for the weight's
gradient; partial sums travel as they are. All tensors are matrices of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.collectives import all_gather
from megatron_lightning.parallel.peers.exchange import Exchange, Turn
from megatron_lightning.precision.operands import Operand, Recipe


def gather_product(
    recipe: Recipe, own: Operand, factor: Operand, dtype: torch.dtype, exchange: Exchange
) -> Tensor:
    """Own rows (R, in), (out, in) -> all rows times the weight (n R, out) in `dtype`."""
    axis, (values, scale) = exchange.axis, own
    assert scale is not None
    rows, columns = values.shape
    scales = all_gather(scale, axis, 0).chunk(axis.size) if scale.dim() else [scale] * axis.size
    turn = exchange.begin(rows, columns, torch.uint8)
    turn.gather(values.view(torch.uint8))
    y = values.new_empty((axis.size, rows, len(factor.values)), dtype=dtype)
    for step in range(axis.size):
        source = (axis.rank - step) % axis.size
        part = Operand(turn.part(step).view(values.dtype), scales[source])
        recipe.product(part, factor, dtype, forward=True, out=y[source])
    turn.end()
    return y.flatten(0, 1)


def product_scatter(
    recipe: Recipe, whole: Operand, factor: Operand, dtype: torch.dtype, exchange: Exchange
) -> Tensor:
    """All rows (n R, in), (out, in) -> own rows of the sum over ranks (R, out) in `dtype`."""
    rows = len(whole.values) // exchange.axis.size
    turn = exchange.begin(rows, len(factor.values), dtype)
    own = turn.add_to(partial_sums(recipe, whole, factor, dtype, turn, exchange.axis, forward=True))
    turn.end()
    return own


def partial_sums(
    recipe: Recipe,
    whole: Operand,
    factor: Operand,
    dtype: torch.dtype,
    turn: Turn,
    axis: MeshAxis,
    *,
    forward: bool,
) -> Tensor:
    """Send each other rank its part's product, then make the own: (n R, in) -> (R, out)."""
    values, scale = whole
    parts = values.chunk(axis.size)
    scales = [scale] * axis.size
    if scale is not None and scale.dim():
        scales = list(scale.chunk(axis.size))
        if len(parts[0]) % 4:  # cuBLAS wants each to begin at a multiple of 16 bytes
            scales = [one.clone() for one in scales]

    def multiply(part: int) -> Tensor:
        return recipe.product(Operand(parts[part], scales[part]), factor, dtype, forward=forward)

    for step in range(1, axis.size):
        turn.send(step, multiply((axis.rank + step) % axis.size))
    return multiply(axis.rank)


def begin_gather_transposed(turn: Turn, transposed: Operand) -> None:
    """Start to give the others the own part of what is summed over rows: (in, R)."""
    turn.gather(transposed.values.view(torch.uint8), joins=True)


def gathered_transposed(turn: Turn, transposed: Operand, axis: MeshAxis) -> Operand:
    """All parts joined along their rows: (in, n R)."""
    joined = torch.cat(turn.whole().chunk(axis.size), 1)
    return Operand(joined.view(transposed.values.dtype), transposed.scale)
