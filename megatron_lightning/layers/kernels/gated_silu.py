"""silu(gate) * up and its gradient, one pass each over memory."""

# Triton is optional, and a kernel is indexed by its grid.
# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_WARPS = 4


@triton.jit
def _product(gate, up):
    """In float32."""
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _gradients(dy, gate, up):
    """Of gate and of up, in float32."""
    dy, gate, up = dy.to(tl.float32), gate.to(tl.float32), up.to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    return dy * up * slope, dy * gate * sigmoid


@triton.jit
def _forward(inner, product, width, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    gate = tl.load(inner + row * 2 * width + column, mask=inside)
    up = tl.load(inner + (row * 2 + 1) * width + column, mask=inside)
    value = _product(gate, up)
    tl.store(product + row * width + column, value.to(product.dtype.element_ty), mask=inside)


@triton.jit
def _backward(grad, inner, grad_inner, product, width, block: tl.constexpr, again: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    dy = tl.load(grad + row * width + column, mask=inside)
    gate = tl.load(inner + row * 2 * width + column, mask=inside)
    up = tl.load(inner + (row * 2 + 1) * width + column, mask=inside)
    of_gate, of_up = _gradients(dy, gate, up)
    element = grad_inner.dtype.element_ty
    tl.store(grad_inner + row * 2 * width + column, of_gate.to(element), mask=inside)
    tl.store(grad_inner + (row * 2 + 1) * width + column, of_up.to(element), mask=inside)
    if again:  # which may be where dy was
        value = _product(gate, up).to(product.dtype.element_ty)
        tl.store(product + row * width + column, value, mask=inside)


def forward(inner: Tensor) -> Tensor:
    """(..., 2, F), contiguous, gate first -> (..., F)."""
    *rows, _, width = inner.shape
    product = inner.new_empty((*rows, width))
    if product.numel():
        grid = (product.numel() // width, triton.cdiv(width, _BLOCK))
        _forward[grid](inner, product, width, block=_BLOCK, num_warps=_WARPS)
    return product


def backward(grad: Tensor, inner: Tensor, *, product: Tensor | None = None) -> Tensor:
    """Gradient (..., F), contiguous, and what `forward` got -> gradient of (..., 2, F).

    What `forward` gave is written to `product` once more, bit for bit; it may be `grad`.
    """
    width = inner.shape[-1]
    grad_inner = torch.empty_like(inner)
    if grad.numel():
        grid = (grad.numel() // width, triton.cdiv(width, _BLOCK))
        target = grad if product is None else product
        options = {"block": _BLOCK, "again": product is not None, "num_warps": _WARPS}
        _backward[grid](grad, inner, grad_inner, target, width, **options)
    return grad_inner
