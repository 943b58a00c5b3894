"""The router: which experts a token is sent to, with what weights, and the losses that balance
them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_lightning.config.model import GPTConfig
from megatron_lightning.layers.dropout import Jitter
from megatron_lightning.layers.moe.balance import (
    AuxiliaryWeight,
    attach_loss,
    balance_loss,
    balance_loss_of_shares,
    summed,
    z_loss,
)
from megatron_lightning.layers.moe.capacity import over_capacity
from megatron_lightning.layers.moe.exact_linear import exact_linear
from megatron_lightning.layers.moe.permute import count
from megatron_lightning.layers.moe.routing import (
    Routing,
    balance_scores,
    choose,
    chosen_mask,
    evenly,
    probabilities,
    scores_of,
    sinkhorn,
)
from megatron_lightning.layers.moe.statistics import RouterStatistics, is_recomputation
from megatron_lightning.layers.moe.tokens import RoutedTokens
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.random import Constant, Initial, Normal

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


def router_initials(config: GPTConfig) -> dict[str, Initial]:
    """Initial values of a router's parameters."""
    return {"weight": Normal(config.init_method_std), "bias": Constant(0.0)}


class Router(nn.Module):
    """(S, B, H) -> `Routing` of its T = S * B tokens.

    `tokens_axis`: ranks that hold other tokens of the same micro-batch (parts of the sequence);
    counts and losses are over all of them. `expert_bias` [E] float32 and, for global_aux_loss,
    `expert_share` [E] are buffers that the runtime updates after each window.
    """

    expert_bias: Tensor | None
    expert_share: Tensor | None

    def __init__(self, config: GPTConfig, *, device: str | None = None) -> None:
        super().__init__()
        assert config.moe is not None
        self.config = config.moe
        num_experts = config.moe.num_experts
        self.weight = nn.Parameter(torch.empty(num_experts, config.hidden_size, device=device))
        self.bias = (
            nn.Parameter(torch.empty(num_experts, device=device))
            if config.moe.router_bias
            else None
        )
        self.initials = router_initials(config)
        global_loss = (
            config.moe.load_balancing == "global_aux_loss" and config.moe.aux_loss_coeff > 0
        )
        for name, wanted in (
            ("expert_bias", config.moe.expert_bias),
            ("expert_share", global_loss),
        ):
            buffer = torch.empty(num_experts, device=device) if wanted else None
            self.register_buffer(name, buffer)
        if device != "meta":
            self.reset_buffers()
        self.jitter = Jitter(config.moe.input_jitter)
        self.tokens_axis = MeshAxis(name="tp_cp")
        self.weight_of_losses = AuxiliaryWeight()
        self._statistics: RouterStatistics | None = None

    @torch.no_grad()
    def reset_buffers(self) -> None:
        """Begin with no bias and even shares."""
        if self.expert_bias is not None:
            self.expert_bias.zero_()
        if self.expert_share is not None:
            self.expert_share.fill_(1.0 / self.config.num_experts)

    @property
    def follows_loads(self) -> bool:
        """Whether a buffer changes with the loads of each window."""
        return self.expert_bias is not None or self.expert_share is not None

    @property
    def statistics(self) -> RouterStatistics:
        """Sums over this window's training forwards."""
        device = self.weight.device
        if self._statistics is None or self._statistics.tokens.device != device:
            self._statistics = RouterStatistics.zeros(self.config.num_experts, device)
        return self._statistics

    def forward(self, hidden: Tensor) -> Routing:
        """(S, B, H) -> experts and weights (T, K), token t = s * B + b."""
        tokens = RoutedTokens.of(
            hidden,
            self.jitter.stream,
            self.tokens_axis,
            with_places=self.config.capacity_factor is not None,
        )
        logits = self.logits(hidden)  # (T, E)
        if self.config.load_balancing == "forced":
            experts = evenly(len(logits), self.config, logits.device)  # (T, K)
        else:
            experts = choose(self.selection(logits.detach(), tokens.padding), self.config)
        probs = probabilities(logits, experts, self.config)
        if self.training and torch.is_grad_enabled():
            probs, aux, z = self._with_losses(probs, logits, experts, tokens)
        else:
            aux = z = None
        capacity = self.config.capacity(tokens.num_tokens)
        dropped = None
        if capacity is not None:
            dropped = over_capacity(
                probs.detach(), experts, tokens, self.config, capacity, self.tokens_axis
            )
        if self.training and torch.is_grad_enabled() and not is_recomputation():
            self._count(logits.detach(), experts, dropped, tokens, aux, z)
        if not self.config.pad_to_capacity:
            capacity = None
        elif capacity is not None:  # of the whole micro-batch; no expert gets more than is here
            capacity = min(capacity, len(experts))
        return Routing(probs=probs, experts=experts, dropped=dropped, capacity=capacity)

    def logits(self, hidden: Tensor) -> Tensor:
        """(S, B, H) -> (T, E) in the router's dtype."""
        dtype = _DTYPES[self.config.router_dtype]
        if self.training and self.jitter.draws:
            hidden = self.jitter(hidden.to(dtype))
        return exact_linear(hidden.flatten(0, 1), self.weight, self.bias, dtype)

    @torch.no_grad()
    def selection(self, logits: Tensor, padding: Tensor | None = None) -> Tensor:
        """(T, E) logits -> values by which experts are chosen, larger is better; before groups.
        `padding`: (T,) bool, rows that are no tokens.
        """
        config = self.config
        if config.load_balancing == "sinkhorn" and self.training:
            return sinkhorn(logits, self.tokens_axis, padding)
        if config.router_score_function == "softmax" and not config.router_pre_softmax:
            return logits
        scores = scores_of(logits, config)
        return scores if self.expert_bias is None else scores + self.expert_bias

    def _with_losses(
        self, probs: Tensor, logits: Tensor, experts: Tensor, tokens: RoutedTokens
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """`probs` that carry the losses' gradients, and the losses."""
        config, weight = self.config, self.weight_of_losses.value
        aux = z = None
        if config.aux_loss_coeff > 0:
            aux = config.aux_loss_coeff * self._balance_loss(logits, experts, tokens)
            probs = attach_loss(probs, aux, weight)
        if config.z_loss_coeff > 0:
            z = config.z_loss_coeff * z_loss(logits, tokens)
            probs = attach_loss(probs, z, weight)
        return probs, aux, z

    def _balance_loss(self, logits: Tensor, experts: Tensor, tokens: RoutedTokens) -> Tensor:
        config, axis, num_tokens = self.config, self.tokens_axis, tokens.num_tokens
        scores = tokens.without_padding(balance_scores(logits, config))  # (T, E)
        if config.load_balancing == "global_aux_loss":
            assert self.expert_share is not None
            share = self.expert_share.to(scores.dtype)
            return balance_loss_of_shares(scores, share, num_tokens)
        if config.expert_bias or config.router_num_groups > 1:
            experts = scores.detach().topk(config.router_topk, dim=-1).indices
        chosen = tokens.without_padding(chosen_mask(experts, config.num_experts))
        if config.load_balancing == "aux_loss":
            load = summed(chosen.sum(0), axis)
            return balance_loss(scores, load, num_tokens, config.router_topk)
        by_sample = (-1, tokens.num_samples)
        load = summed(chosen.unflatten(0, by_sample).sum(0), axis)  # (B, E)
        length = num_tokens // tokens.num_samples
        return balance_loss(scores.unflatten(0, by_sample), load, length, config.router_topk)

    def _count(
        self,
        logits: Tensor,
        experts: Tensor,
        dropped: Tensor | None,
        tokens: RoutedTokens,
        aux: Tensor | None,
        z: Tensor | None,
    ) -> None:
        num_experts = self.config.num_experts
        sent = tokens.without_padding(experts, num_experts).flatten()
        self.statistics.add(
            tokens=count(sent, num_experts + 1)[:num_experts],
            num_tokens=len(experts) if tokens.padding is None else (~tokens.padding).sum(),
            dropped=None if dropped is None else tokens.without_padding(dropped),
            scores=tokens.without_padding(balance_scores(logits, self.config)),
            aux_loss=aux,
            z_loss=z,
        )

    def extra_repr(self) -> str:
        """Sizes and choices."""
        config = self.config
        return (
            f"experts={config.num_experts}, topk={config.router_topk},"
            f" scores={config.router_score_function}, balance={config.load_balancing}"
        )
