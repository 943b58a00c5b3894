"""Products of split layers behind and before one collective each, as one operation.

The plain form of what `by_parts.py` does part by part: a compiled layer would break into a region
before and one behind every collective, and fuse nothing over the border. In the backward pass of a
column-split layer the gather is hidden under the input's gradient, and the reduce-scatter under the
weight's (Korthikanti et al., arXiv 2205.05198, section 4.2.2); where the sequence is whole, the sum
of the input's gradient is. All tensors are matrices of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.collectives import (
    all_gather_single,
    all_reduce_,
    begin_all_gather,
    begin_all_reduce_,
    begin_reduce_scatter,
    reduce_scatter_single,
)
from megatron_lightning.parallel.overlap.by_parts import WeightGradient


@dataclass(frozen=True, eq=False)
class Collectives:
    """In place of an exchange: the parts of an axis are gathered, and sums scattered, at once."""

    axis: MeshAxis
    kind: str = "collectives"


def gather_product(x: Tensor, weight: Tensor, bias: Tensor | None, axis: MeshAxis) -> Tensor:
    """Own rows (R, in), (out, in) -> all rows times the weight (n R, out)."""
    return F.linear(_gather(x, axis), weight, bias)


def product_scatter(x: Tensor, weight: Tensor, axis: MeshAxis) -> Tensor:
    """All rows (n R, in), (out, in) -> own rows of the sum over ranks (R, out)."""
    partial = x @ weight.t()
    own = partial.new_empty(x.shape[0] // axis.size, weight.shape[0])
    reduce_scatter_single(own, partial, group=axis.group)
    return own


def product_sum(x: Tensor, weight: Tensor, axis: MeshAxis) -> Tensor:
    """Rows (R, in), (out, in) -> sum over ranks of their products (R, out)."""
    return all_reduce_(x @ weight.t(), axis)


def gather_product_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    weight_gradient: WeightGradient | None,
    axis: MeshAxis,
    *,
    needs_x: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `gather_product`: (n R, out), own (R, in) -> own (R, in), (out, in)."""
    gathered = None if weight_gradient is None else begin_all_gather(x, axis, 0)
    reduced = begin_reduce_scatter(grad @ weight, axis, 0) if needs_x else None
    grad_weight = None
    if weight_gradient is not None and gathered is not None:
        grad_weight = weight_gradient(grad, gathered())
    return None if reduced is None else reduced(), grad_weight


def product_scatter_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    weight_gradient: WeightGradient | None,
    axis: MeshAxis,
    *,
    needs_x: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `product_scatter`: own (R, out), (n R, in) -> (n R, in), (out, in)."""
    whole = _gather(grad, axis)
    grad_x = whole @ weight if needs_x else None
    return grad_x, None if weight_gradient is None else weight_gradient(whole, x)


def copy_product_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    weight_gradient: WeightGradient | None,
    axis: MeshAxis,
    *,
    needs_x: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of a product of rows that all ranks have: (R, out), (R, in) -> (R, in), (out, in).

    That of the rows is a sum over ranks, which runs beside the weight's.
    """
    reduced = begin_all_reduce_(grad @ weight, axis) if needs_x else None
    grad_weight = None if weight_gradient is None else weight_gradient(grad, x)
    return None if reduced is None else reduced(), grad_weight


def _gather(x: Tensor, axis: MeshAxis) -> Tensor:
    whole = x.new_empty(axis.size * x.shape[0], x.shape[1])
    all_gather_single(whole, x, group=axis.group)
    return whole
