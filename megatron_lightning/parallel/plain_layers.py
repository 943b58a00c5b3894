"""torch's own `nn.Linear` and `nn.Embedding` with the borders that a split needs.

A user's module becomes one of these by a change of its class, in place: its name, parameters,
hooks and every reference to it stay, and `isinstance` checks against torch's class hold.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lightning.parallel.column import (
    ColumnInput,
    DefersWeightGradient,
    deferrable_linear,
)
from megatron_lightning.parallel.main_gradient import summing_linear
from megatron_lightning.parallel.quantized.products import QuantizedProducts
from megatron_lightning.parallel.row import RowOutput

Border = Callable[[Tensor], Tensor]
"""What a layer does to its input or output; None for nothing."""


def bordered_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    before: Border | None,
    sink: DefersWeightGradient | None = None,
    *,
    sums: bool = False,
    after: Border | None = None,
) -> Tensor:
    """`after(F.linear(before(x), weight, bias))`, fused where the borders can be.

    With a `sink` the weight's gradient may be put off; with `sums` it goes to its main gradient.
    """
    if isinstance(after, RowOutput) and bias is None and sink is None:
        x, before = x if before is None else before(x), None
        y = after.linear(x, weight, sums=sums)
        if y is not None:
            return y
    y = _before_and_linear(x, weight, bias, before, sink, sums=sums)
    return y if after is None else after(y)


def _before_and_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    before: Border | None,
    sink: DefersWeightGradient | None,
    *,
    sums: bool,
) -> Tensor:
    if isinstance(before, ColumnInput):
        return before.linear(x, weight, bias, sink, sums=sums)
    x = x if before is None else before(x)
    if sums and sink is None and not torch.is_autocast_enabled(x.device.type):
        return summing_linear(x, weight, bias)
    return F.linear(x, weight, bias) if sink is None else deferrable_linear(x, weight, bias, sink)


class SplitLinear(nn.Linear):
    """`nn.Linear` whose weight may be a part of the whole one."""

    before: Border | None = None
    after: Border | None = None
    sums_output: bool = False
    """True when the output is a partial sum: the bias is added behind `after`, hence once."""
    weight_sink: DefersWeightGradient | None = None
    """Set when the schedule splits backwards."""
    quantized: QuantizedProducts | None = None
    """Set where the layer's products run in low precision."""
    takes_whole: tuple[str, int] | None = None
    """Of a column-split layer, which takes the whole input: its path, and the tensor ranks."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features); sizes are those of the weight held.

        ValueError where a column-split layer gets features that were split before.
        """
        if self.takes_whole is not None and input.shape[-1] != self.weight.shape[1]:
            raise ValueError(self._split_input(*self.takes_whole, input.shape[-1]))
        apart = self.quantized or self.weight_sink
        if apart is None:
            return self._forward(input)
        return apart.run(self._forward, input, sums=False)

    def _split_input(self, path: str, size: int, features: int) -> str:
        wanted = self.weight.shape[1]
        told = (
            f"plan.splits: {path}.weight is split by column(), so the layer takes its whole input"
            f" of {wanted} features, and gets {features}"
        )
        if features * size != wanted:
            return f"{told}; check the sizes of the layers before it"
        return (
            f"{told}: the part of one of {size} tensor ranks, which a column-split layer before it"
            " gives; split this one by row(), or that one by column(gather_output=True)"
        )

    def _forward(self, input: Tensor) -> Tensor:
        bias = None if self.sums_output else self.bias
        if self.quantized is not None:
            y = self.quantized(input, self.weight, bias, self.before, sums=False, after=self.after)
        else:
            y = bordered_linear(
                input, self.weight, bias, self.before, self.weight_sink, after=self.after
            )
        return y if self.bias is None or not self.sums_output else y + self.bias


class SplitEmbedding(nn.Embedding):
    """`nn.Embedding` that may hold a part of the rows, or see a part of the sequence."""

    before: Border | None = None
    after: Border | None = None
    vocabulary_offset: int | None = None
    """First row held when the rows are split; None when the table is whole."""

    def forward(self, input: Tensor) -> Tensor:
        """(*ids) -> (*ids, embedding_dim). Ids of rows that no rank holds give zeros."""
        ids = input if self.before is None else self.before(input)
        if self.vocabulary_offset is None:
            x = super().forward(ids)
        else:
            local = ids - self.vocabulary_offset
            elsewhere = (local < 0) | (local >= self.weight.shape[0])
            x = F.embedding(local.masked_fill(elsewhere, 0), self.weight, self._own_padding())
            x = x.masked_fill(elsewhere[..., None], 0.0)
        return x if self.after is None else self.after(x)

    def _own_padding(self) -> int | None:
        """`padding_idx`, whose row gets no gradient, among the rows held."""
        if self.padding_idx is None or self.vocabulary_offset is None:
            return None
        local = self.padding_idx - self.vocabulary_offset
        return local if 0 <= local < self.weight.shape[0] else None


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: SplitLinear,
    nn.Embedding: SplitEmbedding,
}


def is_plain(module: nn.Module) -> bool:
    """True for a module that `adopt` can change (exactly torch's class, not a subclass)."""
    return type(module) in _CLASSES


def adopt(module: nn.Module) -> None:
    """Turn torch's own linear or embedding into the one with borders; leave any other as it is."""
    module.__class__ = _CLASSES.get(type(module), type(module))


def plain_problem(module: nn.Module, tensor_size: int) -> str | None:
    """Why the rows of this `nn.Embedding` can't be split, or None."""
    if not isinstance(module, nn.Embedding):
        return None
    used = [
        f"{name}={value}"
        for name, value, default in (
            ("max_norm", module.max_norm, None),
            ("scale_grad_by_freq", module.scale_grad_by_freq, False),
            ("sparse", module.sparse, False),
        )
        if value != default
    ]
    if not used:
        return None
    return f"nn.Embedding with {', '.join(used)} can't be split over {tensor_size} tensor ranks"
