"""silu(gate) * up and its gradient as in `gated_silu.py`, with the largest size of what is written,
which a cast to FP8 would otherwise read it once more for.
"""

# Triton is optional, and a kernel is indexed by its grid.
# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_lightning.precision.kernels.fp8 import _larger, _size

_BLOCK = 1024
_WARPS = 4


@triton.jit
def _note(sizes, parts, dtype: tl.constexpr, places: tl.constexpr):
    """Sizes before they are rounded to `dtype`, which keeps their order: the largest is rounded.
    They are ordered as the integers of their bits.
    """
    most = _size(tl.reduce(sizes, 0, _larger).to(dtype))
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    place = parts.to(tl.pointer_type(tl.int32), bitcast=True) + program % places
    tl.atomic_max(place, most.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def _forward(inner, product, parts, width, block: tl.constexpr, places: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    gate = tl.load(inner + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(inner + (row * 2 + 1) * width + column, mask=inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(product + row * width + column, value.to(product.dtype.element_ty), mask=inside)
    _note(tl.abs(value), parts, product.dtype.element_ty, places)


@triton.jit
def _backward(grad, inner, grad_inner, parts, width, block: tl.constexpr, places: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    dy = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(inner + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(inner + (row * 2 + 1) * width + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    element = grad_inner.dtype.element_ty
    of_gate = dy * up * slope
    of_up = dy * gate * sigmoid
    tl.store(grad_inner + row * 2 * width + column, of_gate.to(element), mask=inside)
    tl.store(grad_inner + (row * 2 + 1) * width + column, of_up.to(element), mask=inside)
    _note(_larger(tl.abs(of_gate), of_up), parts, element, places)


def forward(inner: Tensor, places: int) -> tuple[Tensor, Tensor]:
    """(..., 2, F), contiguous, gate first -> (..., F), and the largest sizes of parts of it,
    (places,) float32.
    """
    *rows, _, width = inner.shape
    product = inner.new_empty((*rows, width))
    parts = inner.new_zeros(places, dtype=torch.float32)
    if product.numel():
        grid = (product.numel() // width, triton.cdiv(width, _BLOCK))
        options = {"block": _BLOCK, "places": places, "num_warps": _WARPS}
        _forward[grid](inner, product, parts, width, **options)
    return product, parts


def backward(grad: Tensor, inner: Tensor, places: int) -> tuple[Tensor, Tensor]:
    """Gradient (..., F), contiguous, and what `forward` got -> gradient of (..., 2, F), and the
    largest sizes of parts of it, (places,) float32.
    """
    width = inner.shape[-1]
    grad_inner = torch.empty_like(inner)
    parts = inner.new_zeros(places, dtype=torch.float32)
    if grad.numel():
        grid = (grad.numel() // width, triton.cdiv(width, _BLOCK))
        options = {"block": _BLOCK, "places": places, "num_warps": _WARPS}
        _backward[grid](grad, inner, grad_inner, parts, width, **options)
    return grad_inner, parts
