"""What all data modules of this package share: batch sizes, order, loaders, and their state.

Each data-parallel rank reads its slice of the same global batch; ranks that share a data-parallel
rank (tensor, pipeline and context peers) read the same samples, so nothing is broadcast. The place
in the data is a count of samples, stored with the checkpoint and valid in any layout.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from megatron_lightning.config.field_types import not_whole
from megatron_lightning.config.names import NamesArguments
from megatron_lightning.config.validate import ConfigurationError
from megatron_lightning.data.blend import OrderedSource
from megatron_lightning.data.loader import Batch, StatefulLoader, stack_samples
from megatron_lightning.data.modules.evaluation_checks import (
    Shares,
    is_meant,
    nothing_there,
    waiting_for_validation,
)
from megatron_lightning.data.modules.interval import interval_errors
from megatron_lightning.data.positions import PositionedLoader
from megatron_lightning.data.ramp import BatchSizeSchedule, Rampup
from megatron_lightning.data.samplers import GlobalBatchSampler

DataloaderType = Literal["single", "cyclic"]
EvaluationPart = Literal["valid", "test"]
EvaluationSets = Mapping[str | int, OrderedSource]
"""Data sets by name, or by number where Lightning's names are to be used ("" for a single one)."""


class TokenDataModule(NamesArguments, LightningDataModule):
    """Abstract: loaders over the data sets that a subclass builds.

    A subclass sets its own fields, then calls `_raise_if_wrong()` at the end of its constructor. It
    must define `_build_train` and `_build_evaluation`, and may define `_argument_errors` (adding to
    the ones here), `_data_errors` and `collate`.

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

    shuffle_first_epoch = False
    """Whether the loader shuffles epoch 0 too; not needed for a data set that is shuffled itself.
    """
    drop_last = True
    """Whether training leaves out the samples of an epoch that don't fill its last batch; else that
    is filled up with samples without a loss.
    """
    dataloader_type: DataloaderType = "single"
    """Order of training samples, where a subclass lets the user choose."""
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
        super().__init__()
        self.rampup_batch_size = rampup_batch_size
        self.seq_length, self.micro_batch_size = seq_length, micro_batch_size
        self.global_batch_size, self.seed = global_batch_size, seed
        self.num_train_samples, self.num_workers = num_train_samples, num_workers
        self._train: OrderedSource | None = None
        self._train_samples = 0
        self._evaluation: dict[EvaluationPart, EvaluationSets] = {}
        self._shares = Shares()
        self._loader: PositionedLoader | None = None
        self._loaded: dict[str, Any] | None = None

    # ------------------------------------------------------------------ what a subclass defines

    def _build_train(self, samples: int | None) -> OrderedSource:
        """Returns the training data: at least `samples` samples, None for one epoch of it."""
        raise NotImplementedError

    def _build_evaluation(self, part: EvaluationPart) -> EvaluationSets:
        """Returns the data sets of validation or testing."""
        raise NotImplementedError

    def _evaluation_split(self) -> str | None:
        """Returns the split string that validation and testing data come from, None if none."""
        return None

    def _data_errors(self) -> list[str]:
        """Returns what is wrong with files and tokenizer, opening no more than it must."""
        return []

    def collate(self, samples: Sequence[dict[str, Tensor]]) -> Batch:
        """Returns the batch of some samples; fields of (S,) become (B, S)."""
        return stack_samples(samples)

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
        micro, batch = self.micro_batch_size, self.global_batch_size
        if micro > 0 and batch > 0 and batch % micro:
            errors.append(
                f"global_batch_size={batch} must be a multiple of micro_batch_size={micro}, such "
                f"as {-(-batch // micro) * micro}"
            )
        if micro > 0 and batch > 0:
            errors += self._rampup_errors()
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
            errors += self._batch_errors(data_parallel_size)
        return errors

    def check_trainer(self, trainer: Trainer) -> list[str]:
        """Returns what the Trainer asks for and the data cannot give; asked before any process is
        started.
        """
        if self.batch_size_schedule.is_constant:
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

    def _interval_errors(self, trainer: Trainer, samples: int) -> list[str]:
        whole = self.batch_size_schedule.batches_until(samples)
        some_left = self.batch_size_schedule.samples_after(whole) < samples and not self.drop_last
        return interval_errors(trainer, whole + some_left)

    def _rampup_errors(self) -> list[str]:
        try:
            sizes = self.batch_size_schedule.sizes[:-1]
        except ValueError as error:
            return [str(error)]
        return [
            f"rampup_batch_size: {size} must be a multiple of "
            f"micro_batch_size={self.micro_batch_size}"
            for size in sizes
            if size % self.micro_batch_size
        ]

    def _batch_errors(self, dp_size: int) -> list[str]:
        unit = self.micro_batch_size * dp_size
        return [
            f"{'global_batch_size=' if size == self.global_batch_size else 'rampup_batch_size: '}"
            f"{size} must be a multiple of micro_batch_size={self.micro_batch_size} x "
            f"data_parallel_size={dp_size} = {unit}, such as {-(-size // unit) * unit}"
            for size in self.global_batch_sizes
            if size % unit
        ]

    @property
    def batch_size_schedule(self) -> BatchSizeSchedule:
        """Sequences per batch of all ranks together, by the samples consumed before it."""
        return BatchSizeSchedule.parse(self.rampup_batch_size, self.global_batch_size)

    @property
    def global_batch_sizes(self) -> tuple[int, ...]:
        """Every size that `batch_size_schedule` takes."""
        return self.batch_size_schedule.sizes

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
            self._evaluation["valid"] = self._build_evaluation("valid")
            self._check_evaluation("valid", stage)
        if stage == "test":
            self._evaluation["test"] = self._build_evaluation("test")
            self._check_evaluation("test", stage)

    def _check_evaluation(self, part: EvaluationPart, stage: str) -> None:
        """Says that sets are empty which the user means to be evaluated. ValueError where nothing
        else is asked for, or a callback waits for what validation would give.
        """
        split, sets = self._evaluation_split(), self._evaluation[part]
        empty = [name for name in sets if not len(sets[name])]
        fits, trainer = stage == "fit", self.trainer
        if not empty or not is_meant(split, part):
            return
        if fits and (trainer is None or not trainer.enable_validation):
            return
        field = self.evaluation_fields[part]
        message = nothing_there(part, split, self._shares, empty, self.split_unit, field)
        if len(empty) < len(sets):
            rank_zero_warn(message)
            return
        callbacks: list[Callback] = trainer.callbacks if fits else []  # type: ignore[union-attr]
        if waiting := waiting_for_validation(callbacks):
            raise ValueError(f"{' and '.join(waiting)} goes by validation, but {message}")
        if not fits:
            raise ValueError(message)
        rank_zero_warn(f"No validation: {message}")

    def _samples_wanted(self, trainer: Trainer | None) -> int | None:
        """Samples that the run will use, None when a pass over the data is an epoch."""
        if self.num_train_samples is not None or trainer is None or trainer.max_steps < 1:
            return self.num_train_samples
        # Of less than 1 the strategy says what is wrong with it.
        batches = trainer.max_steps * max(1, trainer.accumulate_grad_batches)
        return self.batch_size_schedule.samples_after(batches)

    # ------------------------------------------------------------------ loaders

    def train_dataloader(self) -> PositionedLoader:
        """Returns the loader of this rank's share, at the position of the checkpoint or of the last
        loader.
        """
        assert self._train is not None, "setup('fit') comes first"
        overfit = self.trainer is not None and self.trainer.overfit_batches > 0  # pyright: ignore
        position = self.state_dict().get("loader")
        self._loader = self._training_loader(self._train, restart=overfit)
        if position is not None and not overfit:
            self._loader.load_state_dict(position)
        return self._loader

    def _training_loader(self, dataset: OrderedSource, *, restart: bool) -> PositionedLoader:
        sampler = self._sampler(
            self._train_samples,
            self.batch_size_schedule,
            shuffle=not restart and self.dataloader_type == "single",
            drop_last=self.drop_last,
            cyclic=not restart and self.dataloader_type == "cyclic",
        )
        return self._make_loader(dataset, sampler, restart=restart)

    def val_dataloader(self) -> PositionedLoader | list[PositionedLoader]:
        """Returns the loader of one pass over the validation data; a list of loaders when there are
        several sets, an empty one when there is no sample.
        """
        return self._evaluation_loaders("valid")

    def test_dataloader(self) -> PositionedLoader | list[PositionedLoader]:
        """Returns the loader of one pass over the test data, as `val_dataloader`."""
        return self._evaluation_loaders("test")

    def _evaluation_loaders(
        self, part: EvaluationPart
    ) -> PositionedLoader | list[PositionedLoader]:
        assert part in self._evaluation, "setup comes first"
        sources = self._evaluation[part].values()
        loaders = [self._evaluation_loader(source) for source in sources if len(source)]
        return loaders[0] if len(loaders) == 1 else loaders

    def evaluation_names(self, part: EvaluationPart) -> list[str | None]:
        """Returns the names of the data sets of validation or testing in the order of their
        loaders; None for one whose metrics get Lightning's `/dataloader_idx_N` (or nothing, if it
        is the only one).
        """
        sets = self._evaluation.get(part, {})
        return [
            str(name) if type(name) is str and name else None for name in sets if len(sets[name])
        ]

    def _evaluation_loader(self, dataset: OrderedSource) -> PositionedLoader:
        # No larger than the data needs: a batch of mostly padding would cost as much as a full one.
        unit = self.micro_batch_size * self._dp()[1]
        batch = min(self.global_batch_size, -(-len(dataset) // unit) * unit)
        sampler = self._sampler(len(dataset), batch, shuffle=False, drop_last=False)
        return self._make_loader(dataset, sampler, restart=True)

    def _sampler(
        self,
        samples: int,
        batch: int | BatchSizeSchedule,
        *,
        shuffle: bool,
        drop_last: bool,
        cyclic: bool = False,
    ) -> GlobalBatchSampler:
        rank, size = self._dp()
        if errors := self._batch_errors(size):
            raise ValueError(errors[0])
        return GlobalBatchSampler(
            samples,
            batch,
            dp_rank=rank,
            dp_size=size,
            seed=self.seed,
            shuffle=shuffle,
            shuffle_first_epoch=self.shuffle_first_epoch,
            cyclic_micro_batch=self.micro_batch_size if cyclic else 0,
            drop_last=drop_last,
        )

    def _make_loader(
        self, dataset: OrderedSource, sampler: GlobalBatchSampler, *, restart: bool
    ) -> StatefulLoader:
        return StatefulLoader(
            dataset,
            sampler,
            restart=restart,
            num_workers=self.num_workers,
            pin_memory=self._on_gpu(),
            collate=self.collate,
        )

    def _on_gpu(self) -> bool:
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"

    def _dp(self) -> tuple[int, int]:
        """Returns rank and size on the data-parallel axis, as the strategy defines them."""
        layout = None if self.trainer is None else self.trainer.distributed_sampler_kwargs
        return (0, 1) if layout is None else (layout["rank"], layout["num_replicas"])

    # ------------------------------------------------------------------ state

    @property
    def consumed_samples(self) -> int:
        """Training sequences delivered to all ranks since the run began."""
        state = self.state_dict().get("loader")
        return state["consumed_samples"] if state else 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the training data, equal on all ranks; empty before training."""
        if self._loader is None:
            return self._loaded or {}
        return {"loader": self._loader.state_dict(), "train_order": self._order_fingerprint()}

    def _order_fingerprint(self) -> str:
        """Identity of the order of training samples: of their data set, and of a cyclic order the
        number of samples that it permutes.
        """
        assert self._train is not None  # a loader has a data set
        if self.dataloader_type == "single":
            return self._train.fingerprint
        permuted = self._train_samples - self._train_samples % self.micro_batch_size
        return f"{self._train.fingerprint}-cyclic-{permuted}"

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Lets the next training loader continue at the saved position, and warns when the order
        changed.
        """
        self._loaded = dict(state_dict)
        if self._train is not None and state_dict["train_order"] != self._order_fingerprint():
            rank_zero_warn(
                "The order of the training samples is not the one of the checkpoint (other data, "
                "seed, split, seq_length, weights, dataloader_type, or a number of samples that "
                "needs more epochs): the run continues at sample "
                f"{state_dict['loader']['consumed_samples']} of the new order, where samples may "
                "repeat or be left out."
            )
