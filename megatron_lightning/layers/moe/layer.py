"""A layer of experts in place of the MLP: route, dispatch, compute, combine."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron_lightning.config.model import GPTConfig
from megatron_lightning.layers.mlp import MLP
from megatron_lightning.layers.moe.dispatcher import Known, LocalDispatcher, TokenDispatcher
from megatron_lightning.layers.moe.experts import GroupedExperts
from megatron_lightning.layers.moe.router import Router
from megatron_lightning.layers.moe.side_stream import SideStream
from megatron_lightning.parallel.random import Normal

if TYPE_CHECKING:
    from megatron_lightning.layers.backend import LayerBackend


class MoELayer(nn.Module):
    """Each token's weighted sum over its K experts, plus the shared expert where there is one.

    `dispatcher` is what expert parallelism exchanges.
    """

    def __init__(
        self, config: GPTConfig, backend: LayerBackend, *, device: str | None = None
    ) -> None:
        super().__init__()
        assert config.moe is not None
        moe, hidden = config.moe, config.hidden_size
        residual = Normal(config.init_method_std / math.sqrt(2 * config.num_layers))
        inner = Normal(config.init_method_std)
        self.router = Router(config, device=device)
        self.experts = GroupedExperts(config, device=device)
        self.dispatcher: TokenDispatcher = LocalDispatcher(moe.num_experts)
        self.side: SideStream | None = None
        """Where the shared expert runs beside the others; None: after them, on one stream."""
        self.latent_down: nn.Module | None = None
        self.latent_up: nn.Module | None = None
        if moe.latent_size:
            self.latent_down = backend.linear(
                hidden, moe.latent_size, bias=False, initial=inner, device=device
            )
            self.latent_up = backend.linear(
                moe.latent_size, hidden, bias=False, initial=residual, device=device
            )
        self.shared_experts: nn.Module | None = None
        self.shared_expert_gate: nn.Module | None = None
        if moe.shared_expert_ffn_hidden_size:
            width = moe.shared_expert_ffn_hidden_size
            shared = replace(config, ffn_hidden_size=width)
            self.shared_experts = MLP(shared, backend, device=device)
        if moe.shared_expert_gate:
            self.shared_expert_gate = backend.linear(
                hidden, 1, bias=False, initial=inner, device=device
            )

    @property
    def is_static(self) -> bool:
        """Whether all sizes follow from the input's, so that the host has nothing to wait for, and
        everything runs on one stream: it may be recorded as a CUDA graph.
        """
        known = self.dispatcher.known(padded=self.router.config.pad_to_capacity)
        if known is Known.NOTHING or self.side is not None:
            return False
        return not self.experts.waits_for_counts(padded=known is Known.EACH)

    def forward(self, hidden: Tensor) -> Tensor:
        """(S, B, H) -> (S, B, H)."""
        if self.shared_experts is None:
            return _eagerly(self, hidden)
        if self.side is not None:
            return _side_by_side(self, hidden)
        return _eagerly(self, hidden) + self.shared(hidden)

    def shared(self, hidden: Tensor) -> Tensor:
        """What the shared expert makes of (S, B, H)."""
        assert self.shared_experts is not None
        output = self.shared_experts(hidden)
        if self.shared_expert_gate is None:
            return output
        return torch.sigmoid(self.shared_expert_gate(hidden)) * output

    def routed(self, hidden: Tensor) -> Tensor:
        """What the experts make of (S, B, H), without the shared one."""
        routing = self.router(hidden)
        tokens = hidden if self.latent_down is None else self.latent_down(hidden)
        dispatched = self.dispatcher.dispatch(tokens.flatten(0, 1), routing)
        output = self.experts(
            dispatched.tokens, dispatched.counts, dispatched.probs, dispatched.each
        )
        output = self.dispatcher.combine(output, dispatched)  # (T, H)
        output = output.view(*hidden.shape[:2], -1)
        return output if self.latent_up is None else self.latent_up(output)


def _both(layer: MoELayer, hidden: Tensor) -> Tensor:
    assert layer.side is not None
    shared = layer.side.begin(layer.shared, hidden)
    return layer.routed(hidden) + shared()


def _routed(layer: MoELayer, hidden: Tensor) -> Tensor:
    return layer.routed(hidden)


# Numbers of tokens change from step to step, and statistics are not part of the mathematics:
# compiled layers leave this out.
_eagerly: Any = torch.compiler.disable(_routed)
_side_by_side: Any = torch.compiler.disable(_both)
