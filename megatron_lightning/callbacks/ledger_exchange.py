"""How the ranks of a run bring their counts together, and notice when they disagree.

Two small reductions between CPUs: the greatest of a few numbers (which epochs occur, whether ranks
hold the same), then the sum of a table of counts by source and epoch. Only one rank of each model
copy adds to the sum; that the others have read the same is compared.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_lightning.strategies import MegatronStrategy

Sums = dict[tuple[str, int], NDArray[np.int64]]
"""Counts, (fields,), by source and epoch; the first one is positive."""
_NONE = -(2**62)


def digest(sums: Sums) -> int:
    """A number below 2^62 that is the same for the same counts."""
    text = repr([(key, each.tolist()) for key, each in sorted(sums.items())])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


class _Ranks(NamedTuple):
    """Who counts with whom."""

    group: Any
    device: torch.device
    copy: int
    """Number of this rank's model copy."""
    copies: int
    counts: bool
    """Whether this rank stands for its copy."""


def _ranks(trainer: L.Trainer) -> _Ranks:
    strategy = trainer.strategy
    if isinstance(strategy, MegatronStrategy):
        mesh = strategy.mesh
        leads = mesh.tp.is_first and mesh.pp.is_first and mesh.cp.is_first
        return _Ranks(mesh.control_group, torch.device("cpu"), mesh.dp.rank, mesh.dp.size, leads)
    return _Ranks(None, strategy.root_device, trainer.global_rank, trainer.world_size, True)


def sum_over_ranks(
    trainer: L.Trainer, own: Sums, numbers: NDArray[np.int64], totals: int, fields: int
) -> tuple[Sums, NDArray[np.int64]]:
    """Returns the sums over model copies of counts (of `fields` fields) and of further numbers.

    `totals` is a number that all ranks should hold. RuntimeError, on all ranks, if they do not, or
    if the ranks of a model copy have counted differently.
    """
    if trainer.world_size == 1:
        return own, numbers
    ranks = _ranks(trainer)
    names = _names(trainer)
    epochs = [epoch for _, epoch in own]
    own_digest = digest({**own, ("", 0): numbers})
    extremes = torch.full((4 + 2 * ranks.copies,), _NONE, dtype=torch.int64)
    extremes[:4] = torch.tensor(
        [max(epochs, default=_NONE), -min(epochs, default=-_NONE), totals, -totals]
    )
    extremes[4 + 2 * ranks.copy :][:2] = torch.tensor([own_digest, -own_digest])
    extremes = _all_reduce(extremes, dist.ReduceOp.MAX, ranks)
    _check_agreement(extremes[2:].view(-1, 2))
    last, first = int(extremes[0]), -int(extremes[1])
    first = min(first, last + 1)
    count = max(last + 1 - first, 0) if last != _NONE else 0
    table = torch.zeros(len(names), count, fields, dtype=torch.int64)
    flat = torch.zeros(table.numel() + len(numbers), dtype=torch.int64)
    if ranks.counts:
        for (source, epoch), sums in own.items():
            table[names.index(source), epoch - first] = torch.from_numpy(sums)
        flat = torch.cat([table.flatten(), torch.from_numpy(numbers)])
    flat = _all_reduce(flat, dist.ReduceOp.SUM, ranks)
    table = flat[: table.numel()].view_as(table).numpy()
    found = {
        (names[source], first + epoch): table[source, epoch].copy()
        for source, epoch in np.argwhere(table[..., 0] > 0).tolist()
    }
    return found, flat[-len(numbers) :].numpy()


def _names(trainer: L.Trainer) -> list[str]:
    """Names of the sources of the training data, the same on all ranks."""
    loader: Any = trainer.train_dataloader
    return [] if loader is None else list(dict.fromkeys(loader.source_names))


def _all_reduce(values: torch.Tensor, op: Any, ranks: _Ranks) -> torch.Tensor:
    sent = values.to(ranks.device)
    dist.all_reduce(sent, op, group=ranks.group)
    return sent.cpu()


def _check_agreement(pairs: torch.Tensor) -> None:
    """`pairs`: the greatest and, negated, the least number that ranks hold; first for all ranks,
    then for each model copy.
    """
    wrong = [row for row, (most, least) in enumerate(pairs.tolist()) if most != -least]
    if 0 in wrong:
        raise RuntimeError("TokenLedger: ranks have loaded different counts from the checkpoint")
    if wrong:
        raise RuntimeError(
            f"TokenLedger: the ranks of one model copy have read different samples (data-parallel "
            f"ranks {[row - 1 for row in wrong]}); give them the same data, options and seed"
        )
