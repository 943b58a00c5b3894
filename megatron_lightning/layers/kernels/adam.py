"""Adam over many tensors in one kernel: gradient scaled, moments and parameter updated, and the
parameter's rounded copy written, each read or written once.

Tensors are found by a table of addresses, so that they need not lie in one buffer.
"""

# Triton is optional, and a kernel is indexed by its grid.
# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Elements of one program."""
_WARPS = 8
COLUMNS = 6
"""Of the table: addresses of parameter, gradient, both moments and copy (0: none), elements."""
ALIGNMENT = 16
"""Addresses must be multiples of this (bytes)."""


@triton.jit
def _at(table, row, column, element: tl.constexpr):
    address = tl.load(table + row * 6 + column)
    pointer = address.to(tl.pointer_type(element))
    return tl.multiple_of(pointer, 16)


@triton.jit
def _move(
    table,
    row,
    start,
    length,
    factor,
    decay,
    rate,
    l2,
    beta1,
    rest1,
    beta2,
    rest2,
    root_correction,
    eps,
    copy_element: tl.constexpr,
    block: tl.constexpr,
    masked: tl.constexpr,
):
    """One block of a tensor. Without a mask loads and stores are 16 bytes wide."""
    offsets = start + tl.arange(0, block)
    inside = offsets < length if masked else None
    parameters = _at(table, row, 0, tl.float32) + offsets
    first = _at(table, row, 2, tl.float32) + offsets
    second = _at(table, row, 3, tl.float32) + offsets
    gradient = _at(table, row, 1, tl.float32) + offsets
    grad = tl.load(gradient, mask=inside)
    p = tl.load(parameters, mask=inside)
    m = tl.load(first, mask=inside)
    v = tl.load(second, mask=inside)
    grad = grad * factor + l2 * p
    p = p - decay * p
    m = beta1 * m + rest1 * grad
    v = beta2 * v + rest2 * grad * grad
    p = p - rate * m / (tl.sqrt(v) / root_correction + eps)
    tl.store(parameters, p, mask=inside)
    tl.store(first, m, mask=inside)
    tl.store(second, v, mask=inside)
    if tl.load(table + row * 6 + 4) != 0:
        copies = _at(table, row, 4, copy_element) + offsets
        tl.store(copies, p.to(copy_element), mask=inside)


@triton.jit
def _update(
    table,
    tensor_of,
    block_of,
    corrections,
    factor,
    active,
    decay,
    rate,
    l2,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    copy_element: tl.constexpr,
    block: tl.constexpr,
):
    """One block of a tensor; `corrections` by tensor: 1 - beta1^t, and the root of 1 - beta2^t."""
    program = tl.program_id(0)
    row = tl.load(tensor_of + program).to(tl.int64)
    start = tl.load(block_of + program).to(tl.int64) * block
    length = tl.load(table + row * 6 + 5)
    scale = tl.load(factor)
    size = rate / tl.load(corrections + row * 2)
    root_correction = tl.load(corrections + row * 2 + 1)
    if tl.load(active) != 0:
        if start + block <= length:
            _move(
                table,
                row,
                start,
                length,
                scale,
                decay,
                size,
                l2,
                beta1,
                rest1,
                beta2,
                rest2,
                root_correction,
                eps,
                copy_element,
                block,
                False,
            )
        else:
            _move(
                table,
                row,
                start,
                length,
                scale,
                decay,
                size,
                l2,
                beta1,
                rest1,
                beta2,
                rest2,
                root_correction,
                eps,
                copy_element,
                block,
                True,
            )


_ELEMENTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def update(
    table: Tensor,
    tensor_of: Tensor,
    block_of: Tensor,
    corrections: Tensor,
    factor: Tensor,
    active: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    copy_dtype: torch.dtype,
) -> None:
    """Make a step of Adam on float32 tensors, in place.

    `table` (tensors, COLUMNS) int64; `tensor_of` and `block_of` (programs,) int32: which tensor,
    and which block of it, each program works on; `corrections` (tensors, 2) float32; `factor` 0-dim
    float32, of the gradients; `active` 0-dim, nothing is changed where it is 0. `decoupled`: decay
    as AdamW does it.
    """
    _update[(len(tensor_of),)](
        table,
        tensor_of,
        block_of,
        corrections,
        factor,
        active,
        lr * weight_decay if decoupled else 0.0,
        lr,
        0.0 if decoupled else weight_decay,
        beta1,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        eps,
        copy_element=_ELEMENTS[copy_dtype],
        block=BLOCK,
        num_warps=_WARPS,
    )
