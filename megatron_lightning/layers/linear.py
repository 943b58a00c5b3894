"""The linear layer of the torch back end.

It reads like one of a single GPU. Tensor parallelism narrows its weight and puts functions at its
two borders: `before` makes the whole input (copy, or gather of the sequence), `after` sums partial
outputs (all-reduce, or reduce-scatter of the sequence); see `parallel/tensor.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron_lightning.layers.gated_linear import (
    gated_linear,
    gated_scattered_linear,
    gated_summed_linear,
)
from megatron_lightning.layers.gated_silu import gated_silu
from megatron_lightning.parallel.column import DefersWeightGradient
from megatron_lightning.parallel.plain_layers import Border, bordered_linear
from megatron_lightning.parallel.quantized.products import QuantizedProducts
from megatron_lightning.parallel.random import Constant, Initial
from megatron_lightning.parallel.row import RowOutput


class Linear(nn.Module):
    """y = x W^T + b with a weight of global shape (*output_shape, in_features).

    `output_shape` may have several dims, e.g. (2, F) for a gated unit, so that a tensor shard is
    one box; the output's last dims are those of the weight held: (..., *local_output_shape).
    """

    before: Border | None = None
    after: Border | None = None
    sums_output: bool = False
    """True when the output is a partial sum (split input features): the bias is added behind
    `after`, hence once."""
    weight_sink: DefersWeightGradient | None = None
    """Set when the schedule splits backwards: may put off the weight's gradient."""
    sums_weight_gradient: bool = False
    """True when the weight's gradient goes to its main gradient (`parallel/main_gradient.py`)."""
    quantized: QuantizedProducts | None = None
    """Set where the layer's products run in low precision."""
    foreign: tuple[bool, bool] = (False, False)
    """Whether kernels that compiled code can't be fused with write the input, and the gradient of
    the output, so that their largest values are not found on the way."""
    adapters: nn.Module | None
    """Low-rank adapters beside the layer, see `layers/lora.py`: (input, output) -> output."""

    def __init__(
        self,
        in_features: int,
        output_shape: int | Sequence[int],
        *,
        bias: bool,
        initial: Initial,
        device: str | None = None,
    ) -> None:
        super().__init__()
        shape = (output_shape,) if isinstance(output_shape, int) else tuple(output_shape)
        self.weight = nn.Parameter(torch.empty(*shape, in_features, device=device))
        self.bias = nn.Parameter(torch.empty(*shape, device=device)) if bias else None
        self.initials: dict[str, Initial] = {"weight": initial, "bias": Constant(0.0)}
        self.adapters = None

    def forward(self, x: Tensor, *, after_gate: bool = False) -> Tensor:
        """(..., in_features) -> (..., *output_shape); shapes are those of the tensors held.

        With `after_gate` the input is (..., 2, in_features), of which silu(gate) * up passes the
        layer without being kept (`layers/gated_linear.py`); not with adapters or low precision.
        """
        forward = self._after_gate if after_gate else self._forward
        apart = self.quantized or self.weight_sink
        if apart is None:
            y = forward(x)
        else:
            sums = self.sums_weight_gradient or not self.weight.requires_grad
            y = apart.run(forward, x, sums=sums)
        return y if self.adapters is None else self.adapters(x, y)

    def _forward(self, x: Tensor) -> Tensor:
        *output_shape, in_features = self.weight.shape
        weight = self.weight.view(-1, in_features)
        bias = None if self.bias is None else self.bias.view(-1)
        inner_bias = None if self.sums_output else bias
        sums, after = self.sums_weight_gradient, self.after
        # the sum of partial outputs may be one with the product
        fused = after if self.sums_output else None
        after = None if self.sums_output else after
        if self.quantized is not None:
            y = self.quantized(
                x, weight, inner_bias, self.before, sums=sums, after=fused, foreign=self.foreign
            )
        else:
            y = bordered_linear(
                x, weight, inner_bias, self.before, self._sink, sums=sums, after=fused
            )
        y = y.unflatten(-1, output_shape) if len(output_shape) > 1 else y
        if after is not None:
            y = after(y)
        return y if self.bias is None or not self.sums_output else y + self.bias

    @property
    def _sink(self) -> DefersWeightGradient | None:
        sink = self.weight_sink
        return sink if sink is not None and sink.is_asked else None

    def _after_gate(self, x: Tensor) -> Tensor:
        assert self.adapters is None
        assert self.quantized is None
        assert x.shape[-1] == self.weight.shape[-1], "as wide as the rows held: no border before"
        if torch.is_autocast_enabled(x.device.type):
            return self._forward(gated_silu(x))
        weight = self.weight.view(-1, self.weight.shape[-1])
        bias = None if self.bias is None else self.bias.view(-1)
        inner_bias = None if self.sums_output else bias
        sums, after, sink = self.sums_weight_gradient, self.after, self._sink
        fused = after if self.sums_output and sink is None else None
        if isinstance(fused, RowOutput) and fused.overlap.scatters(
            x.select(-2, 0), fused.sequence_dim
        ):
            y = gated_scattered_linear(x, weight, fused.overlap, sums=sums)
        elif isinstance(fused, RowOutput) and fused.sequence_dim is None:
            y = gated_summed_linear(x, weight, fused.overlap, sums=sums)
        else:
            y = gated_linear(x, weight, inner_bias, sink, sums=sums)
            y = y if after is None else after(y)
        return y if self.bias is None or not self.sums_output else y + self.bias

    def extra_repr(self) -> str:
        """Shape held."""
        return f"weight={tuple(self.weight.shape)}, bias={self.bias is not None}"
