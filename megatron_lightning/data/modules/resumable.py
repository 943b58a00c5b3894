"""Loaders of a rank's share of data sets, at a place that is saved with the checkpoint.

Each data-parallel rank reads its slice of the same global batch; ranks that share a data-parallel
rank (tensor, pipeline and context peers) read the same samples, so nothing is broadcast. The place
in the data is a count of samples, valid in any layout.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from megatron_lightning.data.blend import OrderedSource
from megatron_lightning.data.loader import Batch, StatefulLoader, stack_samples
from megatron_lightning.data.modules.batch_sizes import BatchSizes
from megatron_lightning.data.positions import PositionedLoader
from megatron_lightning.data.ramp import BatchSizeSchedule, Rampup
from megatron_lightning.data.samplers import GlobalBatchSampler

DataloaderType = Literal["single", "cyclic"]
EvaluationPart = Literal["valid", "test"]
EvaluationSets = Mapping[str | int, OrderedSource]
"""Data sets by name, or by number where Lightning's names are to be used ("" for a single one)."""


class ResumableDataModule(LightningDataModule):
    """Abstract: loaders over the data sets that a subclass sets up, `_train` (of which it uses
    `_train_samples`) and `_evaluation`.
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

    def __init__(
        self,
        micro_batch_size: int,
        global_batch_size: int,
        *,
        rampup_batch_size: Rampup | None,
        seed: int,
        num_workers: int,
    ) -> None:
        super().__init__()
        self.micro_batch_size, self.global_batch_size = micro_batch_size, global_batch_size
        self.rampup_batch_size = rampup_batch_size
        self.seed, self.num_workers = seed, num_workers
        self._train: OrderedSource | None = None
        self._train_samples = 0
        self._evaluation: dict[EvaluationPart, EvaluationSets] = {}
        self._loader: PositionedLoader | None = None
        self._loaded: dict[str, Any] | None = None

    def collate(self, samples: Sequence[dict[str, Tensor]]) -> Batch:
        """Returns the batch of some samples; fields of (S,) become (B, S)."""
        return stack_samples(samples)

    # ------------------------------------------------------------------ batch sizes

    @property
    def _batch_sizes(self) -> BatchSizes:
        return BatchSizes(
            micro_batch_size=self.micro_batch_size,
            global_batch_size=self.global_batch_size,
            rampup_batch_size=self.rampup_batch_size,
        )

    @property
    def batch_size_schedule(self) -> BatchSizeSchedule:
        """Sequences per batch of all ranks together, by the samples consumed before it."""
        return self._batch_sizes.schedule

    @property
    def global_batch_sizes(self) -> tuple[int, ...]:
        """Every size that `batch_size_schedule` takes."""
        return self.batch_size_schedule.sizes

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
        if errors := self._batch_sizes.layout_errors(size):
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
