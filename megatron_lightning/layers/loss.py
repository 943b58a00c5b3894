"""Cross entropy over a vocabulary that may be split over the tensor axis, and the mean under a
mask.

Each rank holds the logits of its own token rows. The maximum, the sum of exponentials and the
target's logit are reduced over the axis (three numbers a token), as in Megatron-LM (Shoeybi et al.,
arXiv 1909.08053, section 3). Padded columns take no part and get a zero gradient. Sums run in
float32 over slices of tokens, or in one kernel on CUDA, so that no float32 copy of all logits is
made; the logits are kept for the backward pass in their own dtype and nothing else of that size is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.modules.module as nn_module
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_lightning.layers import kernels
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.collectives import all_reduce_

_SLICE_ELEMENTS = 1 << 25
"""Logits handled at once: 128 MiB of float32 temporaries."""


class CrossEntropy(nn.Module):
    """Per-token loss of logits whose last dim may be split and padded."""

    def __init__(
        self, vocab_size: int, *, label_smoothing: float = 0.0, logit_cap: float = 0.0
    ) -> None:
        """`vocab_size`: true size, without padding. `label_smoothing` in [0, 1), spread over the
        true vocabulary. `logit_cap`: see `soft_cap`, which the logits have not passed yet.
        """
        super().__init__()
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError(f"label_smoothing={label_smoothing}: must be at least 0 and below 1")
        self.vocab_size = vocab_size
        self.label_smoothing = label_smoothing
        self.logit_cap = logit_cap
        self.axis = MeshAxis(name="tp")

    def forward(self, logits: Tensor, labels: Tensor, *, consume: bool = False) -> Tensor:
        """Logits (S, B, V/tp) and labels (B, S) -> losses (B, S) in float32, not masked.

        Negative labels (such as -100) give loss 0 and no gradient; a label >= vocab_size gives NaN.
        `consume`: nobody else looks at the logits, so that backward may write their gradient over
        them (unless it retains the graph) instead of needing twice the memory.
        """
        losses = vocabulary_cross_entropy(
            logits,
            labels.t(),
            axis=self.axis,
            vocab_size=self.vocab_size,
            label_smoothing=self.label_smoothing,
            logit_cap=self.logit_cap,
            consume=consume,
        )
        return losses.t()

    def extra_repr(self) -> str:
        """Settings."""
        return f"vocab_size={self.vocab_size}, label_smoothing={self.label_smoothing}"


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Make it cap * tanh(x / cap), in float32 or wider on the way; a cap of 0 changes nothing."""
    if not cap:
        return x
    exact = torch.promote_types(x.dtype, torch.float32)
    return (cap * torch.tanh(x.to(exact) / cap)).to(x.dtype)


def vocabulary_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    axis: MeshAxis,
    vocab_size: int,
    label_smoothing: float = 0.0,
    logit_cap: float = 0.0,
    consume: bool = False,
) -> Tensor:
    """-log softmax(logits)[target], with `label_smoothing` as torch's `cross_entropy` defines it.

    `logits` (..., V/tp): this rank's columns, those of rank r begin at r * V/tp, and columns from
    `vocab_size` on are padding. `targets` (...): global token ids. Returns (...) in float32
    (float64 for float64 logits), equal on every rank. See `CrossEntropy` for ids out of range.
    With a `logit_cap` the logits pass `soft_cap` on the way, and no capped copy is made.
    `consume`: backward may write the gradient over the logits.
    ValueError when the columns of all ranks don't cover the vocabulary.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets of shape {tuple(targets.shape)} don't fit logits of {tuple(logits.shape)}"
        )
    if logits.shape[-1] * axis.size < vocab_size:
        raise ValueError(
            f"logits hold {logits.shape[-1]} columns on each of {axis.size} ranks, fewer than"
            f" vocab_size={vocab_size}: is the head's split vocabulary() while the loss was not"
            " told of the tensor axis?"
        )
    losses = _CrossEntropy.apply(
        logits.reshape(-1, logits.shape[-1]),
        targets.reshape(-1),
        axis,
        vocab_size,
        label_smoothing,
        logit_cap,
        consume,
    )
    return losses.view(targets.shape)


def is_observed(*modules: nn.Module) -> bool:
    """Whether a hook may hold what one of `modules`, or a part of it, takes or returns."""
    if nn_module._global_forward_hooks or nn_module._global_forward_pre_hooks:
        return True
    parts = (part for module in modules for part in module.modules())
    return any(part._forward_hooks or part._forward_pre_hooks for part in parts)


def masked_mean(losses: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of `losses` weighted by `mask` (same shape), and the sum of the mask as float32; (0, 0)
    where that is 0.

    Masked losses are left out even where they are not finite.
    """
    weights = mask.to(torch.float32)
    num_tokens = weights.sum()
    total = (losses.masked_fill(mask == 0, 0.0) * weights).sum()
    return total / torch.where(num_tokens == 0, torch.ones_like(num_tokens), num_tokens), num_tokens


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        axis: MeshAxis,
        vocab_size: int,
        smoothing: float,
        cap: float,
        consume: bool,
    ) -> Tensor:
        tokens, columns = logits.shape
        exact = torch.promote_types(logits.dtype, torch.float32)
        offset = axis.rank * columns
        valid = min(max(vocab_size - offset, 0), columns)
        local = targets - offset
        held = (local >= 0) & (local < valid)
        local = local.clamp(0, columns - 1)

        sum_rows = _kernel_sums if kernels.can_run(logits) else _sliced_sums
        highest, sums = sum_rows(logits, valid, axis, exact, with_total=smoothing > 0, cap=cap)
        aimed_at = soft_cap(logits.gather(1, local[:, None])[:, 0].to(exact), cap)
        sums[1] = (aimed_at - highest) * held
        all_reduce_(sums, axis, "sum")

        log_sum = sums[0].log()
        losses = log_sum - (1.0 - smoothing) * sums[1] - smoothing / vocab_size * sums[2]
        losses = losses.masked_fill(targets < 0, 0.0).masked_fill(targets >= vocab_size, torch.nan)
        ctx.save_for_backward(logits, local, held, targets < 0, highest + log_sum)
        ctx.valid, ctx.vocab_size, ctx.smoothing, ctx.cap = valid, vocab_size, smoothing, cap
        ctx.consume = consume
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        logits, local, held, ignored, log_total = ctx.saved_tensors
        valid, smoothing = ctx.valid, ctx.smoothing
        logits = logits.detach().contiguous()
        once = ctx.consume and _ends_with_this_backward()
        grad = _gradients_for(logits)(
            logits,
            log_total,
            local.clamp(max=max(valid - 1, 0)),
            held.to(log_total.dtype) * (1.0 - smoothing),
            grad_losses.masked_fill(ignored, 0.0),
            valid=valid,
            spread=smoothing / ctx.vocab_size,
            cap=ctx.cap,
            out=logits if once else None,
        )
        return grad, None, None, None, None, None, None


