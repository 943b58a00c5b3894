"""What the routers of a run did in one accumulation window, brought together from all ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from megatron_lightning.config.plan import canonical_name
from megatron_lightning.layers.moe.router import Router
from megatron_lightning.parallel.collectives import all_reduce_
from megatron_lightning.parallel.mesh import ParallelMesh

_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertLoad:
    """One layer in one window, over all ranks and micro-batches."""

    tokens: NDArray[np.int64]
    """(E,) tokens that were sent to each expert, before any was dropped."""
    num_tokens: int
    entropy: float
    """Mean over tokens of the entropy of the router's scores, in nats; log(E) is even."""
    dropped_share: float
    """Of the places that tokens asked for."""
    aux_loss: float
    """Mean over micro-batches, times its coefficient; 0 without one."""
    z_loss: float

    @property
    def relative(self) -> NDArray[np.float64]:
        """(E,) load of each expert over the mean one."""
        return self.tokens / max(self.tokens.mean(), 1e-12)


@dataclass(frozen=True, kw_only=True)
class ExchangeTimes:
    """Exchanges of rows between experts' ranks in one window, on one rank."""

    rank: int
    median: float
    """Milliseconds of an exchange, waiting for other ranks included (P50)."""
    p95: float
    total: float
    """Milliseconds of all of the window."""
    count: int


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertReading:
    """All layers after one optimizer step."""

    step: int
    layers: Mapping[str, ExpertLoad]
    """By layer: its number in the network, or the name of a layer elsewhere."""
    exchanges: Sequence[ExchangeTimes]
    """Of each rank that exchanged rows."""

    @property
    def slowest_rank(self) -> int | None:
        """The rank that the others wait for: its own exchanges are the shortest. None without
        exchanges.
        """
        if not self.exchanges:
            return None
        return min(self.exchanges, key=lambda times: times.total).rank


def routers_of(module: nn.Module) -> dict[str, Router]:
    """The routers of this rank by layer, as `ExpertReading` names them."""
    found: dict[str, Router] = {}
    for path, part in module.named_modules():
        if isinstance(part, Router):
            name = canonical_name(f"{path}.")
            hits = _LAYER.findall(name)
            plain = len(hits) == 1 and ".decoder." in f".{name}"
            found[hits[0] if plain else name.rstrip(".")] = part
    return found


def read(
    step: int, routers: Mapping[str, Router], exchanges: Sequence[float], mesh: ParallelMesh
) -> ExpertReading:
    """Bring the windows' sums of all ranks together. All ranks call it, and the device is asked."""
    own: dict[str, ExpertLoad] = {}
    for name, router in routers.items():
        sums = router.statistics
        counts = torch.cat(
            [sums.tokens.double(), torch.stack([sums.num_tokens, sums.dropped]).double()]
        )
        losses = torch.stack([sums.entropy, sums.aux_loss, sums.z_loss]).double()
        forwards = (sums.num_forwards.double() / router.tokens_axis.size).view(1)
        values = all_reduce_(torch.cat([counts, losses, forwards]), mesh.axis("dp_cp_tp"))
        # tensor ranks without sequence parallelism hold equal tokens
        copies = mesh.axis("tp_cp").size // router.tokens_axis.size
        own[name] = _load((values / copies).cpu().numpy(), router.config.router_topk)
    times = [_times(mesh.rank, exchanges)] if exchanges else []
    parts: list[tuple[dict[str, ExpertLoad], list[ExchangeTimes]]] = [(own, times)]
    if mesh.world_size > 1:
        parts = [({}, [])] * mesh.world_size
        sent = own if mesh.axis("dp_cp_tp").is_first else {}  # the others of a stage hold the same
        dist.all_gather_object(parts, (sent, times), group=mesh.control_group)
    layers = {name: load for loads, _ in parts for name, load in loads.items()}
    return ExpertReading(
        step=step,
        layers=dict(sorted(layers.items(), key=lambda item: _place(item[0]))),
        exchanges=[one for _, some in parts for one in some],
    )


def _load(values: NDArray[np.float64], topk: int) -> ExpertLoad:
    *tokens, num_tokens, dropped, entropy, aux_loss, z_loss, forwards = values
    return ExpertLoad(
        tokens=np.array(tokens, np.int64),
        num_tokens=int(num_tokens),
        entropy=entropy / max(num_tokens, 1),
        dropped_share=dropped / max(num_tokens * topk, 1),
        aux_loss=aux_loss / max(forwards, 1e-12),
        z_loss=z_loss / max(forwards, 1e-12),
    )


def _times(rank: int, exchanges: Sequence[float]) -> ExchangeTimes:
    return ExchangeTimes(
        rank=rank,
        median=float(np.percentile(exchanges, 50)),
        p95=float(np.percentile(exchanges, 95)),
        total=float(sum(exchanges)),
        count=len(exchanges),
    )


def _place(name: str) -> tuple[int, int, str]:
    return (0, int(name), "") if name.isdigit() else (1, 0, name)
