"""Cross entropy over rows of logits: one pass forward, one backward, nothing kept between them but
two numbers a row (online softmax, Milakov and Gimelshein, arXiv 1805.02867).
"""

# Triton is optional, and a kernel is indexed by its grid.
# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_WARPS = 8


@triton.jit
def _soft_cap(x, cap):
    """Make it cap * tanh(x / cap), by the sigmoid of twice the argument."""
    return cap * (2.0 * tl.sigmoid(2.0 * x / cap) - 1.0)


@triton.jit
def _row_sums(
    logits,
    highest,
    exponentials,
    totals,
    stride,
    columns,
    cap,
    with_total: tl.constexpr,
    capped: tl.constexpr,
    block: tl.constexpr,
):
    """Largest logit of a row, the sum of exp(logit - largest), and the plain sum if asked."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, block)
    largest = tl.full((block,), float("-inf"), tl.float32)
    scaled = tl.zeros((block,), tl.float32)
    total = tl.zeros((block,), tl.float32)
    for start in range(0, columns, block):
        inside = start + lane < columns
        x = tl.load(logits + row * stride + start + lane, mask=inside, other=float("-inf"))
        x = x.to(tl.float32)
        if capped:
            x = tl.where(inside, _soft_cap(x, cap), float("-inf"))
        above = tl.maximum(largest, x)
        # A lane that has seen nothing but -inf adds nothing; -inf less itself would be NaN.
        seen = above > float("-inf")
        scaled = tl.where(seen, scaled * tl.exp(largest - above) + tl.exp(x - above), scaled)
        largest = above
        if with_total:
            total += tl.where(inside, x, 0.0)
    top = tl.max(largest, axis=0)
    parts = tl.where(largest > float("-inf"), scaled * tl.exp(largest - top), 0.0)
    tl.store(highest + row, top)
    tl.store(exponentials + row, tl.sum(parts, axis=0))
    if with_total:
        tl.store(totals + row, tl.sum(total, axis=0))


@triton.jit
def _row_gradients(
    logits,
    gradients,
    log_totals,
    targets,
    hits,
    scales,
    stride,
    columns,
    valid,
    spread,
    cap,
    capped: tl.constexpr,
    block: tl.constexpr,
):
    """(softmax - hit at the target - spread) * scale, 0 from column `valid` on."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, block)
    log_total = tl.load(log_totals + row)
    target = tl.load(targets + row)
    hit = tl.load(hits + row)
    scale = tl.load(scales + row)
    for start in range(0, columns, block):
        column = start + lane
        inside = column < columns
        x = tl.load(logits + row * stride + column, mask=inside, other=0.0).to(tl.float32)
        if capped:
            x = _soft_cap(x, cap)
        share = tl.exp(x - log_total) - spread - tl.where(column == target, hit, 0.0)
        if capped:
            share = share * (1.0 - (x / cap) * (x / cap))
        share = tl.where(column < valid, share * scale, 0.0)
        kept = share.to(gradients.dtype.element_ty)
        tl.store(gradients + row * stride + column, kept, mask=inside)


def row_sums(
    logits: Tensor, valid: int, *, with_total: bool, cap: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """(largest, sum of exp(logit - largest), sum of logits or zeros) of the first `valid` columns
    of each row, float32 (rows,) each. `logits`: (rows, columns), contiguous; capped on the way
    unless `cap` is 0.
    """
    rows, columns = logits.shape
    highest, exponentials, totals = torch.zeros(3, rows, device=logits.device).unbind()
    _row_sums[(rows,)](
        logits,
        highest,
        exponentials,
        totals,
        columns,
        valid,
        cap,
        with_total=with_total,
        capped=cap > 0,
        block=_BLOCK,
        num_warps=_WARPS,
    )
    return highest, exponentials, totals


def row_gradients(
    logits: Tensor,
    log_totals: Tensor,
    targets: Tensor,
    hits: Tensor,
    scales: Tensor,
    *,
    valid: int,
    spread: float,
    cap: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Gradient of the losses: (rows, columns) in the dtype of `logits`, which are capped on the way
    unless `cap` is 0. `out`: where it is written, may be `logits`; None: a new tensor.

    By row, (rows,) each: `log_totals`, logarithm of the sum of exponentials; `targets`, a column;
    `hits`, what is subtracted there; `scales`, the gradient of the row's loss.
    """
    rows, columns = logits.shape
    gradients = torch.empty_like(logits) if out is None else out
    _row_gradients[(rows,)](
        logits,
        gradients,
        log_totals,
        targets,
        hits,
        scales,
        columns,
        columns,
        valid,
        spread,
        cap,
        capped=cap > 0,
        block=_BLOCK,
        num_warps=_WARPS,
    )
    return gradients
