"""Pretraining data for a Lightning Trainer: indexed corpora in, batches of token samples out.

Each data-parallel rank reads its slice of the same global batch; ranks that share a data-parallel
rank (tensor, pipeline and context peers) read the same samples, so nothing is broadcast. The place
in the data is a count of samples, stored with the checkpoint and valid in any layout.
"""

import os
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_warn

from megatron_lightning.data.blend import OrderedSource, build_blend, parse_blend
from megatron_lightning.data.corpus import Vocabulary, corpus_errors, read_vocabulary
from megatron_lightning.data.gpt import GPTDataset
from megatron_lightning.data.indexed import IndexedDataset
from megatron_lightning.data.loader import StatefulLoader
from megatron_lightning.data.samplers import GlobalBatchSampler
from megatron_lightning.data.splits import parse_split, split_ranges


class PretrainingDataModule(LightningDataModule):
    """Samples of `seq_length` tokens from one corpus or a blend, split into train, valid and test.

    Constructing it opens no file. Batches are dicts of `tokens`, `labels`, `position_ids` (int64)
    and `loss_mask` (float32), each (global_batch_size / data-parallel size, S).

    Training draws from a weighted blend in its given proportions. Validation and test are one pass
    over the whole split of every corpus whose weight is not 0: each sample counts once, and samples
    that only fill up a batch have a loss mask of 0.

    Args:
        paths: path of a `.bin`/`.idx` pair without suffix, a list of them, or `weight path weight
            path ...`.
        seq_length: tokens a sample.
        micro_batch_size: sequences per data-parallel rank per forward.
        global_batch_size: sequences per batch of all ranks together.
        split: shares of train, valid and test.
        num_train_samples: sequences to train on; None means what `Trainer(max_steps)` needs, or one
            pass over the training split when that is not set.
        seed: of the order of the samples, 0 to 2^32 - 1.
        num_workers: processes per rank that read ahead; 0 reads in the training process.
        tokenizer: "bytes", a `tokenizer.json` file or its folder; checked against the data cards.
            Not needed when there is a data card.
        eod_mask_loss: no loss where the input is an end-of-document token.
        reset_position_ids: positions begin at 0 after each end-of-document token.
        cache_dir: folder that keeps the index arrays between runs; None builds them in memory.

    Raises:
        ValueError: arguments out of range; all violations are listed.
    """

    def __init__(
        self,
        paths: str | Sequence[str | float],
        seq_length: int,
        micro_batch_size: int,
        global_batch_size: int,
        *,
        split: str = "969,30,1",
        num_train_samples: int | None = None,
        seed: int = 1234,
        num_workers: int = 0,
        tokenizer: str | os.PathLike[str] | None = None,
        eod_mask_loss: bool = False,
        reset_position_ids: bool = False,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        self.seq_length, self.micro_batch_size = seq_length, micro_batch_size
        self.global_batch_size, self.split, self.seed = global_batch_size, split, seed
        self.num_train_samples, self.num_workers = num_train_samples, num_workers
        self.tokenizer, self.cache_dir = tokenizer, cache_dir
        self.eod_mask_loss, self.reset_position_ids = eod_mask_loss, reset_position_ids
        errors = self._argument_errors()
        try:
            self.paths, self.weights = parse_blend(paths)
        except ValueError as error:
            errors.append(str(error))
        if errors:
            raise ValueError("PretrainingDataModule:\n- " + "\n- ".join(errors))
        self._train: OrderedSource | None = None
        self._train_samples = 0
        self._valid: OrderedSource | None = None
        self._test: OrderedSource | None = None
        self._loader: StatefulLoader | None = None
        self._loaded: dict[str, Any] | None = None

    def _argument_errors(self) -> list[str]:
        errors = [
            f"{name}={value} must be at least {least}"
            for name, value, least in (
                ("seq_length", self.seq_length, 1),
                ("micro_batch_size", self.micro_batch_size, 1),
                ("global_batch_size", self.global_batch_size, 1),
                ("num_train_samples", self.num_train_samples, 1),
                ("num_workers", self.num_workers, 0),
            )
            if value is not None and value < least
        ]
        micro, batch = self.micro_batch_size, self.global_batch_size
        if micro > 0 and batch > 0 and batch % micro:
            errors.append(
                f"global_batch_size={batch} must be a multiple of micro_batch_size={micro}, such "
                f"as {-(-batch // micro) * micro}"
            )
        if not 0 <= self.seed < 2**32:
            errors.append(f"seed={self.seed} must be between 0 and {2**32 - 1}")
        try:
            parse_split(self.split)
        except ValueError as error:
            errors.append(str(error))
        return errors

    def validate(self, data_parallel_size: int | None = None) -> list[str]:
        """Returns what is wrong with the files and, if a size is given, with the batch size for
        that layout.

        Meant to be called before any process is started; an empty list means that nothing was
        found.
        """
        errors = corpus_errors(self.paths, self.tokenizer)
        if not errors and (self.eod_mask_loss or self.reset_position_ids) and self.eod_id is None:
            errors.append(
                "tokenizer: eod_mask_loss and reset_position_ids need the end-of-document token, "
                "and the corpora have no data card: name their tokenizer"
            )
        if data_parallel_size is not None:
            errors += self._batch_errors(data_parallel_size)
        return errors

    def _batch_errors(self, dp_size: int) -> list[str]:
        unit = self.micro_batch_size * dp_size
        if self.global_batch_size % unit == 0:
            return []
        return [
            f"global_batch_size={self.global_batch_size} must be a multiple of micro_batch_size="
            f"{self.micro_batch_size} x data_parallel_size={dp_size} = {unit}, such as "
            f"{-(-self.global_batch_size // unit) * unit}"
        ]

    @property
    def vocab_size(self) -> int | None:
        """Number of token ids by tokenizer or data card; None when there is neither."""
        return self._vocabulary().vocab_size

    @property
    def eod_id(self) -> int | None:
        """End-of-document token by tokenizer or data card; None when there is neither."""
        return self._vocabulary().eod_id

    def _vocabulary(self) -> Vocabulary:
        return read_vocabulary(self.paths, self.tokenizer)

    @property
    def consumed_samples(self) -> int:
        """Training sequences delivered to all ranks since the run began."""
        state = self.state_dict().get("loader")
        return state["consumed_samples"] if state else 0

    def setup(self, stage: str) -> None:
        """Opens the corpora and builds the indexes of the splits that the stage needs.

        Raises:
            ValueError: see `validate`; or a split is too small.
        """
        if errors := self.validate():
            raise ValueError("PretrainingDataModule:\n- " + "\n- ".join(errors))
        eod_id = self.eod_id  # read once: a large tokenizer takes a second to load
        if stage == "fit":
            self._loader, self._loaded = None, None
            wanted = self._samples_wanted()
            self._train = self._build("train", self.weights, wanted, eod_id)
            length = len(self._train)
            self._train_samples = length if wanted is None else min(wanted, length)
            if self._train_samples < self.global_batch_size:
                raise ValueError(
                    f"global_batch_size={self.global_batch_size}: the training split of "
                    f"{self.paths} gives only {self._train_samples} samples of {self.seq_length} "
                    "tokens: lower the batch size or seq_length, or ask for more with "
                    "num_train_samples"
                )
        if stage in ("fit", "validate"):
            self._valid = self._build("valid", None, None, eod_id)
        if stage == "test":
            self._test = self._build("test", None, None, eod_id)

    def _samples_wanted(self) -> int | None:
        """Samples that the run will use, None when a pass over the split is an epoch."""
        if self.num_train_samples is not None or self.trainer is None or self.trainer.max_steps < 1:
            return self.num_train_samples
        batches = self.trainer.max_steps * self.trainer.accumulate_grad_batches
        return batches * self.global_batch_size

    def _build(
        self,
        part: Literal["train", "valid", "test"],
        weights: Sequence[float] | None,
        samples: int | None,
        eod_id: int | None,
    ) -> OrderedSource:
        """Builds a split of the blend; without weights, all of every corpus that has a weight."""
        used = [
            path
            for path, weight in zip(
                self.paths, self.weights or [1.0] * len(self.paths), strict=True
            )
            if weight > 0 or weights is not None
        ]
        make = [partial(self._build_one, path, part, eod_id) for path in used]
        return build_blend(make, weights, samples, names=used)

    def _build_one(
        self, path: str, part: str, eod_id: int | None, samples: int | None
    ) -> GPTDataset:
        indexed = IndexedDataset(path)
        ranges = split_ranges(self.split, len(indexed))._asdict()
        return GPTDataset(
            indexed,
            ranges[part],
            samples,
            self.seq_length,
            self.seed,
            eod_mask_loss=self.eod_mask_loss,
            reset_position_ids=self.reset_position_ids,
            eod_id=eod_id,
            drop_last=part == "train",  # elsewhere every token counts
            cache_dir=self.cache_dir,
        )

    def train_dataloader(self) -> StatefulLoader:
        """Returns the loader of this rank's share, at the position of the checkpoint or of the last
        loader.
        """
        assert self._train is not None, "setup('fit') comes first"
        overfit = self.trainer is not None and self.trainer.overfit_batches > 0  # pyright: ignore
        sampler = self._sampler(
            self._train_samples, self.global_batch_size, shuffle=not overfit, drop_last=True
        )
        position = self.state_dict().get("loader")
        self._loader = self._make_loader(self._train, sampler, restart=overfit)
        if position is not None and not overfit:
            self._loader.load_state_dict(position)
        return self._loader

    def val_dataloader(self) -> StatefulLoader | list[StatefulLoader]:
        """Returns the loader of one pass over the validation split; an empty list when the split is
        empty.
        """
        assert self._valid is not None, "setup('fit') or setup('validate') comes first"
        return self._evaluation_loader(self._valid)

    def test_dataloader(self) -> StatefulLoader | list[StatefulLoader]:
        """Returns the loader of one pass over the test split; an empty list when the split is
        empty.
        """
        assert self._test is not None, "setup('test') comes first"
        return self._evaluation_loader(self._test)

    def _evaluation_loader(self, dataset: OrderedSource) -> StatefulLoader | list[StatefulLoader]:
        if len(dataset) == 0:
            return []
        # No larger than the split needs: a batch of mostly padding would cost as much as a full
        # one.
        unit = self.micro_batch_size * self._dp()[1]
        batch = min(self.global_batch_size, -(-len(dataset) // unit) * unit)
        sampler = self._sampler(len(dataset), batch, shuffle=False, drop_last=False)
        return self._make_loader(dataset, sampler, restart=True)

    def _sampler(
        self, samples: int, batch: int, *, shuffle: bool, drop_last: bool
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
            shuffle_first_epoch=False,  # the data set itself is shuffled
            drop_last=drop_last,
        )

    def _make_loader(
        self, dataset: OrderedSource, sampler: GlobalBatchSampler, *, restart: bool
    ) -> StatefulLoader:
        on_gpu = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return StatefulLoader(
            dataset, sampler, restart=restart, num_workers=self.num_workers, pin_memory=on_gpu
        )

    def _dp(self) -> tuple[int, int]:
        """Returns rank and size on the data-parallel axis, as the strategy defines them."""
        layout = None if self.trainer is None else self.trainer.distributed_sampler_kwargs
        return (0, 1) if layout is None else (layout["rank"], layout["num_replicas"])

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the training data, equal on all ranks; empty before training."""
        if self._loader is None:
            return self._loaded or {}
        assert self._train is not None  # a loader has a data set
        return {"loader": self._loader.state_dict(), "train_order": self._train.fingerprint}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Lets the next training loader continue at the saved position, and warns when the order
        changed.
        """
        self._loaded = state_dict
        if self._train is not None and state_dict["train_order"] != self._train.fingerprint:
            rank_zero_warn(
                "The order of the training samples is not the one of the checkpoint (other data, "
                "seed, split, seq_length, weights, or a number of samples that needs more "
                f"epochs): the run continues at sample {state_dict['loader']['consumed_samples']} "
                "of the new order, where samples may repeat or be left out."
            )
