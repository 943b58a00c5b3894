"""The experts of a rank: MLPs whose weights are stacked, over rows sorted by expert.

On CUDA in bfloat16 one grouped matrix product does all experts and the host waits for nothing;
elsewhere a loop does one after the other. An expert without rows gets a gradient of zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_lightning.config.model import GPTConfig
from megatron_lightning.config.moe import expert_width
from megatron_lightning.layers.gated_silu import weighted_gated_silu
from megatron_lightning.layers.mlp import activation_of, silu_gated
from megatron_lightning.parallel.random import Constant, Initial, Normal

_ALIGNMENT_BYTES = 16


class DefersGradient(Protocol):
    """A place for what computes a weight's gradient, see `parallel/weight_gradient.py`."""

    def defer_call(self, multiply: Callable[[], Tensor]) -> bool:
        """Keep it for later; False: not now."""
        ...


class LowPrecision(Protocol):
    """Products of stacked experts in low precision, see `parallel/quantized/experts.py`."""

    def __call__(
        self,
        rows: Tensor,
        weight: Tensor,
        counts: Tensor,
        multiply: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
        defer: Callable[[Callable[[], Tensor]], bool] | None,
    ) -> Tensor:
        """See `expert_product`. `multiply` is `expert_weight_gradient`, `defer` of the layer's
        `weight_sink`.
        """
        ...


class ExpertLinear(nn.Module):
    """Row r of expert e: W_e x_r + b_e, with a weight of global shape (E, *output_shape,
    in_features).
    """

    weight_sink: DefersGradient | None = None
    """Set when the schedule splits backwards: may put off the weight's gradient."""
    quantized_experts: LowPrecision | None = None
    """Set where the products run in low precision."""
    adapters: nn.Module | None
    """Low-rank adapters, see `layers/lora.py`: (rows, output, counts, each) -> output."""

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        output_shape: Sequence[int],
        *,
        bias: bool,
        initial: Initial,
        device: str | None = None,
    ) -> None:
        super().__init__()
        shape = (num_experts, *output_shape)
        self.weight = nn.Parameter(torch.empty(*shape, in_features, device=device))
        self.bias = nn.Parameter(torch.empty(*shape, device=device)) if bias else None
        self.adds_bias = True
        """False where ranks that hold other columns sum their outputs, on all of them but the
        first: the bias counts once, and its gradient is whole on each.
        """
        self.initials: dict[str, Initial] = {"weight": initial, "bias": Constant(0.0)}
        self.adapters = None

    def forward(self, rows: Tensor, counts: Tensor, each: int | None = None) -> Tensor:
        """(R, in_features) sorted by expert, (E_local,) rows of each -> (R, *output_shape); shapes
        are those of the tensors held. Rows behind the sum of `counts` may hold anything. `each`:
        how many rows each expert has, where they are equal and known to the host.
        """
        num_experts, *output_shape, in_features = self.weight.shape
        weight = self.weight.view(num_experts, -1, in_features)  # (E, N, in)
        if self.quantized_experts is not None:
            defer = None if self.weight_sink is None else self.weight_sink.defer_call
            multiply = partial(expert_weight_gradient, each=each)
            y = self.quantized_experts(rows, weight, counts, multiply, defer)
        elif self.weight_sink is None:
            y = expert_product(rows, weight, counts, each)
        else:
            y = _PutOff.apply(rows, weight, counts, each, self.weight_sink)
        y = y.unflatten(-1, output_shape)
        return y if self.adapters is None else self.adapters(rows, y, counts, each)

    def bias_rows(self, num_rows: int, counts: Tensor) -> Tensor | None:
        """(R, *output_shape): each row its expert's bias, 0 behind the last; None without bias."""
        if self.bias is None:
            return None
        ends = counts.cumsum(0)
        row = torch.arange(num_rows, device=counts.device)
        expert = torch.searchsorted(ends, row, right=True)
        bias = self.bias if self.adds_bias else self.bias - self.bias.detach()
        biases = bias.index_select(0, expert.clamp(max=len(ends) - 1))
        used = (row < ends[-1]).view(-1, *[1] * (biases.dim() - 1))
        return torch.where(used, biases, torch.zeros_like(biases))

    def extra_repr(self) -> str:
        """Shape held."""
        return f"weight={tuple(self.weight.shape)}, bias={self.bias is not None}"


def can_group(rows: Tensor, weight: Tensor) -> bool:
    """Whether torch's grouped product takes these: CUDA, bfloat16, lines of 16 bytes."""
    sizes = (rows.shape[-1], weight.shape[-2])
    aligned = all(size * rows.element_size() % _ALIGNMENT_BYTES == 0 for size in sizes)
    return rows.is_cuda and rows.dtype == weight.dtype == torch.bfloat16 and aligned


def expert_product(rows: Tensor, weight: Tensor, counts: Tensor, each: int | None = None) -> Tensor:
    """(R, in) by expert, (E, N, in) -> (R, N)."""
    if can_group(rows, weight):
        ends = counts.cumsum(0, dtype=torch.int32)
        return F.grouped_mm(rows, weight.transpose(-2, -1), offs=ends)
    if each is not None:
        return torch.bmm(_stacked(rows, each), weight.transpose(-2, -1)).flatten(0, 1)
    return _one_by_one(rows, weight, counts)


