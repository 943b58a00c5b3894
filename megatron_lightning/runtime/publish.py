"""Losses and logged numbers: from the last pipeline stage of every data-parallel rank to all
ranks, in one reduction.

Which keys are logged is agreed on first, through one small CPU reduction a step, since other
stages never see the calls and a rank that logs other keys than its peers would otherwise hang the
job or mix up numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.runtime.ballot import Ballot
from megatron_lightning.runtime.metrics import LogKey

Total = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Published:
    """What a run gave, equal on every rank. All tensors are float64 scalars on the mesh's
    device.
    """

    loss_sum: Tensor
    """Sum of weight x loss over micro-batches and data-parallel ranks."""
    weight: Tensor
    """Sum of the weights: tokens in token mode, batches in micro-batch mode."""
    logs: Mapping[LogKey, Total]

    @property
    def loss(self) -> Tensor:
        """Weighted mean loss, float32; 0 where the total weight is 0."""
        safe = torch.where(self.weight > 0, self.weight, torch.ones_like(self.weight))
        return (self.loss_sum / safe).to(torch.float32)


class Publisher:
    """Makes every rank know what the last stages computed. One per strategy; caches key lists by
    signature.
    """

    def __init__(self, mesh: ParallelMesh, ballot: Ballot | None = None) -> None:
        self._mesh = mesh
        self._ballot = ballot if mesh.world_size > 1 else None
        self._axis = mesh.axis("pp_dp_cp")
        self._known: dict[int, tuple[LogKey, ...]] = {}

    def publish(
        self,
        loss: Total | None,
        logs: Mapping[LogKey, Total] | None,
        batch_mark: int | None = None,
    ) -> Published:
        """Reduce `loss` (sum, weight) and `logs`; ranks that hold no last stage pass None for both.

        Raises ValueError when last stages logged different keys, or when the ranks of a model copy
        ran different batches: `batch_mark` is then not the same on all of them.
        """
        device = self._mesh.device
        if self._axis.size == 1:
            assert loss is not None
            assert logs is not None
            if batch_mark is not None or self._ballot is not None:
                self._vote(0, batch_mark)
            return Published(loss_sum=loss[0], weight=loss[1], logs=logs)
        keys = self._agree(None if logs is None else tuple(logs), batch_mark)
        summed = torch.zeros(2 + 2 * len(keys), dtype=torch.float64, device=device)
        extremes = torch.full((len(keys),), -torch.inf, dtype=torch.float64, device=device)
        if loss is not None and logs is not None:
            rows = [loss, *((_zero_extreme(key, logs[key])) for key in keys)]
            summed.copy_(torch.stack([entry for row in rows for entry in row]))
            if keys:
                extremes.copy_(torch.stack([_as_maximum(key, logs[key][0]) for key in keys]))
        dist.all_reduce(summed, group=self._axis.group)
        if any(key.reduction in ("max", "min") for key in keys):
            dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self._axis.group)
        totals = {key: _total(key, i, summed, extremes) for i, key in enumerate(keys)}
        return Published(loss_sum=summed[0], weight=summed[1], logs=totals)

    def _vote(self, signature: int | None, batch_mark: int | None) -> tuple[int, int]:
        """Highest and lowest signature of keys; ValueError where a copy's marks differ."""
        lowest = torch.iinfo(torch.int64).min
        mine = (signature, *(None,) * self._mesh.dp.size)
        if batch_mark is not None:
            before = self._mesh.dp.rank
            mine = (signature, *mine[1 : 1 + before], batch_mark, *mine[2 + before :])
        rows = [[lowest] * 2 if vote is None else [vote, -vote] for vote in mine]
        carried = [] if self._ballot is None else self._ballot.rows()
        votes = torch.tensor([*rows, *carried])
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._mesh.control_group)
        (agreed, other), *marks = votes[: len(rows)].tolist()
        if self._ballot is not None:
            self._ballot.take(votes[len(rows) :].tolist())
        torn = [copy for copy, (high, low) in enumerate(marks) if high != lowest and high != -low]
        if torn:
            raise ValueError(_torn_message(torn))
        return agreed, -other

    def _agree(self, own: tuple[LogKey, ...] | None, batch_mark: int | None) -> tuple[LogKey, ...]:
        """Key list of the last stages, on every rank."""
        agreed, other = self._vote(None if own is None else _signature(own), batch_mark)
        if agreed == other and agreed in self._known:
            return self._known[agreed]
        everyone: list[tuple[LogKey, ...] | None] = [None] * self._mesh.world_size
        dist.all_gather_object(everyone, own, group=self._mesh.control_group)
        if agreed != other:
            raise ValueError(_mismatch_message(everyone))
        found = next(keys for keys in everyone if keys is not None)
        self._known[agreed] = found
        return found


def _signature(keys: Sequence[LogKey]) -> int:
    digest = hashlib.blake2b(repr(keys).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def _torn_message(copies: Sequence[int]) -> str:
    return (
        f"the ranks of one model copy got different batches (data-parallel index {copies}): tensor,"
        f" pipeline and context ranks must work on the same samples. Samplers are kept equal; draw"
        f" random changes of samples, and iterable data sets, from a generator seeded by the"
        f" sample's index or by epoch, not from the process' random state"
    )


def _mismatch_message(everyone: Sequence[tuple[LogKey, ...] | None]) -> str:
    names = {
        rank: sorted(key.name for key in keys)
        for rank, keys in enumerate(everyone)
        if keys is not None
    }
    return (
        f"self.log: ranks logged different keys in one step: {names}; log the same keys on every "
        f"rank, with the same"
        " options (rank_zero_only=True is for what one rank alone logs)"
    )


def _zero_extreme(key: LogKey, total: Total) -> Total:
    return total if key.reduction in ("mean", "sum") else (torch.zeros_like(total[0]), total[1])


def _as_maximum(key: LogKey, value: Tensor) -> Tensor:
    return -value if key.reduction == "min" else value


def _total(key: LogKey, index: int, summed: Tensor, extremes: Tensor) -> Total:
    value, weight = summed[2 + 2 * index], summed[3 + 2 * index]
    if key.reduction == "max":
        value = extremes[index]
    elif key.reduction == "min":
        value = -extremes[index]
    return value, weight
