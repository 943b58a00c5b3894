"""What routers need of a run: the weight of a micro-batch's losses, and after a window its loads.

The bias that balances experts without a loss, and the shares that the global auxiliary loss takes,
follow from how many tokens each expert was sent in the whole window, on all ranks. They are updated
once a window, so they don't depend on how it was cut into micro-batches and ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_lightning.layers.moe.balance import AuxiliaryWeight, update_expert_bias_
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

    @property
    def follows_loads(self) -> bool:
        """Whether any router changes with the loads of a window, unless it had no token."""
        return any(router.follows_loads for router in self._routers)

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
    def finish_window(self, *, follow: bool = True) -> None:
        """After an optimizer step: move biases and shares by the window's loads, unless it had no
        token with a loss. All ranks that hold tokens must call it.
        """
        balanced = [router for router in self._routers if follow and router.follows_loads]
        if balanced:
            # Tensor ranks may hold equal tokens, which are then counted more than once, all alike.
            tokens = torch.stack([router.statistics.tokens for router in balanced])
            all_reduce_(tokens, self._mesh.axis("dp_cp_tp"))
            for router, load in zip(balanced, tokens.unbind(), strict=True):
                _follow(router, load)
        for router in self._routers:
            router.statistics.close()


def _follow(router: Router, load: Tensor) -> None:
    if router.expert_bias is not None:
        update_expert_bias_(router.expert_bias, load, router.config.expert_bias_update_rate)
    if router.expert_share is not None:
        share = load.to(torch.float64) / load.sum().clamp(min=1)
        router.expert_share.copy_(torch.where(load.sum() > 0, share, router.expert_share))
