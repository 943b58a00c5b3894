"""What routers need of a run: the weight of a micro-batch's losses, and after a window its loads.

The bias that balances experts without a loss, and the shares that the global auxiliary loss takes,
follow from how many tokens each expert was sent in the whole window, on all ranks. They are updated
once a window, so they don't depend on how it was cut into micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron_lightning.layers.moe.balance import (
    AuxiliaryWeight,
    update_expert_biases_,
    update_expert_shares_,
)
from megatron_lightning.layers.moe.router import Router
from megatron_lightning.layers.moe.statistics import reset_all
from megatron_lightning.parallel.collectives import all_reduce_
from megatron_lightning.parallel.mesh import ParallelMesh


class ExpertBalance:
    """The routers of this rank's part of a model; without any it does nothing."""

    def __init__(self, module: nn.Module, mesh: ParallelMesh, *, sequence_parallel: bool) -> None:
        """Connect the routers in `module`: with what axis they share a micro-batch's tokens."""
        self._mesh = mesh
        self._weight = AuxiliaryWeight()
        self._routers = [part for part in module.modules() if isinstance(part, Router)]
        for router in self._routers:
            router.tokens_axis = mesh.axis("tp_cp" if sequence_parallel else "cp")
            router.weight_of_losses = self._weight

    @property
    def has_routers(self) -> bool:
        """Whether there are any."""
        return bool(self._routers)

    @property
    def has_losses(self) -> bool:
        """Whether any router has a loss of its own."""
        return any(router.config.has_losses for router in self._routers)

    def begin_forward(self, weight: Tensor | float) -> None:
        """Before a training forward: the factor of the micro-batch's loss in the window's sum."""
        self._weight.set(weight)
        closed = [r.statistics for r in self._routers if r.statistics.is_closed]
        if closed:  # here rather than in the layers, which may be replayed
            reset_all(closed)

    def hold_weight(self) -> None:
        """Let graphs read the factor: see `AuxiliaryWeight.hold`."""
        self._weight.hold(self._mesh.device)

    @torch.no_grad()
    def finish_window(self, *, follow: bool | Tensor = True) -> None:
        """After an optimizer step: move biases and shares by the window's loads, unless it had no
        token with a loss: `follow` is False, or a 0-dim tensor of 0, equal on all ranks. All ranks
        that hold tokens must call it.
        """
        wanted = isinstance(follow, Tensor) or follow
        balanced = [router for router in self._routers if wanted and router.follows_loads]
        if balanced:
            # Tensor ranks may hold equal tokens, which are then counted more than once, all alike.
            tokens = torch.stack([router.statistics.tokens for router in balanced])
            all_reduce_(tokens, self._mesh.axis("dp_cp_tp"))
            if isinstance(follow, Tensor):  # even loads move nothing, nor do those of no token
                tokens *= (follow != 0).to(tokens.dtype)
            _follow(balanced, tokens)
        for router in self._routers:
            router.statistics.close()


def _follow(routers: Sequence[Router], tokens: Tensor) -> None:
    """Buffers of `routers` by their loads, a row of `tokens` each; few kernels for all."""
    rates = dict.fromkeys(router.config.expert_bias_update_rate for router in routers)
    for rate in rates:
        biased = [
            (row, router.expert_bias)
            for row, router in enumerate(routers)
            if router.expert_bias is not None and router.config.expert_bias_update_rate == rate
        ]
        if biased:
            update_expert_biases_([bias for _, bias in biased], _rows(tokens, biased), rate)
    shared = [(row, r.expert_share) for row, r in enumerate(routers) if r.expert_share is not None]
    if shared:
        update_expert_shares_([share for _, share in shared], _rows(tokens, shared))


def _rows(tokens: Tensor, chosen: Sequence[tuple[int, Tensor]]) -> Tensor:
    return torch.stack([tokens[row] for row, _ in chosen]) if len(chosen) < len(tokens) else tokens
