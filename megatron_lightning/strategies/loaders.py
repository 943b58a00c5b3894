"""Which samples a rank reads: data-parallel ranks different ones, the ranks of one model copy the
same.

Lightning puts a DistributedSampler into a plain DataLoader when there are several data-parallel
ranks; that sampler is a function of seed and epoch, so it agrees everywhere. A sampler of the
user's own may draw from the random state of its process, which nobody keeps equal: the order of
its indices is therefore drawn on one rank and sent to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSamplerWrapper
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
)

from megatron_lightning.utils.logging import warn_once

if TYPE_CHECKING:
    from megatron_lightning.strategies.mesh_strategy import MeshStrategy

_DEALT = (DistributedSamplerWrapper, UnrepeatedDistributedSamplerWrapper)
_SAMPLED = 4096
_PRIME = 1_000_003


class SharedSampler:
    """A sampler, or batch sampler, whose order is drawn on one rank and taken over by the others.

    `share` returns what the first rank of the group gave. All ranks of the group must begin an
    epoch of it together. Everything else is the sampler's own.
    """

    def __init__(self, sampler: Any, share: Callable[[Any], Any]) -> None:
        self._sampler = sampler
        self._share = share

    def __iter__(self) -> Iterator[Any]:
        return iter(self._share(list(self._sampler)))

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._sampler, name)


def share_samples(strategy: MeshStrategy, loader: Any) -> Any:
    """Make `loader` read the same samples on all ranks of a model copy, and say so where a sampler
    is replaced. Objects that are no DataLoader, and iterable data sets, are left alone.
    """
    mesh = strategy.mesh
    if mesh.world_size == 1 or not isinstance(loader, DataLoader):
        return loader
    if isinstance(loader.dataset, IterableDataset):
        return loader
    sampler = loader.sampler
    if isinstance(sampler, _DEALT):
        own = sampler.dataset._sampler  # type: ignore[attr-defined]
        if not isinstance(own, SequentialSampler | SharedSampler):
            warn_once(
                f"{type(own).__name__} of a DataLoader: its samples are dealt to {mesh.dp.size} "
                f"data-parallel ranks; Trainer(use_distributed_sampler=False) leaves them to it"
            )
            sampler.dataset._sampler = SharedSampler(own, strategy.broadcast)  # type: ignore[attr-defined]
    elif isinstance(sampler, DistributedSampler):
        assert strategy.lightning_module is not None
        if strategy.lightning_module.trainer.training and sampler.num_replicas > 1:
            rank_zero_info(
                f"The samples of the DataLoader are dealt to {sampler.num_replicas} data-parallel "
                f"ranks by DistributedSampler(shuffle={sampler.shuffle}, seed={sampler.seed})"
            )
    elif strategy.config.model_parallel_size > 1:
        _share_within_copy(strategy, loader)
    return loader


def _share_within_copy(strategy: MeshStrategy, loader: DataLoader[Any]) -> None:
    """Nothing was dealt: each model copy follows the sampler of its own first rank."""
    mesh = strategy.mesh
    leads = mesh.tp.is_first and mesh.pp.is_first and mesh.cp.is_first

    def share(order: Any) -> Any:
        orders: list[Any] = [None] * mesh.world_size
        given = {mesh.dp.rank: order} if leads else {}
        dist.all_gather_object(orders, given, group=mesh.control_group)
        return next(each[mesh.dp.rank] for each in orders if mesh.dp.rank in each)

    batches: Any = loader.batch_sampler
    inner = getattr(batches, "_batch_sampler", batches)  # Lightning's recorder of predicted indices
    standard = type(inner) is BatchSampler
    order = inner.sampler if standard else loader.sampler if inner is None else inner
    if isinstance(order, SequentialSampler | SharedSampler):
        return
    if standard:
        inner.sampler = SharedSampler(order, share)
    else:  # a DataLoader refuses the assignment, as it does that of a sampler
        name = "sampler" if inner is None else "batch_sampler"
        loader.__dict__[name] = SharedSampler(order, share)


def fingerprint(batch: Any) -> int:
    """A number that depends on the tensors of `batch` (on up to about 4096 entries of each), the
    same wherever the batch is the same.
    """
    return begin_fingerprint(batch)()


def begin_fingerprint(batch: Any) -> Callable[[], int]:
    """`fingerprint(batch)`, asked for later: it is computed at once, but nobody waits for the
    device till then.
    """
    sums: list[Tensor] = []
    for leaf in pytree.tree_leaves(batch):
        if not isinstance(leaf, Tensor) or leaf.numel() == 0 or leaf.is_complex():
            continue
        some = leaf.detach().flatten()[:: max(1, leaf.numel() // _SAMPLED)]
        bits = some.double().view(torch.int64) if some.is_floating_point() else some.long()
        sums.append((bits * torch.arange(1, len(bits) + 1, device=bits.device)).sum())
    numbers = _begin_numbers(sums)

    def finish() -> int:
        total = 0
        for each in numbers():
            total = (total * _PRIME + each) % (1 << 62)
        return total

    return finish


def _begin_numbers(scalars: Sequence[Tensor]) -> Callable[[], list[int]]:
    """Whole numbers, fetched from each device at once: lengths of packed documents stay on the host
    while the rest of a batch is on the GPU.
    """
    fetched: list[tuple[list[int], Tensor, torch.cuda.Event | None]] = []
    for device in {each.device for each in scalars}:
        places = [place for place, each in enumerate(scalars) if each.device == device]
        values = torch.stack([scalars[place] for place in places])
        arrived = None
        if device.type == "cuda":
            pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = pinned.copy_(values, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(device))
        fetched.append((places, values, arrived))

    def finish() -> list[int]:
        found = [0] * len(scalars)
        for places, values, arrived in fetched:
            if arrived is not None:
                arrived.synchronize()
            for place, value in zip(places, values.tolist(), strict=True):
                found[place] = value
        return found

    return finish
