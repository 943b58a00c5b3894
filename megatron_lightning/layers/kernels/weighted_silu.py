"""weight * silu(gate) * up for rows with weights, and its gradients, one pass each over memory."""

# Triton is optional, and a kernel is indexed by its grid.
# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_WARPS = 4


@triton.jit
def _forward(inner, weights, product, width, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    weight = tl.load(weights + row).to(tl.float32)
    gate = tl.load(inner + row * 2 * width + column, mask=inside).to(tl.float32)
    up = tl.load(inner + (row * 2 + 1) * width + column, mask=inside).to(tl.float32)
    value = weight * (gate * tl.sigmoid(gate) * up)
    tl.store(product + row * width + column, value.to(product.dtype.element_ty), mask=inside)


@triton.jit
def _backward(grad, inner, weights, grad_inner, grad_weights, width, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row).to(tl.float32)
    element = grad_inner.dtype.element_ty
    partial = tl.zeros((block,), tl.float32)
    for first in range(0, width, block):
        column = first + tl.arange(0, block)
        inside = column < width
        dy = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(inner + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(inner + (row * 2 + 1) * width + column, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        partial += dy * silu * up
        slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
        of_gate, of_up = weight * dy * up * slope, weight * dy * silu
        tl.store(grad_inner + row * 2 * width + column, of_gate.to(element), mask=inside)
        tl.store(grad_inner + (row * 2 + 1) * width + column, of_up.to(element), mask=inside)
    total = tl.sum(partial, 0)
    tl.store(grad_weights + row, total.to(grad_weights.dtype.element_ty))


def forward(inner: Tensor, weights: Tensor) -> Tensor:
    """(R, 2, F), contiguous, gate first, and (R,) -> (R, F) in the dtype of `inner`."""
    rows, _, width = inner.shape
    product = inner.new_empty((rows, width))
    if product.numel():
        grid = (rows, triton.cdiv(width, _BLOCK))
        _forward[grid](inner, weights, product, width, block=_BLOCK, num_warps=_WARPS)
    return product


def backward(grad: Tensor, inner: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient (R, F), contiguous, and what `forward` got -> gradients of both, in their dtypes."""
    rows, _, width = inner.shape
    grad_inner, grad_weights = torch.empty_like(inner), torch.empty_like(weights)
    if grad.numel():
        block = min(_BLOCK, triton.next_power_of_2(width))
        _backward[(rows,)](
            grad, inner, weights, grad_inner, grad_weights, width, block=block, num_warps=_WARPS
        )
    return grad_inner, grad_weights
