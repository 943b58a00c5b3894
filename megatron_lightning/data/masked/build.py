"""From the option of a data module to data sets: which kind, what it needs of the tokenizer, and
what a split counts.
"""

import os
from typing import Literal, get_args

from megatron_lightning.data.blend import OrderedSource
from megatron_lightning.data.indexed import IndexedDataset
from megatron_lightning.data.masked.bert import BERTDataset
from megatron_lightning.data.masked.fim import FIMDataset
from megatron_lightning.data.masked.options import BERTDataConfig, FIMConfig, T5DataConfig
from megatron_lightning.data.masked.t5 import T5Dataset
from megatron_lightning.data.masked.vocabulary import BERTVocabulary, FIMTokens, T5Vocabulary
from megatron_lightning.data.tokenizer import NamedTokens, Tokenizer, load_tokenizer

DatasetKind = Literal["gpt", "bert", "t5", "fim"]
MaskedConfig = BERTDataConfig | T5DataConfig | FIMConfig
TaskVocabulary = BERTVocabulary | T5Vocabulary | FIMTokens


def masked_config(dataset: DatasetKind | MaskedConfig) -> MaskedConfig | None:
    """Returns the options of a kind of data set, with their defaults for a word; None for "gpt".

    Raises:
        ValueError: there is no such kind.
    """
    if isinstance(dataset, MaskedConfig):
        return dataset
    if dataset not in get_args(DatasetKind):
        raise ValueError(
            f"dataset={dataset!r}: choose one of {get_args(DatasetKind)}, or give a "
            "BERTDataConfig, T5DataConfig or FIMConfig"
        )
    kinds = {"bert": BERTDataConfig, "t5": T5DataConfig, "fim": FIMConfig}
    return kinds[dataset]() if dataset in kinds else None


def task_vocabulary(config: MaskedConfig, tokenizer: Tokenizer) -> TaskVocabulary:
    """Returns what the data set needs to know of the tokenizer's vocabulary.

    Raises:
        ValueError: it lacks tokens; all that are missing are named.
    """
    if not isinstance(tokenizer, NamedTokens):
        raise ValueError(
            f"tokenizer={tokenizer.name}: its tokens have no names, so it has none for "
            f"{type(config).__name__}: use a tokenizer.json with the special tokens"
        )
    tokens, eod_id = tokenizer.token_ids(), tokenizer.eod_id
    if isinstance(config, BERTDataConfig):
        return BERTVocabulary.from_tokens(tokens, config, eod_id)
    if isinstance(config, T5DataConfig):
        return T5Vocabulary.from_tokens(tokens, config, eod_id)
    return FIMTokens.from_tokens(tokens, config, eod_id)


def masked_errors(
    config: MaskedConfig, tokenizer: str | os.PathLike[str] | None, *, gpt_options: bool
) -> list[str]:
    """Returns what keeps a data module from making such samples.

    Args:
        config: options of the data set.
        tokenizer: what the data module was given.
        gpt_options: whether options are set that GPT samples alone have.
    """
    errors = []
    if gpt_options and not isinstance(config, FIMConfig):
        errors.append(
            f"eod_mask_loss and reset_position_ids: not with {type(config).__name__}, whose "
            "samples hold one document; leave them out"
        )
    if tokenizer is None:
        errors.append(
            f"tokenizer=None: {type(config).__name__} needs special tokens; name the tokenizer of "
            "the corpora"
        )
        return errors
    try:
        task_vocabulary(config, load_tokenizer(tokenizer))
    except (ValueError, OSError, ImportError) as error:
        errors.append(f"tokenizer: {error}")
    return errors


def split_elements(config: MaskedConfig | None, indexed: IndexedDataset) -> int:
    """Returns how many elements a split string divides: documents of sentence-split corpora, else
    sequences.
    """
    if config is None or isinstance(config, FIMConfig):
        return len(indexed)
    return len(indexed.document_indices) - 1


def build_masked(
    config: MaskedConfig,
    indexed: IndexedDataset,
    elements: range,
    num_samples: int | None,
    seq_length: int,
    seed: int,
    tokenizer: Tokenizer,
    *,
    eod_mask_loss: bool = False,
    reset_position_ids: bool = False,
    drop_last: bool = True,
    cache_dir: str | os.PathLike[str] | None = None,
    name: str = "data",
) -> OrderedSource:
    """Returns the data set that `config` describes; arguments are those of `GPTDataset`.

    Args:
        config: options of the data set.
        indexed: the corpus.
        elements: a run of documents or sequences, see `split_elements`.
        num_samples: samples that will be used; None means one pass.
        seq_length: tokens a sample.
        seed: of everything random.
        tokenizer: that of the corpus.
        eod_mask_loss: see `GPTDataset`; fill-in-the-middle only.
        reset_position_ids: see `GPTDataset`; fill-in-the-middle only.
        drop_last: see `GPTDataset`; fill-in-the-middle only.
        cache_dir: folder that keeps the index arrays.
        name: of the corpus, in the accounts of batches.

    Raises:
        ValueError: see the data sets and `task_vocabulary`.
    """
    vocabulary = task_vocabulary(config, tokenizer)
    place = (indexed, elements, num_samples, seq_length, seed)
    if isinstance(config, BERTDataConfig):
        assert isinstance(vocabulary, BERTVocabulary)
        return BERTDataset(*place, vocabulary, config, cache_dir=cache_dir, name=name)
    if isinstance(config, T5DataConfig):
        assert isinstance(vocabulary, T5Vocabulary)
        return T5Dataset(*place, vocabulary, config, cache_dir=cache_dir, name=name)
    assert isinstance(vocabulary, FIMTokens)
    return FIMDataset(
        *place,
        tokenizer,
        vocabulary,
        config,
        eod_mask_loss=eod_mask_loss,
        reset_position_ids=reset_position_ids,
        drop_last=drop_last,
        cache_dir=cache_dir,
        name=name,
    )