def _stacked(rows: Tensor, each: int) -> Tensor:
    return rows.unflatten(0, (-1, each))  # (E, each, ...)


def expert_weight_gradient(
    grad: Tensor, rows: Tensor, like: Tensor, counts: Tensor, each: int | None = None
) -> Tensor:
    """Gradients (R, N) and inputs (R, in) by expert -> (E, N, in), as `like`."""
    if can_group(rows, like):
        ends = counts.cumsum(0, dtype=torch.int32)
        return F.grouped_mm(grad.t(), rows, offs=ends)
    if each is not None:
        return torch.bmm(_stacked(grad, each).transpose(-2, -1), _stacked(rows, each))
    sizes: list[int] = counts.tolist()
    used = sum(sizes)
    pairs = zip(grad[:used].split(sizes), rows[:used].split(sizes), strict=True)
    return torch.stack([dy.t() @ x for dy, x in pairs])


class _PutOff(torch.autograd.Function):
    """`expert_product`, whose weight's gradient may be computed later."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        counts: Tensor,
        each: int | None,
        sink: DefersGradient,
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, counts)
        ctx.each, ctx.sink = each, sink
        return expert_product(rows, weight, counts, each)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        rows, weight, counts = ctx.saved_tensors
        grad_rows = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_rows = expert_product(grad, weight.transpose(-2, -1), counts, ctx.each)
        if ctx.needs_input_grad[1]:
            factors = (grad.contiguous(), rows, weight, counts, ctx.each)
            multiply = partial(expert_weight_gradient, *factors)
            grad_weight = None if ctx.sink.defer_call(multiply) else multiply()
        return grad_rows, grad_weight, None, None, None


def _one_by_one(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    sizes: list[int] = counts.tolist()
    parts = rows.split([*sizes, len(rows) - sum(sizes)])
    done = [F.linear(part, w) for part, w in zip(parts[:-1], weight.unbind(0), strict=True)]
    left = rows.new_zeros(len(parts[-1]), weight.shape[1])
    return torch.cat([*done, left])


class GroupedExperts(nn.Module):
    """fc2(activation(fc1(x))) of each row's expert, weighted; see `MLP` for the gate.

    Global shapes: fc1 [E, 2, F, H] gated or [E, F, H], fc2 [E, H, F]; H is the latent size where
    the config has one.
    """

    def __init__(self, config: GPTConfig, *, device: str | None = None) -> None:
        super().__init__()
        assert config.moe is not None
        width = expert_width(config)
        hidden = config.moe.latent_size or config.hidden_size
        self.activation = activation_of(config)
        self.linear_fc1 = ExpertLinear(
            config.moe.num_experts,
            hidden,
            (2, width) if config.gated_linear_unit else (width,),
            bias=config.add_bias_linear,
            initial=Normal(config.init_method_std),
            device=device,
        )
        self.linear_fc2 = ExpertLinear(
            config.moe.num_experts,
            width,
            (hidden,),
            bias=config.add_bias_linear,
            initial=Normal(config.init_method_std / math.sqrt(2 * config.num_layers)),
            device=device,
        )

    def waits_for_counts(self, *, padded: bool) -> bool:
        """Whether the host has to know how many rows each expert gets; `padded`: all get equally
        many.
        """
        linears = [m for m in self.modules() if isinstance(m, ExpertLinear)]
        weights = [m.weight.flatten(1, -2) for m in linears]
        return not padded and not all(can_group(w[0], w) for w in weights)

    def forward(
        self, tokens: Tensor, counts: Tensor, probs: Tensor, each: int | None = None
    ) -> Tensor:
        """(R, H) rows sorted by local expert, (E_local,) rows of each, (R,) their weights ->
        (R, H) weighted outputs. Rows behind the sum of `counts` may hold anything, and so do
        their outputs. `each`: see `ExpertLinear.forward`.
        """
        inner = self.linear_fc1(tokens, counts, each)  # (R, F) or gated (R, 2, F)
        bias = self.linear_fc1.bias_rows(len(tokens), counts)
        inner = inner if bias is None else inner + bias
        weight = probs.unsqueeze(-1)
        if self.activation is silu_gated:
            inner = weighted_gated_silu(inner, probs)  # (R, F)
        else:
            inner = _Weighted.apply(inner, probs, self.activation)
        output = self.linear_fc2(inner, counts, each)
        bias = self.linear_fc2.bias_rows(len(tokens), counts)
        return output if bias is None else output + (bias * weight).to(output.dtype)


class _Weighted(torch.autograd.Function):
    """activation(inner) * probs, (R, F) in the dtype of `inner`, which alone is kept with `probs`:
    the activation is computed again for the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, inner: Tensor, probs: Tensor, activation: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.save_for_backward(inner, probs)
        ctx.activation = activation
        return (activation(inner) * probs.unsqueeze(-1)).to(inner.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        inner, probs = ctx.saved_tensors
        with torch.enable_grad():
            inner = inner.detach().requires_grad_()
            active = ctx.activation(inner)
        weighted = (grad * probs.unsqueeze(-1)).to(active.dtype)
        (grad_inner,) = torch.autograd.grad(active, inner, weighted)
        grad_probs = (grad * active.detach()).sum(-1, dtype=probs.dtype)
        return grad_inner, grad_probs, None
