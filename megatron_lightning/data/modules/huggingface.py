"""Training on data sets of the `datasets` library, without a corpus on disk."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Trainer

from megatron_lightning.data.blend import OrderedSource
from megatron_lightning.data.cache import key_digest
from megatron_lightning.data.gpt import GPTDataset
from megatron_lightning.data.huggingface.samples import DocumentDataset
from megatron_lightning.data.huggingface.sources import (
    DatasetTokens,
    RowTokens,
    is_stream,
    open_dataset,
)
from megatron_lightning.data.huggingface.stream import SampleStream, StreamedSet
from megatron_lightning.data.huggingface.stream_loader import StreamLoader
from megatron_lightning.data.modules.base import TokenDataModule
from megatron_lightning.data.modules.resumable import EvaluationPart, EvaluationSets
from megatron_lightning.data.positions import PositionedLoader
from megatron_lightning.data.ramp import BatchSizeSchedule, Rampup
from megatron_lightning.data.splits import Part, parse_split
from megatron_lightning.data.tokenizer import Tokenizer, load_tokenizer

Packing = Literal["stream", "none"]
PACKINGS = ("stream", "none")


class HFDataModule(TokenDataModule):
    """Samples of `seq_length` tokens from data sets with a length, or streams.

    Constructing it opens nothing. Batches are those of `PretrainingDataModule`. The order is a
    function of seed and samples consumed, whatever the layout, and a run continues exactly.

    A data set with a length is shuffled anew in each epoch. A stream keeps its order, or is
    shuffled within a buffer; it has no length, so `Trainer(max_steps)` or `num_train_samples` says
    how long a pass is, and every rank reads all of it.

    Args:
        train: a `datasets.Dataset` or `IterableDataset`, the folder of a saved one, or the
            arguments of `datasets.load_dataset` (path, split, streaming, ...).
        seq_length: tokens a sample.
        micro_batch_size: sequences per data-parallel rank per forward.
        global_batch_size: sequences per batch of all ranks together.
        valid: validation data in the same forms, or `{name: ...}` for several sets, whose metrics
            then end with `/NAME`. Each sample counts once.
        test: the same for testing.
        split: shares of train, valid and test of the rows of `train`, in place of `valid` and
            `test`; not for streams.
        tokenizer: for text: "bytes", a tokenizer's file or folder.
        text_column: column of the text.
        tokens_column: column of token ids; where a data set has it, the text is not looked at.
        append_eod: end each text with the end-of-document token.
        packing: "stream" fills samples with one document after the other; "none" makes one sample
            of each, cut off or filled up outside of the loss.
        shuffle_buffer_size: documents among which a stream is shuffled; 0 keeps its order.
        rampup_batch_size: as in `PretrainingDataModule`.
        num_train_samples: sequences in a pass over a stream.
        seed: of the order of the samples, 0 to 2^32 - 1.
        num_workers: processes per rank that read ahead; 0 reads in the training process. A stream
            is read by one.
        cache_dir: folder that keeps tokens and index arrays between runs and ranks; None makes them
            in each process.

    Raises:
        ValueError: arguments out of range; all violations are listed.
    """

    def __init__(
        self,
        train: Any,
        seq_length: int,
        micro_batch_size: int,
        global_batch_size: int,
        *,
        valid: Any = None,
        test: Any = None,
        split: str | None = None,
        tokenizer: str | Path | None = None,
        text_column: str = "text",
        tokens_column: str = "input_ids",
        append_eod: bool = True,
        packing: Packing = "stream",
        shuffle_buffer_size: int = 0,
        rampup_batch_size: Rampup | None = None,
        num_train_samples: int | None = None,
        seed: int = 1234,
        num_workers: int = 0,
        cache_dir: str | Path | None = None,
    ) -> None:
        super().__init__(
            seq_length,
            micro_batch_size,
            global_batch_size,
            rampup_batch_size=rampup_batch_size,
            num_train_samples=num_train_samples,
            seed=seed,
            num_workers=num_workers,
        )
        self.train, self.tokenizer, self.split = train, tokenizer, split
        self.sets: dict[EvaluationPart, dict[str, Any]] = {
            "valid": _named(valid),
            "test": _named(test),
        }
        self.text_column, self.tokens_column = text_column, tokens_column
        self.append_eod, self.packing = append_eod, packing
        self.shuffle_buffer_size, self.cache_dir = shuffle_buffer_size, cache_dir
        self.shuffle_first_epoch = packing == "none"  # else GPTDataset has shuffled it
        self._opened: dict[int, Any] = {}
        self._raise_if_wrong()

    # ------------------------------------------------------------------ checks

    def _argument_errors(self) -> list[str]:
        errors = super()._argument_errors()
        if self.packing not in PACKINGS:
            errors.append(f"packing={self.packing!r} must be one of {', '.join(PACKINGS)}")
        if self.shuffle_buffer_size < 0:
            errors.append(f"shuffle_buffer_size={self.shuffle_buffer_size} must not be negative")
        if self.split is not None:
            try:
                parse_split(self.split)
            except ValueError as error:
                errors.append(str(error))
            if self.sets["valid"] or self.sets["test"]:
                errors.append(f'split="{self.split}": leave it out, or valid and test')
        return errors

    def _data_errors(self) -> list[str]:
        errors: list[str] = []
        given = {"train": self.train}
        for part, sets in self.sets.items():
            given |= {f"{part}[{name!r}]" if name else part: one for name, one in sets.items()}
        for field, one in given.items():
            try:
                self._rows(self._open(one, field))
            except (OSError, ValueError) as error:
                text = str(error)
                errors.append(text if text.startswith(field) else f"{field}: {text}")
        if errors:
            return errors
        streams = is_stream(self._open(self.train, "train"))
        if streams and self.split is not None:
            errors.append(f'split="{self.split}": a stream has no length; give valid and test')
        if streams and self.num_workers > 1:
            errors.append(
                f"num_workers={self.num_workers}: a stream is read in order by one process; use 1, "
                "or 0 to read in the training process"
            )
        if not streams and self.num_train_samples is not None:
            errors.append(
                f"num_train_samples={self.num_train_samples}: a data set with a length is read as a"
                " whole; say how long to train with Trainer(max_steps) or max_epochs"
            )
        if not streams and self.shuffle_buffer_size:
            errors.append(
                f"shuffle_buffer_size={self.shuffle_buffer_size}: a data set with a length is "
                "shuffled as a whole; leave it at 0"
            )
        return errors

    def _has_own(self, part: EvaluationPart) -> bool:
        return bool(self.sets[part])

    def _evaluation_split(self) -> str | None:
        return self.split

    def check_trainer(self, trainer: Trainer) -> list[str]:
        """Returns what the Trainer asks for and the data cannot give."""
        errors = super().check_trainer(trainer)
        if self._data_errors():  # which are told with those of `validate`
            return errors
        streams = is_stream(self._open(self.train, "train"))
        if streams and self.num_train_samples is None and trainer.max_steps < 1:
            errors.append(
                "num_train_samples=None: a stream has no length; give it, or Trainer(max_steps)"
            )
        return errors

    # ------------------------------------------------------------------ data sets

    @property
    def vocab_size(self) -> int | None:
        """Number of token ids by the tokenizer; None where there is none."""
        return None if self._loaded_tokenizer is None else self._loaded_tokenizer.vocab_size

    @property
    def eod_id(self) -> int | None:
        """End-of-document token by the tokenizer; None where there is none."""
        return None if self._loaded_tokenizer is None else self._loaded_tokenizer.eod_id

    @cached_property
    def _loaded_tokenizer(self) -> Tokenizer | None:
        return None if self.tokenizer is None else load_tokenizer(self.tokenizer)

    def _open(self, source: Any, field: str) -> Any:
        if id(source) not in self._opened:
            self._opened[id(source)] = open_dataset(source, field)
        return self._opened[id(source)]

    def _rows(self, dataset: Any) -> RowTokens:
        return RowTokens(
            dataset.column_names,
            self._loaded_tokenizer,
            self.text_column,
            self.tokens_column,
            append_eod=self.append_eod,
        )

    def _samples_wanted(self, trainer: Trainer | None) -> int | None:
        streams = is_stream(self._open(self.train, "train"))
        return super()._samples_wanted(trainer) if streams else None

    def _build_train(self, samples: int | None) -> OrderedSource:
        dataset = self._open(self.train, "train")
        if is_stream(dataset):
            assert samples is not None  # checked by `check_trainer`
            return self._streamed(dataset, samples, training=True)
        return self._build(dataset, "train", training=True)

    def _build_evaluation(self, part: EvaluationPart) -> EvaluationSets:
        if self.split is not None:
            dataset = self._open(self.train, "train")
            return {"": self._build(dataset, part, training=False)}
        found: dict[str | int, OrderedSource] = {}
        for name, source in self.sets[part].items():
            dataset = self._open(source, part)
            if is_stream(dataset):
                found[name] = self._streamed(dataset, None, training=False)
            else:
                found[name] = self._build(dataset, "train", training=False)
        return found

    def _build(self, dataset: Any, part: Part, *, training: bool) -> OrderedSource:
        rows = self._rows(dataset)
        taken = self._shares.take(self.split or "1", len(dataset), part)
        if self.packing == "none":
            return DocumentDataset(dataset, rows, taken, self.seq_length, part)
        return GPTDataset(
            DatasetTokens(dataset, rows, self.cache_dir),
            taken,
            None,
            self.seq_length,
            self.seed,
            drop_last=training,
            cache_dir=self.cache_dir,
            name=part,
        )

    # ------------------------------------------------------------------ streams

    def _streamed(self, dataset: Any, samples: int | None, *, training: bool) -> OrderedSource:
        rows, buffer = self._rows(dataset), self.shuffle_buffer_size if training else 0
        packed = self.packing == "stream"
        stream = SampleStream(
            dataset,
            rows,
            self.seq_length,
            packed=packed,
            shuffle_buffer_size=buffer,
            seed=self.seed,
            keep_rest=not training,
        )
        key = ["stream", rows.identity, self.seq_length, packed, buffer, self.seed]
        return StreamedSet(stream, samples, key_digest(key))

    def _training_loader(self, dataset: OrderedSource, *, restart: bool) -> PositionedLoader:
        if not isinstance(dataset, StreamedSet):
            return super()._training_loader(dataset, restart=restart)
        return self._stream_loader(dataset, self.batch_size_schedule, restart=restart)

    def _evaluation_loader(self, dataset: OrderedSource) -> PositionedLoader:
        if not isinstance(dataset, StreamedSet):
            return super()._evaluation_loader(dataset)
        schedule = BatchSizeSchedule.constant(self.global_batch_size)
        return self._stream_loader(dataset, schedule, restart=True)

    def _stream_loader(
        self, dataset: StreamedSet, schedule: BatchSizeSchedule, *, restart: bool
    ) -> StreamLoader:
        rank, size = self._dp()
        if errors := self._batch_sizes.layout_errors(size):
            raise ValueError(errors[0])
        return StreamLoader(
            dataset,
            schedule,
            dp_rank=rank,
            dp_size=size,
            drop_last=dataset.samples is not None,
            restart=restart,
            background=self.num_workers > 0,
            pin_memory=self._on_gpu(),
            collate=self.collate,
        )


def _named(sets: Any) -> dict[str, Any]:
    """Sets by name; a single one has the name ""."""
    if sets is None:
        return {}
    return dict(sets) if isinstance(sets, Mapping) and "path" not in sets else {"": sets}
