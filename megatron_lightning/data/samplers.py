"""Which samples each data-parallel rank reads in each step.

The order of the samples is a pure function of seed and epoch, and the place in it a count of
samples. Every rank takes its slice of the same global batch, so neither the number of ranks nor the
micro-batch size changes what a step trains on, and a run continues exactly when either changes.
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

from megatron_lightning.data.ramp import BatchSizeSchedule

PADDING = -1
"""Index of a sample that only fills up the last batch; it must not count in any loss."""


def epoch_order(num_samples: int, seed: int, epoch: int) -> NDArray[np.integer]:
    """Returns a permutation of the samples that depends on seed and epoch alone, (num_samples,)."""
    dtype = np.uint32 if num_samples < 2**32 else np.uint64
    order = np.arange(num_samples, dtype=dtype)
    np.random.RandomState([seed, epoch]).shuffle(order)
    return order


def cyclic_order(num_samples: int, epoch: int) -> NDArray[np.integer]:
    """Returns the permutation of an epoch in Megatron's cyclic order, (num_samples,). It depends on
    the epoch alone, as there, so that a Megatron run can be continued.
    """
    generator = torch.Generator().manual_seed(epoch)
    return torch.randperm(num_samples, generator=generator).numpy()


class GlobalBatchSampler(Sampler[list[int]]):
    """Batches of sample numbers: this rank's slice of one global batch after the other.

    Iterating gives the batches of epoch `epoch` from sample `start` on, when `consumed` samples
    have been delivered since the run began (they decide the sizes of a schedule).

    Args:
        num_samples: samples in an epoch.
        global_batch_size: samples in a batch of all ranks together, or their schedule.
        dp_rank: this rank's place on the data-parallel axis.
        dp_size: size of the data-parallel axis.
        seed: of the shuffling.
        shuffle: give each epoch its own order; else the order of the data set.
        shuffle_first_epoch: whether this holds for epoch 0 too (not needed for a shuffled data
            set).
        cyclic_micro_batch: the micro-batch size of a run in Megatron's cyclic order without sharded
            data (`MegatronPretrainingRandomSampler`, data_sharding=False): `cyclic_order` of all
            samples but the remainder of this size, and each batch is dealt out in turn, one sample
            a rank. Instead of `shuffle`; 0 for our own order.
        drop_last: leave out the samples that do not fill the last batch; else it is filled up with
            `PADDING`, so that every sample comes exactly once and all ranks have equally many
            batches.

    Raises:
        ValueError: a size is not positive, the rank does not exist, or a batch does not divide by
            the ranks.
    """

    def __init__(
        self,
        num_samples: int,
        global_batch_size: int | BatchSizeSchedule,
        *,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int = 0,
        shuffle: bool = False,
        shuffle_first_epoch: bool = True,
        cyclic_micro_batch: int = 0,
        drop_last: bool = True,
    ) -> None:
        if num_samples < 0:
            raise ValueError(f"num_samples={num_samples} must not be negative")
        if not 0 <= dp_rank < dp_size:
            raise ValueError(f"dp_rank={dp_rank} must be between 0 and dp_size - 1 = {dp_size - 1}")
        if isinstance(global_batch_size, int):
            global_batch_size = BatchSizeSchedule.constant(global_batch_size)
        for size in global_batch_size.sizes:
            if size < 1 or size % dp_size:
                raise ValueError(
                    f"global_batch_size={size} must be a positive multiple of the {dp_size} "
                    f"data-parallel ranks, such as {dp_size * max(1, size // dp_size)}"
                )
        if cyclic_micro_batch and shuffle:
            raise ValueError(
                f"cyclic_micro_batch={cyclic_micro_batch}, shuffle=True: two orders; choose one"
            )
        if cyclic_micro_batch:
            num_samples -= num_samples % cyclic_micro_batch
        self.num_samples, self.schedule = num_samples, global_batch_size
        self._cyclic = bool(cyclic_micro_batch)
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.seed, self.drop_last = seed, drop_last
        self._shuffle, self._shuffle_first_epoch = shuffle, shuffle_first_epoch
        self.epoch, self.start, self.consumed = 0, 0, 0

    def __len__(self) -> int:
        """Batches in the first epoch; in a later one of a growing schedule there are fewer."""
        return self.batches_after(0)

    def batches_after(self, start: int, consumed: int | None = None) -> int:
        """Returns the batches of an epoch from sample `start` on, which `consumed` samples of the
        run come before (None: those of this epoch).
        """
        consumed = start if consumed is None else consumed
        left = max(self.num_samples - start, 0)
        whole = self.schedule.batches_until(consumed + left, consumed)
        if self.drop_last:
            return whole
        return whole + (self.schedule.samples_after(whole, consumed) < consumed + left)

    def global_batches(self, start: int, consumed: int) -> Iterator[tuple[int, int]]:
        """Yields (first sample, size) of the batches in an epoch from sample `start` on."""
        while (left := self.num_samples - start) > 0:
            size = self.schedule.at(consumed)
            if left < size and self.drop_last:
                return
            yield start, size
            start, consumed = start + size, consumed + size

    def __iter__(self) -> Iterator[list[int]]:
        """Yields this rank's sample numbers, a batch's size / dp_size each time. ValueError when
        `start` lies behind the epoch's end: its samples are in a later epoch.
        """
        if self.start >= self.num_samples + max(self.schedule.sizes):  # a last batch is filled up
            raise ValueError(
                f"start={self.start} is behind the {self.num_samples} samples of an epoch; give the"
                " place within the epoch, and the number of whole ones as epoch"
            )
        order = self._order()
        for start, size in self.global_batches(self.start, self.consumed):
            share = size // self.dp_size
            if self._cyclic:
                held = order[start + self.dp_rank : start + size : self.dp_size].tolist()
            else:
                begin = start + self.dp_rank * share
                held = order[begin : begin + share].tolist()
            yield held + [PADDING] * (share - len(held))

    def _order(self) -> NDArray[np.integer]:
        if self._cyclic:
            return cyclic_order(self.num_samples, self.epoch)
        if self._shuffle and (self.epoch > 0 or self._shuffle_first_epoch):
            return epoch_order(self.num_samples, self.seed, self.epoch)
        return np.arange(self.num_samples, dtype=np.uint64)
