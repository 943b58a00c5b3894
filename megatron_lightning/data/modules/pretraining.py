"""Pretraining data for a Lightning Trainer: indexed corpora in, batches of token samples out."""

import os
from collections.abc import Sequence
from functools import cached_property, partial

from megatron_lightning.data.blend import OrderedSource, build_blend, parse_blend
from megatron_lightning.data.corpus import Vocabulary, corpus_errors, read_vocabulary
from megatron_lightning.data.gpt import GPTDataset
from megatron_lightning.data.indexed import IndexedDataset
from megatron_lightning.data.modules.base import EvaluationPart, TokenDataModule
from megatron_lightning.data.ramp import Rampup
from megatron_lightning.data.splits import parse_split, split_ranges


class PretrainingDataModule(TokenDataModule):
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
        rampup_batch_size: smaller batches at first: `[start, increment, samples]` as Megatron's
            option of this name, or steps `[[0, size], [sample, size], ...]`.
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
        rampup_batch_size: Rampup | None = None,
        num_train_samples: int | None = None,
        seed: int = 1234,
        num_workers: int = 0,
        tokenizer: str | os.PathLike[str] | None = None,
        eod_mask_loss: bool = False,
        reset_position_ids: bool = False,
        cache_dir: str | os.PathLike[str] | None = None,
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
        self.split, self.tokenizer, self.cache_dir = split, tokenizer, cache_dir
        self.eod_mask_loss, self.reset_position_ids = eod_mask_loss, reset_position_ids
        errors: list[str] = []
        try:
            self.paths, self.weights = parse_blend(paths)
        except ValueError as error:
            errors.append(str(error))
        self._raise_if_wrong(errors)

    def _argument_errors(self) -> list[str]:
        errors = super()._argument_errors()
        try:
            parse_split(self.split)
        except ValueError as error:
            errors.append(str(error))
        return errors

    def _data_errors(self) -> list[str]:
        errors = corpus_errors(self.paths, self.tokenizer)
        if not errors and (self.eod_mask_loss or self.reset_position_ids) and self.eod_id is None:
            errors.append(
                "tokenizer: eod_mask_loss and reset_position_ids need the end-of-document token, "
                "and the corpora have no data card: name their tokenizer"
            )
        return errors

    @property
    def vocab_size(self) -> int | None:
        """Number of token ids by tokenizer or data card; None when there is neither."""
        return self._vocabulary().vocab_size

    @property
    def eod_id(self) -> int | None:
        """End-of-document token by tokenizer or data card; None when there is neither."""
        return self._vocabulary().eod_id

    @cached_property
    def tokenizer_digest(self) -> str | None:
        """Identity of the tokenizer by itself or data card; kept in checkpoints."""
        return self._vocabulary().digest

    def _vocabulary(self) -> Vocabulary:
        return read_vocabulary(self.paths, self.tokenizer)

    def _build_train(self, samples: int | None) -> OrderedSource:
        return self._build("train", self.weights, samples)

    def _build_evaluation(self, part: EvaluationPart) -> dict[str, OrderedSource]:
        return {"": self._build(part, None, None)}

    def _build(
        self, part: str, weights: Sequence[float] | None, samples: int | None
    ) -> OrderedSource:
        """Builds a split of the blend; without weights, all of every corpus that has a weight."""
        given = self.weights or [1.0] * len(self.paths)
        used = [
            path
            for path, weight in zip(self.paths, given, strict=True)
            if weight > 0 or weights is not None
        ]
        eod_id = self.eod_id  # read once: a large tokenizer takes a second to load
        make = [partial(self._build_one, path, part, eod_id) for path in used]
        return build_blend(make, weights, samples, names=used, cache_dir=self.cache_dir)

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
            name=path,
        )
