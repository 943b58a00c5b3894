"""Losses and the bias that keep experts equally busy.

Load-balancing loss of Switch Transformers (arXiv 2101.03961, equations 4 to 6), for K experts a
token; z-loss of ST-MoE (arXiv 2202.08906, equation 5); balance without a loss (arXiv 2408.15664).

Such a loss is never added to the model's. It acts through an autograd function on the router's
probabilities that adds its gradient on their way back, times the weight that the micro-batch's loss
has in the window (`AuxiliaryWeight`). So the gradient is that of "mean loss + coefficient x mean
auxiliary loss" in every layout and accumulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.layers.moe.tokens import RoutedTokens
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.collectives import all_reduce_


class AuxiliaryWeight:
    """By what the losses of the micro-batch that is in forward now are multiplied. One object for
    the routers of a rank; the runtime sets it before each forward.
    """

    def __init__(self) -> None:
        self.value: Tensor | float = 1.0
        self._stays = False

    def hold(self, device: torch.device) -> None:
        """Keep the value in one place of the device's memory from now on: CUDA graphs read it
        there. Each micro-batch's backward has to come before the next one's forward then.
        """
        self.value = torch.ones((), dtype=torch.float64, device=device)
        self._stays = True

    def set(self, value: Tensor | float) -> None:
        """The value for the forwards that come."""
        if not self._stays:
            self.value = value
            return
        assert isinstance(self.value, Tensor)
        if isinstance(value, Tensor) and value.device == self.value.device:
            self.value.copy_(value)
        else:
            self.value.fill_(float(value))

    def __deepcopy__(self, memo: dict[int, Any]) -> AuxiliaryWeight:
        """Itself: copies of a network (weight averaging) run no backward."""
        return self


def attach_loss(carrier: Tensor, loss: Tensor, weight: Tensor | float) -> Tensor:
    """Return `carrier`, with whose gradient that of weight * `loss` is computed too."""
    return _Attach.apply(carrier, loss, weight)


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, loss: Tensor, weight: Tensor | float) -> Tensor:
        # Not among the saved tensors: those of a recomputed region are made anew, when the weight
        # may be another micro-batch's.
        ctx.weight = weight
        ctx.loss = (loss.dtype, loss.device)
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (dtype, device), weight = ctx.loss, ctx.weight
        if isinstance(weight, Tensor):
            return grad, weight.to(dtype=dtype, device=device), None
        return grad, torch.full((), weight, dtype=dtype, device=device), None


def balance_loss(scores: Tensor, tokens: Tensor, num_tokens: int, topk: int) -> Tensor:
    """E * sum over experts of (share of the places) * (mean score); 1 when both are even.

    `scores` (T, ..., E) with sum 1 of this rank's tokens; `tokens` (..., E) how many of all ranks'
    `num_tokens` tokens were sent to each expert. Gives this rank's part: the parts of all ranks add
    up.
    """
    share = tokens.to(scores.dtype) / (num_tokens * topk)
    return balance_loss_of_shares(scores, share, num_tokens)


def balance_loss_of_shares(scores: Tensor, share: Tensor, num_tokens: int) -> Tensor:
    """`balance_loss` with the experts' shares (..., E), of sum 1, given; mean over leading dims."""
    mean_score = scores.sum(0) / num_tokens  # (..., E)
    return scores.shape[-1] * (mean_score * share).sum(-1).mean()


def z_loss(logits: Tensor, tokens: RoutedTokens) -> Tensor:
    """Mean squared log-sum-exp over the tokens of all ranks, this rank's part."""
    squares = torch.logsumexp(logits, dim=-1).square()
    return tokens.without_padding(squares).sum() / tokens.num_tokens


def summed(tokens: Tensor, axis: MeshAxis) -> Tensor:
    """Counts of all ranks of the axis."""
    return all_reduce_(tokens.clone(), axis) if axis.size > 1 else tokens


@torch.no_grad()
def update_expert_biases_(biases: Sequence[Tensor], tokens: Tensor, rate: float) -> None:
    """Move each expert's bias, (E,) of each layer, by `rate` towards an even load: up where it had
    fewer than the layer's mean of `tokens` (layers, E), down where more.
    """
    load = tokens.to(torch.float64)
    steps = torch.sign(load.mean(-1, keepdim=True) - load).to(biases[0].dtype)
    torch._foreach_add_(list(biases), list(steps.unbind()), alpha=rate)


@torch.no_grad()
def update_expert_shares_(shares: Sequence[Tensor], tokens: Tensor) -> None:
    """Make each expert's share, (E,) of each layer, that of `tokens` (layers, E); layers without
    tokens keep theirs.
    """
    load = tokens.to(torch.float64)
    total = load.sum(-1, keepdim=True)
    found = torch.where(total > 0, load / total.clamp(min=1), torch.stack(list(shares)))
    torch._foreach_copy_(list(shares), list(found.unbind()))