def _ends_with_this_backward() -> bool:
    """Whether nobody keeps the graph for another backward."""
    if torch.compiler.is_compiling():
        return False
    autograd: Any = torch._C._autograd  # type: ignore[attr-defined]  # not in its stubs
    return not autograd._get_current_graph_task_keep_graph()


def _sliced_sums(
    logits: Tensor,
    valid: int,
    axis: MeshAxis,
    exact: torch.dtype,
    *,
    with_total: bool,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(largest logit of each row over all ranks, which keeps exponentials in range; sums over the
    own columns (3, rows): of exponentials, 0, of all logits if asked), logits less the largest.
    All of it of capped logits if there is a `cap`.
    """
    tokens, columns = logits.shape
    highest = torch.full((tokens,), -torch.inf, dtype=exact, device=logits.device)
    if valid:
        highest = soft_cap(logits[:, :valid].amax(dim=-1).to(exact), cap)
    all_reduce_(highest, axis, "max")
    sums = torch.zeros(3, tokens, dtype=exact, device=logits.device)
    for part in _slices(tokens, columns):
        shifted = soft_cap(logits[part, :valid].to(exact), cap) - highest[part, None]
        if with_total:
            sums[2, part] = shifted.sum(dim=-1)
        sums[0, part] = shifted.exp_().sum(dim=-1)
    return highest, sums


def _kernel_sums(
    logits: Tensor,
    valid: int,
    axis: MeshAxis,
    exact: torch.dtype,
    *,
    with_total: bool,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`_sliced_sums` in one pass."""
    from megatron_lightning.layers.kernels import cross_entropy

    own, exponentials, total = cross_entropy.row_sums(
        logits.contiguous(), valid, with_total=with_total, cap=cap
    )
    highest = all_reduce_(own.clone(), axis, "max") if axis.size > 1 else own
    sums = torch.zeros(3, len(logits), dtype=exact, device=logits.device)
    sums[0] = exponentials * (own - highest).exp()
    if with_total:
        sums[2] = total - valid * highest
    return highest, sums


def _sliced_gradients(
    logits: Tensor,
    log_total: Tensor,
    target: Tensor,
    hit: Tensor,
    scale: Tensor,
    *,
    valid: int,
    spread: float,
    cap: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """(softmax - hit at the target - spread) * scale, row by row; 0 from column `valid` on. With a
    `cap`, of capped logits, and times the derivative of the capping. `out` may be `logits`.
    """
    grad = torch.empty_like(logits) if out is None else out
    grad[:, valid:] = 0.0
    for part in _slices(*logits.shape):
        capped = soft_cap(logits[part, :valid].to(log_total.dtype), cap)
        share = (capped - log_total[part, None]).exp_()
        if spread:
            share.sub_(spread)
        if valid:
            share.scatter_add_(1, target[part, None], -hit[part, None])
        if cap:
            share.mul_(1 - (capped / cap).square_())
        grad[part, :valid] = share.mul_(scale[part, None])
    return grad


def _gradients_for(logits: Tensor) -> Callable[..., Tensor]:
    """`_sliced_gradients`, or the kernel that computes the same in one pass."""
    if not kernels.can_run(logits):
        return _sliced_gradients
    from megatron_lightning.layers.kernels import cross_entropy

    return cross_entropy.row_gradients


def _slices(tokens: int, columns: int) -> Iterator[slice]:
    step = max(1, _SLICE_ELEMENTS // max(1, columns))
    for start in range(0, tokens, step):
        yield slice(start, min(tokens, start + step))
