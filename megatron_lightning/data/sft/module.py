"""Supervised fine-tuning on chats, instructions or prompts with completions."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from megatron_lightning.data.blend import OrderedSource
from megatron_lightning.data.modules.base import TokenDataModule
from megatron_lightning.data.modules.resumable import EvaluationPart, EvaluationSets
from megatron_lightning.data.sft.chat_template import ChatTemplate
from megatron_lightning.data.sft.conversations import (
    FORMATS,
    DataFormat,
    detect_format,
    read_example,
)
from megatron_lightning.data.sft.dataset import (
    TRUNCATIONS,
    PackedDataset,
    PackingStatistics,
    Truncation,
)
from megatron_lightning.data.sft.documents import Documents, OnBadExample, load_documents
from megatron_lightning.data.sft.encode import LOSS_ON, ExampleEncoder, LossOn, OffsetTokenizer
from megatron_lightning.data.sft.packing import PACKINGS, Packing
from megatron_lightning.data.sft.records import RecordSource
from megatron_lightning.data.sft.template_files import BUILTIN, load_chat_template
from megatron_lightning.data.splits import Part, parse_split
from megatron_lightning.data.tokenizer import Tokenizer, load_tokenizer

Data = str | Sequence[str] | Mapping[str, Any] | Iterable[Mapping[str, Any]]


class SFTDataModule(TokenDataModule):
    """Chats through a chat template, with a loss on answers only, packed into samples.

    Constructing it opens no file. Batches are dicts of `tokens`, `labels`, `position_ids` (int64)
    and `loss_mask` (float32), each (global_batch_size / data-parallel size, S), and for packed
    documents `cu_seqlens` (B, boundaries). A label without a loss is -100.

    Every epoch has its own order of the samples; training on more than one pass is a matter of
    `Trainer(max_epochs=)` or `max_steps`. Validation and test are one pass over everything.

    Args:
        train: files (.jsonl, .json, each also .gz or .zst, .parquet; patterns), the folder of a
            saved data set, the arguments of `datasets.load_dataset` (path, split, ...), or a data
            set object. Records are in one of the formats of `conversations.py`.
        seq_length: tokens a sample.
        micro_batch_size: samples per data-parallel rank per forward.
        global_batch_size: samples per batch of all ranks together.
        tokenizer: folder of a tokenizer, its `tokenizer.json`, or "bytes".
        valid: validation data, as `train`; or several sets by name.
        test: the same for testing.
        split: shares of train, valid and test, taken from `train` in its order, in place of `valid`
            and `test`.
        data_format: "messages", "sharegpt", "alpaca" or "prompt_completion"; None tells it from the
            first record.
        chat_template: None takes the tokenizer's; else the name of one of its templates, the path
            of a Jinja file, or "chatml".
        template_date: date (YYYY-MM-DD) for templates that print today's.
        loss_on: "answers": all that the assistant says; "last_answer": its last turn; "all": every
            token.
        packing: "first_fit_decreasing"; "in_order", which keeps the order of the data; or "none",
            one document a sample.
        truncation: what becomes of a document longer than `seq_length`: "right" cuts off its end,
            "drop" leaves it out, "fail" stops.
        document_multiple: documents take up a multiple of so many tokens, outside of the loss. 2 x
            context_parallel_size keeps samples from growing when context parallelism cuts them.
        on_bad_example: "fail" stops at an example that can't be read; "skip" counts it.
        seed: of the order of the samples, 0 to 2^32 - 1.
        num_workers: processes per rank that read ahead; 0 reads in the training process.
        cache_dir: folder that keeps tokens and plan between runs and ranks, by content; None makes
            them in each process.

    Raises:
        ValueError: arguments out of range; all violations are listed.
    """

    shuffle_first_epoch = True
    drop_last = False  # small data sets: every document once an epoch

    def __init__(
        self,
        train: Data,
        seq_length: int,
        micro_batch_size: int,
        global_batch_size: int,
        *,
        tokenizer: str | Path,
        valid: Data | None = None,
        test: Data | None = None,
        split: str | None = None,
        data_format: DataFormat | None = None,
        chat_template: str | None = None,
        template_date: str | None = None,
        loss_on: LossOn = "answers",
        packing: Packing = "first_fit_decreasing",
        truncation: Truncation = "right",
        document_multiple: int = 1,
        on_bad_example: OnBadExample = "fail",
        seed: int = 1234,
        num_workers: int = 0,
        cache_dir: str | Path | None = None,
    ) -> None:
        super().__init__(
            seq_length, micro_batch_size, global_batch_size, seed=seed, num_workers=num_workers
        )
        self.train, self.valid, self.test, self.split = train, valid, test, split
        self.tokenizer, self.cache_dir = tokenizer, cache_dir
        self.data_format: DataFormat | None = data_format
        self.chat_template, self.template_date = chat_template, template_date
        self.loss_on: LossOn = loss_on
        self.packing: Packing = packing
        self.truncation: Truncation = truncation
        self.document_multiple = document_multiple
        self.on_bad_example: OnBadExample = on_bad_example
        self.statistics: dict[str, PackingStatistics] = {}
        self._raise_if_wrong()

    def _argument_errors(self) -> list[str]:
        errors = super()._argument_errors()
        for name, value, known in (
            ("data_format", self.data_format, (None, *FORMATS)),
            ("loss_on", self.loss_on, LOSS_ON),
            ("packing", self.packing, PACKINGS),
            ("truncation", self.truncation, TRUNCATIONS),
            ("on_bad_example", self.on_bad_example, ("fail", "skip")),
        ):
            if value not in known:
                choices = ", ".join(str(choice) for choice in known)
                errors.append(f"{name}={value!r} is unknown: choose one of {choices}")
        if self.document_multiple < 1 or self.seq_length % self.document_multiple:
            errors.append(
                f"document_multiple={self.document_multiple} must divide seq_length="
                f"{self.seq_length}"
            )
        try:
            self._today()
        except ValueError:
            errors.append(f"template_date={self.template_date!r} is no date such as 2026-01-31")
        if self.split is not None:
            if self.valid is not None or self.test is not None:
                errors.append("split takes valid and test from train: leave one or the other out")
            try:
                parse_split(self.split)
            except ValueError as error:
                errors.append(str(error))
        return errors

    def _today(self) -> date | None:
        return None if self.template_date is None else date.fromisoformat(self.template_date)

    def _data_errors(self) -> list[str]:
        """Reads and encodes the first example of each source."""
        errors = []
        try:
            tokenizer = load_tokenizer(self.tokenizer)
        except (OSError, ValueError) as error:
            return [f"tokenizer: {error}"]
        for name, source in self._sources().items():
            try:
                first = _first_record(RecordSource(source, name))
                if first is None:
                    errors.append(f"{name}: no record in {source}")
                    continue
                if self.on_bad_example == "skip":
                    self._encoder(tokenizer, first)
                    continue
                example = read_example(first, self.data_format or detect_format(first))
                encoder = self._encoder(tokenizer, first)
                encoder.encode([encoder.render(example)])
            except (OSError, ValueError) as error:
                text = str(error)
                errors.append(text if text.startswith(f"{name}: ") else f"{name}: {text}")
        return errors

    def _has_own(self, part: EvaluationPart) -> bool:
        return bool(_named(self.valid if part == "valid" else self.test))

    def _evaluation_split(self) -> str | None:
        return self.split

    def _sources(self) -> dict[str, Any]:
        """All data by name: train, valid, test, or valid/NAME."""
        sources: dict[str, Any] = {"train": self.train}
        for part, data in (("valid", self.valid), ("test", self.test)):
            for name, source in _named(data).items():
                sources[f"{part}/{name}" if name else part] = source
        return sources

    def _encoder(self, tokenizer: Tokenizer, first: Mapping[str, Any]) -> ExampleEncoder:
        """Encodes records like the first one; only plain prompts need no template."""
        template: ChatTemplate | None = None
        plain = isinstance(first.get("prompt"), str) and isinstance(first.get("completion"), str)
        if not plain or self.chat_template is not None:
            template = load_chat_template(self.tokenizer, self.chat_template, today=self._today())
        bos_ids = tokenizer.begin_ids if isinstance(tokenizer, OffsetTokenizer) else []
        return ExampleEncoder(tokenizer, template, loss_on=self.loss_on, bos_ids=bos_ids)

    @property
    def vocab_size(self) -> int:
        """Number of token ids of the tokenizer."""
        return load_tokenizer(self.tokenizer).vocab_size

    @cached_property
    def tokenizer_digest(self) -> str:
        """Identity of the tokenizer; kept in checkpoints."""
        return load_tokenizer(self.tokenizer).digest

    def _samples_wanted(self, trainer: Trainer | None) -> int | None:
        return None  # an epoch is a pass over all samples, however many steps there are

    def _build_train(self, samples: int | None) -> OrderedSource:
        dataset = self._packed("train", self.train, part="train")
        if len(dataset) == 0:
            what = f"train: no document to train on with seq_length={self.seq_length}"
            self._raise([f"{what}: {dataset.statistics}"])
        return dataset

    def _build_evaluation(self, part: EvaluationPart) -> EvaluationSets:
        if self.split is not None:
            return {"": self._packed(part, self.train, part=part)}
        data = self.valid if part == "valid" else self.test
        return {
            name: self._packed(f"{part}/{name}" if name else part, source)
            for name, source in _named(data).items()
        }

    def _packed(self, name: str, source: Any, part: Part | None = None) -> PackedDataset:
        tokenizer = load_tokenizer(self.tokenizer)
        records = RecordSource(source, name)
        documents = self._documents(tokenizer, records)
        chosen = None
        if part is not None and self.split is not None:
            chosen = self._shares.take(self.split, len(documents), part)
        dataset = PackedDataset(
            documents,
            self.seq_length,
            packing=self.packing,
            truncation=self.truncation,
            document_multiple=self.document_multiple,
            chosen=chosen,
            pad_id=tokenizer.eod_id,
            name=name,
            cache_dir=self.cache_dir,
        )
        self.statistics[name] = dataset.statistics
        rank_zero_info(f"SFT data {name}: {dataset.statistics}")
        return dataset

    def _documents(self, tokenizer: Tokenizer, records: RecordSource) -> Documents:
        encoder = self._encoder(tokenizer, _first_record(records) or {})
        if encoder.template is not None:
            _warn_of_pieces(tokenizer, encoder.template)
        return load_documents(
            records,
            encoder,
            data_format=self.data_format,
            on_bad_example=self.on_bad_example,
            cache_dir=self.cache_dir,
        )


def _first_record(records: RecordSource) -> Mapping[str, Any] | None:
    return next((entry.record for entry in records if entry.error is None), None)


def _named(data: Any) -> dict[str, Any]:
    """Sources by name; a single one has the name ""."""
    if data is None:
        return {}
    if isinstance(data, Mapping) and "path" not in data:
        return {str(name): source for name, source in data.items()}
    return {"": data}


def _warn_of_pieces(tokenizer: Tokenizer, template: ChatTemplate) -> None:
    """Warns when the marks of the built-in template are no tokens of the tokenizer."""
    if template.sources.get("default") not in BUILTIN.values():
        return
    pieces = [mark for mark in ("<|im_start|>", "<|im_end|>") if len(tokenizer.encode(mark)) > 1]
    if pieces:
        rank_zero_warn(
            f"chat_template='chatml': {' and '.join(pieces)} are no tokens of {tokenizer.name} and"
            " become several tokens each; add them to the tokenizer to have one each"
        )
