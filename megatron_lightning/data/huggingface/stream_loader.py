"""Batches of a stream, with an exact and layout-independent position.

Every rank reads the whole stream, since where a sample begins depends on all documents before it,
and makes tensors of its own share alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from megatron_lightning.data.account import ACCOUNT, account_row, batch_account, padding_row
from megatron_lightning.data.huggingface.samples import Sample
from megatron_lightning.data.huggingface.stream import Place, SampleStream, StreamedSet
from megatron_lightning.data.loader import Batch, NotedCollate, named_errors, stack_samples
from megatron_lightning.data.positions import Position, PositionedLoader
from megatron_lightning.data.ramp import BatchSizeSchedule


@dataclass(kw_only=True)
class StreamPosition(Position):
    """Where a stream's loader is."""

    document: int = 0
    """Document of the epoch in which the next sample begins."""
    offset: int = 0
    """Tokens of it that are used up."""


class StreamLoader(PositionedLoader):
    """Batches of this rank from a stream, with an exact and layout-independent position.

    Args:
        dataset: the samples, and how many are in a pass; None means an epoch of the stream, and no
            length.
        schedule: samples in a batch of all ranks together.
        dp_rank: this rank's place on the data-parallel axis.
        dp_size: size of the data-parallel axis.
        drop_last: leave out the samples that do not fill the last batch of an epoch; else it is
            filled up with samples without loss.
        restart: begin every pass at the first sample of the first epoch.
        background: read ahead in a process.
        pin_memory: copy batches to page-locked memory for faster transfer to a GPU.
        name: of the source, in the accounts of batches.
        collate: makes the batch of some samples.
    """

    position_type: ClassVar[type[Position]] = StreamPosition
    position: StreamPosition

    def __init__(
        self,
        dataset: StreamedSet,
        schedule: BatchSizeSchedule,
        *,
        dp_rank: int = 0,
        dp_size: int = 1,
        drop_last: bool = True,
        restart: bool = False,
        background: bool = False,
        pin_memory: bool = False,
        name: str = "data",
        collate: Callable[[Sequence[dict[str, Tensor]]], Batch] = stack_samples,
    ) -> None:
        super().__init__(restart=restart, names=(name,))
        self._num_samples, self._schedule = dataset.samples, schedule
        self._batches = _StreamBatches(
            dataset.stream, schedule, dp_rank, dp_size, NotedCollate(collate), drop_last=drop_last
        )
        self._loader: DataLoader[Any] = DataLoader(
            self._batches,
            batch_size=None,
            num_workers=int(background),
            pin_memory=pin_memory,
            collate_fn=_as_it_is,
        )

    @property
    def batch_sampler(self) -> Any:
        """What Lightning looks at to find shuffled evaluation data; this is none."""
        return self._batches

    def __len__(self) -> int:
        """Batches in a pass. TypeError where a pass is an epoch of the stream."""
        if self._num_samples is None:
            raise TypeError("a stream has no length")
        if self._batches.drop_last:
            return self._schedule.batches_until(self._num_samples)
        return -(-self._num_samples // self._schedule.final)

    def __iter__(self) -> Iterator[Batch]:
        """Yields batches as `StatefulLoader` does."""
        wanted = float("inf") if self._num_samples is None else len(self)
        self._continues_pass(wanted)
        at, left_out = self.position, 0
        if self._restart:
            at.epoch = at.consumed_in_epoch = at.document = at.offset = 0
        while at.batches_in_pass < wanted:
            self._batches.begin(at)
            for batch, rows, taken, place in named_errors(self._loader):
                if batch is None:  # the end of an epoch
                    if at.consumed_in_epoch == 0:
                        raise ValueError(
                            f"the stream gives only {taken} samples, fewer than a batch of "
                            f"{self._schedule.at(at.consumed_samples)}: lower the batch size"
                        )
                    left_out += taken
                    continue
                at.consumed_in_epoch += taken
                at.consumed_samples += taken
                at.batches_in_pass += 1
                at.document, at.offset = place
                account = batch_account(rows, self._names, epoch=at.epoch, left_out=left_out)
                left_out = 0
                yield {ACCOUNT: account, **batch}  # type: ignore[dict-item]
                if at.batches_in_pass >= wanted:
                    return
            if self._num_samples is None:
                return
            at.epoch += 1
            at.consumed_in_epoch = at.document = at.offset = 0


class _StreamBatches(IterableDataset[Any]):
    """(batch, rows, samples of all ranks, place after it) to the end of an epoch, then (None, None,
    samples left out, None).
    """

    def __init__(
        self,
        stream: SampleStream,
        schedule: BatchSizeSchedule,
        dp_rank: int,
        dp_size: int,
        collate: NotedCollate,
        *,
        drop_last: bool,
    ) -> None:
        self._stream, self._schedule, self._collate = stream, schedule, collate
        self._rank, self._ranks, self.drop_last = dp_rank, dp_size, drop_last
        self._at = StreamPosition()

    def begin(self, position: StreamPosition) -> None:
        """Lets the next iteration begin at a position."""
        self._at = position

    def __iter__(self) -> Iterator[tuple[Any, Any, int, Place | None]]:
        at = self._at
        sizes, place = _Sizes(self._schedule, at.consumed_samples), Place(at.document, at.offset)
        begun, size = 0, sizes.take()  # number of the batch's first sample, and its size
        share = size // self._ranks
        first = at.consumed_in_epoch
        own: list[tuple[Sample, list[int]]] = []

        def wanted(number: int) -> bool:
            low = begun + self._rank * share
            return low <= number < low + share

        taken = 0
        for number, item in enumerate(self._stream.read(at.epoch, place, wanted)):
            if item.sample is not None:
                sample, note = item.sample
                own.append((sample, account_row(first + number, sample, note)))
            taken += 1
            if taken == size:
                yield *self._collate(own), size, item.after
                begun, size, taken, own = number + 1, sizes.take(), 0, []
                share = size // self._ranks
            place = item.after
        if taken and not self.drop_last:
            own += [(self._stream.blank(), padding_row())] * (share - len(own))
            yield *self._collate(own), taken, place
            taken = 0
        yield None, None, taken, None


def _as_it_is(batch: Any) -> Any:
    return batch


class _Sizes:
    """The sizes of consecutive batches."""

    def __init__(self, schedule: BatchSizeSchedule, consumed: int) -> None:
        self._schedule, self._consumed = schedule, consumed

    def take(self) -> int:
        """Returns the size of the next batch."""
        size = self._schedule.at(self._consumed)
        self._consumed += size
        return size
