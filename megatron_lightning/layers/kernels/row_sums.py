"""Each token the sum of its rows, one pass over memory and in a fixed order."""

# Triton is optional, and a kernel is indexed by its grid.
# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_WARPS = 4


@triton.jit
def _sum_rows(
    rows, row_of_slot, dropped, sums, width, slots, with_dropped: tl.constexpr, block: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    total = tl.zeros((block,), tl.float32)
    for slot in range(slots):
        row = tl.load(row_of_slot + token * slots + slot).to(tl.int64)
        kept = inside
        if with_dropped:  # a dropped slot's row may hold anything
            end = tl.where(tl.load(dropped + token * slots + slot) == 0, width, 0)
            kept = column < end
        total += tl.load(rows + row * width + column, mask=kept, other=0.0).to(tl.float32)
    tl.store(sums + token * width + column, total.to(sums.dtype.element_ty), mask=inside)


def sum_rows(rows: Tensor, row_of_slot: Tensor, dropped: Tensor | None) -> Tensor:
    """(R, H), contiguous, (T, K) int64 rows and (T, K) bool -> (T, H), summed in float32."""
    (tokens, slots), width = row_of_slot.shape, rows.shape[-1]
    sums = rows.new_empty((tokens, width))
    if sums.numel():
        grid = (tokens, triton.cdiv(width, _BLOCK))
        _sum_rows[grid](
            rows,
            row_of_slot,
            row_of_slot if dropped is None else dropped.view(torch.uint8),
            sums,
            width,
            slots,
            with_dropped=dropped is not None,
            block=_BLOCK,
            num_warps=_WARPS,
        )
    return sums
