"""A loader that knows how many samples it has delivered, and continues there after a restart.

It wraps a torch DataLoader without being one: Lightning would replace the batch sampler of a
DataLoader, but leaves any other iterable alone, and stores and restores the state of one that has
`state_dict`.

What is counted are delivered batches, not the sampler's draws, which run ahead when worker
processes prefetch. The state is the same on every rank and in every layout.

Training data is one stream: a pass over the loader (an epoch of the Trainer) continues where the
last one ended, and goes into the next epoch of the data when it must. So no sample is skipped or
repeated when a pass is cut short (`limit_train_batches`, `max_steps`), whatever the Trainer takes
for an epoch. Lightning does not exhaust a loader that has a length, so code after the last `yield`
may never run: everything that a new pass needs is decided when its first batch is asked for.
"""

import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from megatron_lightning.data.account import (
    ACCOUNT,
    account_row,
    batch_account,
    padding_row,
    read_sample,
    source_names,
)
from megatron_lightning.data.blend import SampleSource
from megatron_lightning.data.positions import PositionedLoader
from megatron_lightning.data.samplers import PADDING, GlobalBatchSampler

Batch = dict[str, Tensor]


class DataWorkerError(RuntimeError):
    """A process that reads ahead for a loader was killed or ended."""


def stack_samples(samples: Sequence[dict[str, Tensor]]) -> Batch:
    """Returns a batch of samples with equal fields: each field stacked to (B, ...)."""
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


class StatefulLoader(PositionedLoader):
    """Batches of this rank with an exact and layout-independent position.

    Args:
        dataset: map-style data set of dicts of tensors.
        sampler: this rank's batches.
        restart: begin every pass at the first sample of the first epoch (evaluation, overfitting on
            purpose).
        num_workers: processes that read ahead; 0 reads in this process.
        pin_memory: copy batches to page-locked memory for faster transfer to a GPU.
        collate: makes the batch of some samples.
    """

    def __init__(
        self,
        dataset: SampleSource,
        sampler: GlobalBatchSampler,
        *,
        restart: bool = False,
        num_workers: int = 0,
        pin_memory: bool = False,
        collate: Callable[[Sequence[dict[str, Tensor]]], Batch] = stack_samples,
    ) -> None:
        super().__init__(restart=restart, names=tuple(source_names(dataset)))
        self._batches = sampler
        self._loader: DataLoader[Any] = DataLoader(
            _NotedDataset(dataset),
            batch_sampler=sampler,
            num_workers=num_workers,
            pin_memory=pin_memory,
            collate_fn=NotedCollate(collate),
        )

    @property
    def batch_sampler(self) -> GlobalBatchSampler:
        """The batches of this rank (Lightning looks here for shuffled evaluation data)."""
        return self._batches

    def __len__(self) -> int:
        """Batches in a whole pass, even if resumed inside one: Lightning counts from its start."""
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        """Yields batches of dicts; tokens, labels, position_ids and loss_mask are (B, S), and
        `account` is what each sample is and counts for.
        """
        self._begin_pass()
        at = self.position
        total = self._batches.num_samples
        while at.batches_in_pass < len(self):
            left_out = self._seek()
            for batch, rows in self._read():
                size = self._batches.schedule.at(at.consumed_samples)
                delivered = min(size, total - at.consumed_in_epoch)
                at.consumed_in_epoch += delivered
                at.consumed_samples += delivered
                at.batches_in_pass += 1
                account = batch_account(rows, self._names, epoch=at.epoch, left_out=left_out)
                left_out = 0
                # first: Lightning infers the number of samples from the first tensor it meets
                yield {ACCOUNT: account, **batch}  # type: ignore[dict-item]
                if at.batches_in_pass >= len(self):
                    return

    def _read(self) -> Iterator[tuple[Batch, NDArray[np.int64]]]:
        return named_errors(self._loader)

    def _begin_pass(self) -> None:
        self._continues_pass(len(self))
        if self._restart:
            self.position.epoch, self.position.consumed_in_epoch = 0, 0

    def _seek(self) -> int:
        """Points the sampler at the position, which may be the start of the next epoch. Returns the
        samples of the last epoch that filled no batch.
        """
        at, batches, left_out = self.position, self._batches, 0
        if batches.batches_after(at.consumed_in_epoch, at.consumed_samples) == 0:
            left_out = max(0, batches.num_samples - at.consumed_in_epoch)
            at.epoch, at.consumed_in_epoch = at.epoch + 1, 0
        batches.epoch, batches.start = at.epoch, at.consumed_in_epoch
        batches.consumed = at.consumed_samples
        return left_out


def named_errors(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yields what `loader` yields. DataWorkerError when one of its processes ended.

    At an error the others end too, unless they are to stay (`persistent_workers`).
    """
    try:
        yield from loader
    except Exception as error:
        if loader.num_workers > 0:
            # The error's frames are torch's, and hold the iterator whose end ends its processes, in
            # a cycle with the error. If the collector of garbage finds that, queues are closed
            # first: processes hear of no end, and are killed after five seconds.
            traceback.clear_frames(error.__traceback__)
        # torch says "worker ... is killed"; where the process dies while it hands over a tensor,
        # the connection to it breaks. What the data set itself raised begins with "Caught".
        lost = isinstance(error, (OSError, EOFError)) or "DataLoader worker (pid" in str(error)
        if loader.num_workers == 0 or not lost or str(error).startswith("Caught "):
            raise
        raise DataWorkerError(
            f"a process that reads the data ended: {error}. Nothing is lost: the order of "
            "the samples does not depend on these processes, so a run that is resumed from its "
            "last checkpoint reads what this one would have. If memory ran out, lower "
            f"num_workers={loader.num_workers}"
        ) from error


class _NotedDataset(Dataset[tuple[dict[str, Tensor], list[int]]]):
    """Samples with their rows for the account; sample `PADDING` is the first one without loss."""

    def __init__(self, dataset: SampleSource) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], list[int]]:
        if index != PADDING:
            sample, note = read_sample(self._dataset, index)
            return sample, account_row(index, sample, note)
        first = self._dataset[0]
        empty = {"loss_mask": 0, "labels": -100}  # for modules that look at the one or the other
        blank = {n: torch.full_like(first[n], v) for n, v in empty.items() if n in first}
        return {**first, **blank}, padding_row()


class NotedCollate:
    """Makes the batch and its rows; travels to worker processes."""

    def __init__(self, collate: Callable[[Sequence[dict[str, Tensor]]], Batch]) -> None:
        self._collate = collate

    def __call__(
        self, samples: Sequence[tuple[dict[str, Tensor], list[int]]]
    ) -> tuple[Batch, NDArray[np.int64]]:
        """Returns the batch of samples with their rows, and the rows (B, columns)."""
        batch = self._collate([sample for sample, _ in samples])
        return batch, np.array([row for _, row in samples], np.int64)
