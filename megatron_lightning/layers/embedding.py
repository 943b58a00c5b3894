"""Word and position embeddings, and the output head over the vocabulary.

Weights have the true vocabulary's shape (V, H). Tensor parallelism splits the token rows: it
narrows the weight, sets `vocabulary_offset` to the first row held, and puts a sum behind the
lookup. Rows of padding may follow the true ones in the tensor held; they are zero, get a zero
gradient, and are no token.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_lightning.layers.linear import Linear
from megatron_lightning.parallel.column import DefersWeightGradient
from megatron_lightning.parallel.main_gradient import main_gradient_of
from megatron_lightning.parallel.plain_layers import Border
from megatron_lightning.parallel.random import Initial


class VocabularyEmbedding(nn.Module):
    """Token ids -> vectors; weight of global shape (vocab_size, hidden_size)."""

    looks_up_ids: ClassVar[bool] = True
    before: Border | None = None
    """Set when the table is whole and the sequence is split: keeps the own part of the ids' last
    dim.
    """
    after: Border | None = None
    """Sums the parts of all tensor ranks, or sums and splits the sequence (dim 0)."""
    vocabulary_offset: int | None = None
    """First token row held when the vocabulary is split; None when the table is whole."""
    sums_weight_gradient: bool = False
    """True when gradients of rows go to the table's main gradient (`parallel/main_gradient.py`)."""
    weight_sink: DefersWeightGradient | None = None
    """Set when the schedule splits backwards; then autograd has the gradient, at once."""
    pad_multiple: int

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        initial: Initial,
        pad_multiple: int = 128,
        device: str | None = None,
    ) -> None:
        """`pad_multiple`: rows held by each tensor rank are made a multiple of this; 1 for no
        padding on one rank.
        """
        super().__init__()
        self.vocab_size = vocab_size
        self.pad_multiple = pad_multiple
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, device=device))
        self.initials: dict[str, Initial] = {"weight": initial}

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, S) int64 -> (S, B, H), or (S/tp, B, H) with sequence parallelism.

        On CPU an id outside [0, vocab_size) raises ValueError. On a GPU that check would stall the
        device, so there such an id is an assertion of the lookup on one rank, and a zero vector
        when the vocabulary is split.
        """
        if tokens.device.type == "cpu":
            check_ids(tokens, self.vocab_size)
        if self.before is not None:
            tokens = self.before(tokens)
        sums = self.sums_weight_gradient
        x = lookup(tokens.t(), self.weight, self.vocabulary_offset, sums=sums)  # (S, B, H)
        return x if self.after is None else self.after(x)

    def extra_repr(self) -> str:
        """Sizes held."""
        return f"vocab_size={self.vocab_size}, weight={tuple(self.weight.shape)}"


class PositionEmbedding(nn.Module):
    """Learned absolute positions (or token types): ids -> vectors; weight (size, hidden_size),
    whole on every rank.
    """

    looks_up_ids: ClassVar[bool] = True
    before: Border | None = None
    """Set when the sequence is split: keeps the own part of the ids' last dim."""

    def __init__(
        self, size: int, hidden_size: int, *, initial: Initial, device: str | None = None
    ) -> None:
        super().__init__()
        self.size = size
        self.weight = nn.Parameter(torch.empty(size, hidden_size, device=device))
        self.initials: dict[str, Initial] = {"weight": initial}

    def forward(self, ids: Tensor) -> Tensor:
        """(B, S) int64 -> (S, B, H), or (S/tp, B, H) with sequence parallelism; ValueError on CPU
        for ids >= size.
        """
        if ids.device.type == "cpu":
            check_ids(ids, self.size)
        if self.before is not None:
            ids = self.before(ids)
        return _rows(ids.t(), self.weight)  # (S, B, H)

    def extra_repr(self) -> str:
        """Sizes held."""
        return f"size={self.size}, weight={tuple(self.weight.shape)}"


