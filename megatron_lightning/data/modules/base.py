"""What all data modules of this package share beside their loaders (`resumable.py`): checks of
arguments and data, and when data sets are set up.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Trainer

from megatron_lightning.config.field_types import not_whole
from megatron_lightning.config.names import NamesArguments
from megatron_lightning.config.validate import ConfigurationError
from megatron_lightning.data.blend import OrderedSource
from megatron_lightning.data.modules.evaluation_checks import (
    Shares,
    check_evaluation,
    evaluation_of,
    is_meant,
    nothing_meant,
)
from megatron_lightning.data.modules.interval import interval_errors
from megatron_lightning.data.modules.resumable import (
    EvaluationPart,
    EvaluationSets,
    ResumableDataModule,
)
from megatron_lightning.data.ramp import Rampup


class TokenDataModule(NamesArguments, ResumableDataModule):
    """Abstract: checks arguments and data, and sets up the data sets that a subclass builds.

    A subclass sets its own fields, then calls `_raise_if_wrong()` at the end of its constructor. It
    must define `_build_train` and `_build_evaluation`, and may define `_has_own`,
    `_argument_errors` (adding to the ones here), `_data_errors` and `collate`.

    Args:
        seq_length: tokens a sample.
        micro_batch_size: sequences per data-parallel rank per forward.
        global_batch_size: sequences per batch of all ranks together.
        rampup_batch_size: smaller batches at first: `[start, increment, samples]` as Megatron's
            option of this name, or steps `[[0, size], [sample, size], ...]`.
        num_train_samples: sequences to train on; None means what `Trainer(max_steps)` needs, or one
            pass over the training data when that is not set.
        seed: of the order of the samples, 0 to 2^32 - 1.
        num_workers: processes per rank that read ahead; 0 reads in the training process.
    """

    evaluation_fields: Mapping[EvaluationPart, str] = {"valid": "valid", "test": "test"}
    """Arguments that give validation and testing data of their own."""
    split_unit = "documents"
    """What a split string divides."""

    def __init__(
        self,
        seq_length: int,
        micro_batch_size: int,
        global_batch_size: int,
        *,
        rampup_batch_size: Rampup | None = None,
        num_train_samples: int | None = None,
        seed: int = 1234,
        num_workers: int = 0,
    ) -> None:
        super().__init__(
            micro_batch_size,
            global_batch_size,
            rampup_batch_size=rampup_batch_size,
            seed=seed,
            num_workers=num_workers,
        )
        self.seq_length, self.num_train_samples = seq_length, num_train_samples
        self._shares = Shares()

    # ------------------------------------------------------------------ what a subclass defines

    def _build_train(self, samples: int | None) -> OrderedSource:
        """Returns the training data: at least `samples` samples, None for one epoch of it."""
        raise NotImplementedError

    def _build_evaluation(self, part: EvaluationPart) -> EvaluationSets:
        """Returns the data sets of validation or testing."""
        raise NotImplementedError

    def _has_own(self, part: EvaluationPart) -> bool:
        """Returns whether there are validation or testing data of their own."""
        return True

    def _evaluation_split(self) -> str | None:
        """Returns the split string that validation and testing data come from, None if none."""
        return None

    def _data_errors(self) -> list[str]:
        """Returns what is wrong with files and tokenizer, opening no more than it must."""
        return []

    # ------------------------------------------------------------------ checks

    def _argument_errors(self) -> list[str]:
        counts: Sequence[tuple[str, Any, int]] = (
            ("seq_length", self.seq_length, 1),
            ("micro_batch_size", self.micro_batch_size, 1),
            ("global_batch_size", self.global_batch_size, 1),
            ("num_train_samples", self.num_train_samples, 1),
            ("num_workers", self.num_workers, 0),
        )
        if wrong := not_whole({name: value for name, value, _ in counts} | {"seed": self.seed}):
            return wrong  # the rules about values would stumble over them
        errors = [
            f"{name}={value} must be at least {least}"
            for name, value, least in counts
            if value is not None and value < least
        ]
        if self.micro_batch_size > 0 and self.global_batch_size > 0:
            errors += self._batch_sizes.errors()
        if not 0 <= self.seed < 2**32:
            errors.append(f"seed={self.seed} must be between 0 and {2**32 - 1}")
        return errors

    def _raise_if_wrong(self, errors: Sequence[str] = ()) -> None:
        """Raises ValueError with `errors` and everything that is wrong with the arguments."""
        self._raise([*self._argument_errors(), *errors])

    def _raise(self, errors: Sequence[str]) -> None:
        if errors:
            raise ValueError(f"{type(self).__name__}:\n- " + "\n- ".join(errors))

    def validate(self, data_parallel_size: int | None = None) -> list[str]:
        """Returns what is wrong with the data and, if a size is given, with the batch size for
        that layout.

        Meant to be called before any process is started; an empty list means that nothing was
        found.
        """
        errors = self._data_errors()
        if data_parallel_size is not None:
            errors += self._batch_sizes.layout_errors(data_parallel_size)
        return errors

    def check_trainer(self, trainer: Trainer) -> list[str]:
        """Returns what the Trainer asks for and the data cannot give; asked before any process is
        started.
        """
        errors = list(self._batch_sizes.accumulation_errors(trainer))
        part, split = evaluation_of(trainer), self._evaluation_split()
        loader = {"valid": "val_dataloader", "test": "test_dataloader"}.get(part or "", "")
        if loader and getattr(type(self), loader) is not getattr(ResumableDataModule, loader):
            return errors  # a subclass has a loader of its own
        if part is None or (self._has_own(part) if split is None else is_meant(split, part)):
            return errors
        return [*errors, nothing_meant(part, split, self.evaluation_fields[part])]

    def _interval_errors(self, trainer: Trainer, samples: int) -> list[str]:
        whole = self.batch_size_schedule.batches_until(samples)
        some_left = self.batch_size_schedule.samples_after(whole) < samples and not self.drop_last
        return interval_errors(trainer, whole + some_left)

    # ------------------------------------------------------------------ data sets

    def setup(self, stage: str) -> None:
        """Builds the data sets that the stage needs.

        Raises:
            ConfigurationError: a ValueError that says what is wrong with the data: see `validate`;
                or there are too few training samples for a batch.
        """
        try:
            self._set_up(stage)
        except ConfigurationError:
            raise
        except ValueError as error:  # found in the ranks, but about the input: needs no traceback
            problems = str(error).removeprefix(f"{type(self).__name__}:\n- ").split("\n- ")
            raise ConfigurationError(problems) from error

    def _set_up(self, stage: str) -> None:
        errors = self.validate()
        if self.trainer is not None:
            errors += self.check_trainer(self.trainer)
        self._raise(errors)
        self._shares.clear()
        if stage == "fit":
            self._loader, self._loaded = None, None
            wanted = self._samples_wanted(self.trainer)
            self._train = self._build_train(wanted)
            length = len(self._train)
            self._train_samples = length if wanted is None else min(wanted, length)
            first = self.batch_size_schedule.at(0)
            if self.drop_last and self._train_samples < first:
                raise ValueError(
                    f"global_batch_size={first}: the training data gives only "
                    f"{self._train_samples} samples of {self.seq_length} tokens: lower the batch "
                    "size or seq_length, or ask for more with num_train_samples"
                )
            if self.trainer is not None:
                self._raise(self._interval_errors(self.trainer, self._train_samples))
        if stage in ("fit", "validate"):
            self._set_up_evaluation("valid", fits=stage == "fit")
        if stage == "test":
            self._set_up_evaluation("test", fits=False)

    def _set_up_evaluation(self, part: EvaluationPart, *, fits: bool) -> None:
        sets = self._evaluation[part] = self._build_evaluation(part)
        check_evaluation(
            part,
            sets,
            self.trainer,
            fits=fits,
            split=self._evaluation_split(),
            shares=self._shares,
            unit=self.split_unit,
            own=self.evaluation_fields[part],
        )

    def _samples_wanted(self, trainer: Trainer | None) -> int | None:
        """Samples that the run will use, None when a pass over the data is an epoch."""
        if self.num_train_samples is not None or trainer is None or trainer.max_steps < 1:
            return self.num_train_samples
        # Of less than 1 the strategy says what is wrong with it.
        batches = trainer.max_steps * max(1, trainer.accumulate_grad_batches)
        return self.batch_size_schedule.samples_after(batches)
