"""Batch sizes that fit each other, a layout, and what the Trainer accumulates."""

from dataclasses import dataclass

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from megatron_lightning.data.ramp import BatchSizeSchedule, Rampup


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """The arguments of a data module that are numbers of sequences."""

    micro_batch_size: int
    global_batch_size: int
    rampup_batch_size: Rampup | None

    @property
    def schedule(self) -> BatchSizeSchedule:
        """Sequences per batch of all ranks together, by the samples consumed before it."""
        return BatchSizeSchedule.parse(self.rampup_batch_size, self.global_batch_size)

    def errors(self) -> list[str]:
        """Returns what is wrong with positive sizes whatever the layout."""
        micro, batch = self.micro_batch_size, self.global_batch_size
        errors = []
        if batch % micro:
            errors.append(
                f"global_batch_size={batch} must be a multiple of micro_batch_size={micro}, such "
                f"as {-(-batch // micro) * micro}"
            )
        try:
            sizes = self.schedule.sizes[:-1]
        except ValueError as error:
            return [*errors, str(error)]
        errors += [
            f"rampup_batch_size: {size} must be a multiple of micro_batch_size={micro}"
            for size in sizes
            if size % micro
        ]
        return errors

    def layout_errors(self, dp_size: int) -> list[str]:
        """Returns which sizes so many data-parallel ranks can't share."""
        unit = self.micro_batch_size * dp_size
        return [
            f"{'global_batch_size=' if size == self.global_batch_size else 'rampup_batch_size: '}"
            f"{size} must be a multiple of micro_batch_size={self.micro_batch_size} x "
            f"data_parallel_size={dp_size} = {unit}, such as {-(-size // unit) * unit}"
            for size in self.schedule.sizes
            if size % unit
        ]

    def accumulation_errors(self, trainer: Trainer) -> list[str]:
        """Returns why the Trainer may not accumulate batches of a ramp, where it would."""
        if self.schedule.is_constant:
            return []
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        accumulates = any(isinstance(one, GradientAccumulationScheduler) for one in callbacks)
        if trainer.accumulate_grad_batches == 1 and not accumulates:
            return []
        return [
            f"rampup_batch_size={self.rampup_batch_size} with accumulate_grad_batches="
            f"{trainer.accumulate_grad_batches}: a ramp is a number of sequences a step, and the "
            "strategy accumulates its micro-batches itself; leave accumulate_grad_batches at 1 "
            "and set micro_batch_size"
        ]
