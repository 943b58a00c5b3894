"""The feed-forward half of a transformer layer, plain or gated (GLU variants, arXiv 2002.05202)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lightning.config.model import GPTConfig
from megatron_lightning.layers import quantized_gate
from megatron_lightning.layers.clamped_gate import clamped_gate
from megatron_lightning.layers.gated_silu import gated_silu
from megatron_lightning.layers.hooks import has_hooks
from megatron_lightning.layers.linear import Linear
from megatron_lightning.parallel.random import Normal

if TYPE_CHECKING:
    from megatron_lightning.layers.backend import LayerBackend


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU in its tanh form (GPT-2)."""
    return F.gelu(x, approximate="tanh")


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2 (Primer, arXiv 2109.08668)."""
    return F.relu(x).square()


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "relu": F.relu,
    "silu": F.silu,
    "squared_relu": squared_relu,
}


def activation_of(config: GPTConfig) -> Callable[[Tensor], Tensor]:
    """What stands between the two linear layers: (..., F) -> (..., F), or gated (..., 2, F) with
    the gate first -> (..., F).
    """
    if config.clamp is not None:
        return partial(clamped_gate, alpha=config.clamp.alpha, limit=config.clamp.limit)
    if not config.gated_linear_unit:
        return ACTIVATIONS[config.activation]
    if config.activation == "silu":
        return silu_gated
    return partial(_gated, activation=ACTIVATIONS[config.activation])


def silu_gated(inner: Tensor) -> Tensor:
    """(..., 2, F), gate first -> (..., F)."""
    return gated_silu(inner)  # an operation's object can't be copied with the network


def _gated(inner: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    gate, up = inner.unbind(-2)
    return activation(gate) * up


class Activation(nn.Module):
    """What stands between the two linear layers, see `activation_of`."""

    recomputed: bool = False
    """True: the second layer keeps this one's input in place of its own (`Linear.after_gate`), and
    this one is not called while it has no hooks."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.function = activation_of(config)

    @property
    def can_be_recomputed(self) -> bool:
        """Whether the second layer knows how to."""
        return self.function is silu_gated

    def forward(self, inner: Tensor) -> Tensor:
        """(..., F) or gated (..., 2, F) -> (..., F)."""
        return self.function(inner)


class MLP(nn.Module):
    """fc2(activation(fc1(x))), or gated: fc2(activation(gate) * up), where fc1's weight is [2, F,
    H], gate first. See `activation_of`.
    """

    def __init__(
        self, config: GPTConfig, backend: LayerBackend, *, device: str | None = None
    ) -> None:
        super().__init__()
        self.gated = config.gated_linear_unit
        self.activation = Activation(config)
        width = config.ffn_hidden_size
        self.linear_fc1 = backend.linear(
            config.hidden_size,
            (2, width) if self.gated else width,
            bias=config.add_bias_linear,
            initial=Normal(config.init_method_std),
            device=device,
        )
        self.linear_fc2 = backend.linear(
            width,
            config.hidden_size,
            bias=config.add_bias_linear,
            initial=Normal(config.init_method_std / math.sqrt(2 * config.num_layers)),
            device=device,
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """(S, B, H) -> (S, B, H)."""
        first, second = self.linear_fc1, self.linear_fc2
        if type(first) is Linear and type(second) is Linear:
            plain = self.activation.can_be_recomputed and not self.activation.recomputed
            if plain and quantized_gate.fits(first, second, activation=self.activation):
                return quantized_gate.gated_mlp(hidden, first, second)
        inner = self.linear_fc1(hidden)  # (S, B, F) or gated (S, B, 2, F)
        left_out = self.activation.recomputed and torch.is_grad_enabled()
        if left_out and not has_hooks(self.activation):
            return self.linear_fc2(inner, after_gate=True)
        return self.linear_fc2(self.activation(inner))