class VocabularyHead(Linear):
    """Hidden states -> logits; weight of global shape (vocab_size, hidden_size), often tied to the
    word embedding.

    To tie, assign the same `nn.Parameter`, `head.weight = embedding.weight`, and give both the same
    `initial`: a later pipeline stage draws its copy by the head's. With a split
    vocabulary the logits stay split over the tensor axis, for `CrossEntropy`; `whole` gives all of
    them, without padding.
    """

    collect: Border | None = None
    """Set when the vocabulary is split: gathers the logits' last dim from all tensor ranks."""
    pad_multiple: int

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        bias: bool = False,
        initial: Initial,
        pad_multiple: int = 128,
        device: str | None = None,
    ) -> None:
        super().__init__(hidden_size, vocab_size, bias=bias, initial=initial, device=device)
        self.vocab_size = vocab_size
        self.pad_multiple = pad_multiple

    def whole(self, logits: Tensor) -> Tensor:
        """(..., V/tp with padding) -> (..., V): every true token's logit on every rank (generation,
        evaluation).
        """
        if self.collect is not None:
            logits = self.collect(logits)
        return logits[..., : self.vocab_size]


def lookup(ids: Tensor, weight: Tensor, offset: int | None, *, sums: bool = False) -> Tensor:
    """Rows of `weight` for `ids`, and zeros for ids whose row isn't among [offset, offset + rows
    held): (*ids, H). With `sums` their gradients go to the weight's main gradient.
    """
    if offset is None:
        return _rows(ids, weight, sums=sums)
    local = ids - offset
    elsewhere = (local < 0) | (local >= weight.shape[0])
    rows = _rows(local.masked_fill(elsewhere, 0), weight, sums=sums)
    return rows.masked_fill(elsewhere[..., None], 0.0)


def _rows(ids: Tensor, weight: Tensor, *, sums: bool = False) -> Tensor:
    """`F.embedding`, with gradients summed in float32 on the CPU too: torch adds them up in the
    weight's dtype there, in which a row that occurs often soon grows no more. With `sums` rows are
    added by themselves, unless there are more of them than the table has.
    """
    if sums and not torch.compiler.is_compiling() and 0 < ids.numel() <= weight.shape[0]:
        return _SummedRows.apply(ids, weight)
    if weight.device.type == "cpu" and weight.dtype in (torch.bfloat16, torch.float16):
        return _Rows.apply(ids, weight)
    return F.embedding(ids, weight)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows, ctx.dtype = weight.shape[0], weight.dtype
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (ids,) = ctx.saved_tensors
        sums = grad.new_zeros((ctx.rows, grad.shape[-1]), dtype=torch.float32)
        sums.index_add_(0, ids.reshape(-1), grad.reshape(-1, grad.shape[-1]).float())
        return None, sums.to(ctx.dtype)


class _SummedRows(torch.autograd.Function):
    """Only the rows looked up are touched in the main gradient, where autograd would make a
    gradient of the whole table and add it.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids, weight)
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        ids, weight = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return None, None
        rows, sums = _sums_by_id(ids.reshape(-1), grad.reshape(-1, grad.shape[-1]))

        def write(total: Tensor, add: bool) -> None:
            total = total.view(weight.shape)
            (total if add else total.zero_()).index_add_(0, rows, sums.to(total.dtype))

        main_gradient_of(weight).add_written(write)
        return None, None


def _sums_by_id(ids: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """(T,) ids and (T, H) -> ids in order, and at the first of each the sum of its rows, rounded as
    autograd's gradient; zeros at the others.
    """
    in_order = ids.sort().values
    first = torch.searchsorted(in_order, ids)
    if grad.device.type == "cpu" and grad.dtype in (torch.bfloat16, torch.float16):
        sums = torch.zeros_like(grad, dtype=torch.float32)
        return in_order, sums.index_add_(0, first, grad.float()).to(grad.dtype)
    return in_order, torch.ops.aten.embedding_dense_backward(grad, first, len(ids), -1, False)


def check_ids(ids: Tensor, size: int) -> None:
    """ValueError when an id is outside [0, size); call it for CPU tensors only."""
    if ids.numel() == 0:
        return
    low, high = ids.aminmax()
    if low < 0 or high >= size:
        raise ValueError(
            f"ids from {int(low)} to {int(high)} were looked up in a table of {size} rows;"
            f" use ids in [0, {size})"
        )
