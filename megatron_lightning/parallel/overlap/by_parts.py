"""Products of split layers part by part, so that a product hides each part's way.

Sequence parallelism puts an all-gather of the sequence before a column-split layer and a
reduce-scatter behind a row-split one, and the other way round in the backward pass. Here the
products are cut by the rank whose part of the sequence they read or make: the own part is
multiplied while the others' are on their way; partial sums of the others leave while the own is
multiplied (as in Wang et al., ASPLOS 2023, "Overlap communication with dependent computation via
decomposition"). All tensors are matrices of rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_lightning.parallel.peers.exchange import Exchange, Turn

WeightGradient = Callable[[Tensor, Tensor], Tensor | None]
"""(gradient of the output, input), both whole -> gradient of the weight, or None if it is
elsewhere."""


def gather_product(x: Tensor, weight: Tensor, bias: Tensor | None, exchange: Exchange) -> Tensor:
    """Own rows (R, in), (out, in) -> all rows times the weight (n R, out)."""
    turn = exchange.begin(x.shape[0], x.shape[1], x.dtype)
    turn.gather(x)
    y = _products(turn, exchange, weight.t(), bias)
    turn.end()
    return y


def product_scatter(x: Tensor, weight: Tensor, exchange: Exchange) -> Tensor:
    """All rows (n R, in), (out, in) -> own rows of the sum over ranks (R, out)."""
    parts = x.view(exchange.axis.size, -1, x.shape[1])
    turn = exchange.begin(parts.shape[1], weight.shape[0], x.dtype)
    own = _partial_sums(turn, exchange, parts, weight.t())
    own = turn.add_to(own)
    turn.end()
    return own


def gather_product_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    weight_gradient: WeightGradient | None,
    exchange: Exchange,
    *,
    needs_x: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `gather_product`: (n R, out), own (R, in) -> own (R, in), (out, in)."""
    turn = exchange.begin(x.shape[0], x.shape[1], x.dtype)
    if weight_gradient is not None:
        turn.gather(x, joins=True)
    grad_x = grad_weight = None
    if needs_x:
        parts = grad.view(exchange.axis.size, -1, grad.shape[1])
        grad_x = _partial_sums(turn, exchange, parts, weight)
    if weight_gradient is not None:
        grad_weight = weight_gradient(grad, turn.whole())
    if grad_x is not None:
        grad_x = turn.add_to(grad_x)
    turn.end()
    return grad_x, grad_weight


def product_scatter_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    weight_gradient: WeightGradient | None,
    exchange: Exchange,
    *,
    needs_x: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `product_scatter`: own (R, out), (n R, in) -> (n R, in), (out, in)."""
    turn = exchange.begin(grad.shape[0], grad.shape[1], grad.dtype)
    turn.gather(grad, joins=weight_gradient is not None)
    grad_x = _products(turn, exchange, weight, None) if needs_x else None
    grad_weight = None if weight_gradient is None else weight_gradient(turn.whole(), x)
    turn.end()
    return grad_x, grad_weight


def _products(turn: Turn, exchange: Exchange, factor: Tensor, bias: Tensor | None) -> Tensor:
    """Each part times the factor, the own first: (n R, out)."""
    axis = exchange.axis
    rows = turn.part(0)
    y = rows.new_empty(axis.size, rows.shape[0], factor.shape[1])
    for step in range(axis.size):
        out = y[(axis.rank - step) % axis.size]
        if bias is None:
            torch.mm(turn.part(step), factor, out=out)
        else:
            torch.addmm(bias, turn.part(step), factor, out=out)
    return y.view(-1, factor.shape[1])


def _partial_sums(turn: Turn, exchange: Exchange, parts: Tensor, factor: Tensor) -> Tensor:
    """Send each other rank its part's product, then make the own: (n, R, in) -> (R, out)."""
    axis = exchange.axis
    for step in range(1, axis.size):
        turn.send(step, parts[(axis.rank + step) % axis.size] @ factor)
    return parts[axis.rank] @ factor
