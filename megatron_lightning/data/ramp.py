"""Batch sizes that grow during a run, as a function of the samples consumed so far.

Two ways to write one: Megatron's `--rampup-batch-size START INCREMENT SAMPLES`, in its arithmetic,
and a list of steps, `(from this sample on, this size)`. The size of a batch is decided when it
begins, so it depends on nothing but the count of samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

Rampup = Sequence[int] | Sequence[Sequence[int]]
"""`[start, increment, samples]`, or steps `[[0, size], [sample, size], ...]`."""


@dataclass(frozen=True)
class BatchSizeSchedule:
    """Sizes by the number of samples consumed before a batch.

    Attributes:
        steps: (first sample, size) in ascending order, from sample 0 on.
    """

    steps: tuple[tuple[int, int], ...]

    @classmethod
    def constant(cls, size: int) -> "BatchSizeSchedule":
        """Returns the schedule without a change."""
        return cls(((0, size),))

    @classmethod
    def parse(cls, rampup: Rampup | None, global_batch_size: int) -> "BatchSizeSchedule":
        """Returns the schedule that ends at `global_batch_size`.

        Raises:
            ValueError: neither of the two forms, sizes that are not positive or do not grow by the
                increment to the global batch size, or steps out of order; all in one sentence.
        """
        if rampup is None:
            return cls.constant(global_batch_size)
        values = list(rampup)
        if len(values) == 3 and all(_is_count(value) for value in values):
            return cls._linear(*values, global_batch_size)  # type: ignore[arg-type]
        pairs: list[tuple[int, ...]] = [
            tuple(value) if isinstance(value, (list, tuple)) else () for value in values
        ]
        if not pairs or any(len(pair) != 2 or not all(map(_is_count, pair)) for pair in pairs):
            raise ValueError(
                f"rampup_batch_size={values}: give [start, increment, samples], or steps such as "
                f"[[0, 8], [1000, 16], [4000, {global_batch_size}]]"
            )
        starts, sizes = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        if starts[0] != 0 or sorted(set(starts)) != starts or min(sizes) < 1:
            raise ValueError(
                f"rampup_batch_size={values}: steps begin at sample 0, in ascending order, with "
                "positive sizes"
            )
        if sizes[-1] != global_batch_size:
            raise ValueError(
                f"rampup_batch_size={values}: the last size is {sizes[-1]}, but "
                f"global_batch_size={global_batch_size}; make them equal"
            )
        return cls(tuple(zip(starts, sizes, strict=True)))

    @classmethod
    def _linear(cls, start: int, increment: int, samples: int, final: int) -> "BatchSizeSchedule":
        growth = final - start
        if start < 1 or increment < 1 or samples < 1 or growth <= 0 or growth % increment:
            raise ValueError(
                f"rampup_batch_size=[{start}, {increment}, {samples}]: from {start} in steps of "
                f"{increment} over {samples} samples does not reach global_batch_size={final}; "
                "start below it, and let the increment divide the difference"
            )
        count = growth // increment
        each = samples / count  # Megatron's float arithmetic
        steps = [(0, start)]
        for number in range(1, count + 1):
            first = int(number * each)
            while int(first / each) < number:
                first += 1
            while int((first - 1) / each) >= number:
                first -= 1
            # beyond `samples` Megatron takes the final size whatever the quotient says
            steps.append((min(first, samples + 1), start + number * increment))
        kept = {first: size for first, size in steps}  # the later one of steps at the same sample
        return cls(tuple(sorted(kept.items())))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every size that occurs, in order of first use."""
        return tuple(dict.fromkeys(size for _, size in self.steps))

    @property
    def final(self) -> int:
        """The size at the end."""
        return self.steps[-1][1]

    @property
    def is_constant(self) -> bool:
        """Whether the size never changes."""
        return len(self.sizes) == 1

    def at(self, consumed_samples: int) -> int:
        """Returns the size of the batch that begins after so many samples."""
        return next(size for first, size in reversed(self.steps) if first <= consumed_samples)

    def samples_after(self, batches: int, consumed_samples: int = 0) -> int:
        """Returns the samples consumed after so many more batches."""
        consumed = consumed_samples
        while batches:
            size, count = self._run(consumed)
            count = batches if count is None else min(count, batches)
            consumed, batches = consumed + count * size, batches - count
        return consumed

    def batches_until(self, samples: int, consumed_samples: int = 0) -> int:
        """Returns how many whole batches there are before `samples` have been consumed."""
        consumed, batches = consumed_samples, 0
        while True:
            size, count = self._run(consumed)
            fitting = max(0, samples - consumed) // size
            count = fitting if count is None else min(count, fitting)
            if count == 0:
                return batches
            consumed, batches = consumed + count * size, batches + count

    def _run(self, consumed: int) -> tuple[int, int | None]:
        """The size at a place, and how many batches of it follow (None: all)."""
        size = self.at(consumed)
        change = next((first for first, _ in self.steps if first > consumed), None)
        return size, None if change is None else -(-(change - consumed) // size)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0
