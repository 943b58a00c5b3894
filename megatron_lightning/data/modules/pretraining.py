"""Pretraining data for a Lightning Trainer: indexed corpora in, batches of token samples out."""

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path

from lightning.pytorch import Trainer

from megatron_lightning.data.blend import OrderedSource, build_blend
from megatron_lightning.data.blend_spec import Blend, BlendLike, SetsLike, read_blend, read_sets
from megatron_lightning.data.corpus import Vocabulary, corpus_errors, read_vocabulary
from megatron_lightning.data.gpt import GPTDataset
from megatron_lightning.data.indexed import Access, BlockCache, IndexedDataset
from megatron_lightning.data.masked import (
    DatasetKind,
    MaskedConfig,
    build_masked,
    masked_config,
    masked_errors,
    split_elements,
)
from megatron_lightning.data.modules.base import TokenDataModule
from megatron_lightning.data.modules.resumable import (
    DataloaderType,
    EvaluationPart,
    EvaluationSets,
)
from megatron_lightning.data.ramp import Rampup
from megatron_lightning.data.splits import DEFAULT_SPLIT, Part, parse_split
from megatron_lightning.data.token_store import MockCorpus, TokenStore
from megatron_lightning.data.tokenizer import load_tokenizer

MOCK = "mock"


class PretrainingDataModule(TokenDataModule):
    """Samples of `seq_length` tokens from one corpus or a blend, split into train, valid and test.

    Constructing it opens no file. Batches are dicts of `tokens`, `labels`, `position_ids` (int64)
    and `loss_mask` (float32), each (global_batch_size / data-parallel size, S), and `account`, what
    each sample is and counts for.

    Training draws from a weighted blend in its given proportions. Validation and test are one pass
    over the whole split of every corpus whose weight is not 0: each sample counts once, and samples
    that only fill up a batch have a loss mask of 0.

    Args:
        paths: path of a `.bin`/`.idx` pair without suffix; a list of them; `{path: weight}`; or
            `weight path weight path ...` as a list or one string. None with `mock_data`, or "mock"
            where a value must be given, as in config files.
        seq_length: tokens a sample.
        micro_batch_size: sequences per data-parallel rank per forward.
        global_batch_size: sequences per batch of all ranks together.
        dataset: kind of the samples: "gpt"; "fim" (fill-in-the-middle); "bert" or "t5", which need
            corpora with a sequence a sentence, split by documents, and whose batches have other
            fields (see `BERTDataset`, `T5Dataset`); or a `FIMConfig`, `BERTDataConfig` or
            `T5DataConfig`. All but "gpt" need `tokenizer`.
        split: shares of train, valid and test; None means 969,30,1. Not with `valid_paths` or
            `test_paths`.
        valid_paths: corpora for validation, used whole, in a form of `paths`; or `{name: ...}` for
            several sets, whose metrics then end with `/NAME`. Training uses `paths` whole then.
        test_paths: the same for testing.
        multiple_validation_sets: each validation corpus is a set of its own, and its metrics end
            with `/dataloader_idx_N`.
        mock_data: made-up documents in place of corpora.
        rampup_batch_size: smaller batches at first: `[start, increment, samples]` as Megatron's
            option of this name, or steps `[[0, size], [sample, size], ...]`.
        num_train_samples: sequences to train on; None means what `Trainer(max_steps)` needs, or one
            pass over the training split when that is not set.
        seed: of the order of the samples, 0 to 2^32 - 1.
        num_workers: processes per rank that read ahead; 0 reads in the training process.
        dataloader_type: "single": the data set's own shuffled order, and a new one in each later
            epoch; "cyclic": Megatron's option of this name with --no-data-sharding, to continue
            such a run: samples are permuted by epoch number alone. Its last samples that fill no
            micro-batch are left out, so keep micro_batch_size in a run (a change is warned of).
        tokenizer: "bytes", a tokenizer's file or folder; checked against the data cards. Not needed
            when there is a data card. Mock data take "bytes" by default.
        eod_mask_loss: no loss where the input is an end-of-document token.
        reset_position_ids: positions begin at 0 after each end-of-document token.
        reset_attention_mask: tokens attend to their own document only; batches hold `cu_seqlens`.
        cache_dir: folder that keeps the index arrays between runs; None builds them in memory.
        corpus_access: how local corpora are read: "mmap", or "file" for plain reads.
        block_cache: local folder for blocks of remote corpora (paths such as s3://bucket/corpus).

    Raises:
        ValueError: arguments out of range; all violations are listed.
    """

    evaluation_fields: Mapping[EvaluationPart, str] = {"valid": "valid_paths", "test": "test_paths"}
    split_unit = "sequences"

    def __init__(
        self,
        paths: BlendLike | None,
        seq_length: int,
        micro_batch_size: int,
        global_batch_size: int,
        *,
        dataset: DatasetKind | MaskedConfig = "gpt",
        split: str | None = None,
        valid_paths: SetsLike | None = None,
        test_paths: SetsLike | None = None,
        multiple_validation_sets: bool = False,
        mock_data: bool = False,
        rampup_batch_size: Rampup | None = None,
        num_train_samples: int | None = None,
        seed: int = 1234,
        num_workers: int = 0,
        dataloader_type: DataloaderType = "single",
        tokenizer: str | Path | None = None,
        eod_mask_loss: bool = False,
        reset_position_ids: bool = False,
        reset_attention_mask: bool = False,
        cache_dir: str | Path | None = None,
        corpus_access: Access = "mmap",
        block_cache: BlockCache | None = None,
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
        self.dataloader_type = dataloader_type
        paths = None if mock_data and paths == MOCK else paths
        self.mock_data, self.cache_dir = mock_data, cache_dir
        self.corpus_access: Access = corpus_access
        self.block_cache = block_cache
        self.tokenizer = "bytes" if mock_data and tokenizer is None else tokenizer
        self.eod_mask_loss, self.reset_position_ids = eod_mask_loss, reset_position_ids
        self.reset_attention_mask = reset_attention_mask
        self.multiple_validation_sets = multiple_validation_sets
        self.has_own_evaluation = valid_paths is not None or test_paths is not None
        self.split = split or ("1" if self.has_own_evaluation else DEFAULT_SPLIT)
        errors = self._conflicts(paths, split)
        self._masked: MaskedConfig | None = None
        try:
            self._masked = masked_config(dataset)
        except ValueError as error:
            errors.append(str(error))
        if reset_attention_mask and self._masked is not None:
            errors.append(f"reset_attention_mask=True: only with dataset='gpt', not {dataset!r}")
        if mock_data and self._masked is not None:
            errors.append(f"mock_data=True: not with dataset={dataset!r}; give paths of corpora")
        self._train_blend = Blend([MOCK], None)
        self._evaluation_blends: dict[EvaluationPart, dict[str, Blend]] = {}
        try:
            if paths is not None:
                self._train_blend = read_blend(paths)
            if valid_paths is not None:
                self._evaluation_blends["valid"] = read_sets(valid_paths, "valid_paths")
            if test_paths is not None:
                self._evaluation_blends["test"] = read_sets(test_paths, "test_paths")
        except ValueError as error:
            errors.append(str(error))
        self.paths, self.weights = self._train_blend
        self._raise_if_wrong(errors)

    def _conflicts(self, paths: BlendLike | None, split: str | None) -> list[str]:
        errors = []
        if self.mock_data and (paths is not None or self.has_own_evaluation):
            errors.append("mock_data=True: leave paths=None, valid_paths and test_paths out")
        if not self.mock_data and paths is None:
            errors.append(
                "paths=None: give the path of a .bin/.idx pair without suffix, or mock_data=True"
            )
        if split is not None and self.has_own_evaluation:
            errors.append(
                f'split="{split}" with valid_paths or test_paths: these are used whole, and so is '
                "paths for training; leave split out"
            )
        return errors

    def _argument_errors(self) -> list[str]:
        errors = super()._argument_errors()
        if self.corpus_access not in ("mmap", "file"):
            errors.append(f'corpus_access="{self.corpus_access}" must be "mmap" or "file"')
        if self.dataloader_type not in ("single", "cyclic"):
            errors.append(
                f'dataloader_type="{self.dataloader_type}" must be "single" or "cyclic"; '
                "Megatron's cyclic order with sharded data gives every data-parallel rank samples "
                "of its own, so that the order of training would change with the layout: it is not "
                "offered"
            )
        try:
            parse_split(self.split)
        except ValueError as error:
            errors.append(str(error))
        return errors

    @property
    def all_paths(self) -> list[str]:
        """Every corpus of training, validation and testing that has a weight, once; none for mock
        data.
        """
        if self.mock_data:
            return []
        blends = [blend for sets in self._evaluation_blends.values() for blend in sets.values()]
        return list(dict.fromkeys(path for b in [self._train_blend, *blends] for path in b.used))

    def check_trainer(self, trainer: Trainer) -> list[str]:
        """Returns what the Trainer asks for and the data cannot give."""
        errors = super().check_trainer(trainer)
        wanted = self._samples_wanted(trainer)  # an epoch of them, however small the corpora are
        return errors + ([] if wanted is None else self._interval_errors(trainer, wanted))

    def _has_own(self, part: EvaluationPart) -> bool:
        return bool(self._evaluation_blends.get(part))

    def _evaluation_split(self) -> str | None:
        return None if self.has_own_evaluation else self.split

    def _data_errors(self) -> list[str]:
        errors = corpus_errors(self.all_paths, self.tokenizer)
        if not errors and self._masked is not None:
            gpt_options = self.eod_mask_loss or self.reset_position_ids
            return masked_errors(self._masked, self.tokenizer, gpt_options=gpt_options)
        ends = self.eod_mask_loss or self.reset_position_ids or self.reset_attention_mask
        if not errors and ends and self.eod_id is None:
            errors.append(
                "tokenizer: eod_mask_loss, reset_position_ids and reset_attention_mask need the "
                "end-of-document token, and the corpora have no data card: name their tokenizer"
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
        return read_vocabulary(self.all_paths, self.tokenizer)

    # ------------------------------------------------------------------ data sets

    def _build_train(self, samples: int | None) -> OrderedSource:
        blend = self._train_blend
        return self._build(blend.paths, blend.weights, samples, "train", "train")

    def _build_evaluation(self, part: EvaluationPart) -> EvaluationSets:
        """All of every corpus that has a weight, each sample once."""
        taken: Part
        if self.has_own_evaluation:
            blends, taken = self._evaluation_blends.get(part, {}), "train"
        else:
            blends, taken = {"": self._train_blend}, part
        sets: dict[str | int, list[str]] = {name: blend.used for name, blend in blends.items()}
        if self.multiple_validation_sets and part == "valid":
            members = [(name, path) for name, paths in sets.items() for path in paths]
            sets = {
                f"{name}/{Path(path).name}" if name else number: [path]
                for number, (name, path) in enumerate(members)
            }
        return {name: self._build(paths, None, None, taken, part) for name, paths in sets.items()}

    def _build(
        self,
        paths: Sequence[str],
        weights: Sequence[float] | None,
        samples: int | None,
        taken: Part,
        use: Part,
    ) -> OrderedSource:
        """Builds the part `taken` of each corpus' split, for training, validation or testing."""
        vocabulary = self._vocabulary()  # read once: a large tokenizer takes a second to load
        make = [partial(self._build_one, path, taken, use, vocabulary) for path in paths]
        return build_blend(make, weights, samples, names=paths, cache_dir=self.cache_dir)

    def _build_one(
        self, path: str, taken: Part, use: Part, vocabulary: Vocabulary, samples: int | None
    ) -> OrderedSource:
        if self._masked is not None:
            return self._build_masked(self._masked, path, taken, use, samples)
        indexed = self._open(path, vocabulary)
        return GPTDataset(
            indexed,
            self._shares.take(self.split, len(indexed), taken, use),
            samples,
            self.seq_length,
            self.seed,
            eod_mask_loss=self.eod_mask_loss,
            reset_position_ids=self.reset_position_ids,
            reset_attention_mask=self.reset_attention_mask,
            eod_id=vocabulary.eod_id,
            drop_last=use == "train",  # elsewhere every token counts
            cache_dir=self.cache_dir,
            name=path,
        )

    def _build_masked(
        self, config: MaskedConfig, path: str, taken: Part, use: Part, samples: int | None
    ) -> OrderedSource:
        assert self.tokenizer is not None  # checked by `validate`
        indexed = self._open_corpus(path)
        return build_masked(
            config,
            indexed,
            self._shares.take(self.split, split_elements(config, indexed), taken, use),
            samples,
            self.seq_length,
            self.seed,
            load_tokenizer(self.tokenizer),
            eod_mask_loss=self.eod_mask_loss,
            reset_position_ids=self.reset_position_ids,
            drop_last=use == "train",
            cache_dir=self.cache_dir,
            name=path,
        )

    def _open(self, path: str, vocabulary: Vocabulary) -> TokenStore:
        if not self.mock_data:
            return self._open_corpus(path)
        assert vocabulary.vocab_size is not None
        assert vocabulary.eod_id is not None
        return MockCorpus(vocabulary.vocab_size, vocabulary.eod_id, seed=self.seed)

    def _open_corpus(self, path: str) -> IndexedDataset:
        return IndexedDataset(path, access=self.corpus_access, cache=self.block_cache)
