"""The recorded corpora, vocabulary and cases of masked data; small corpora written on the spot."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_lightning.data import IndexedDataset, IndexedDatasetWriter
from megatron_lightning.data.masked import (
    BERTDataConfig,
    BERTDataset,
    BERTVocabulary,
    MaskingConfig,
    T5DataConfig,
    T5Dataset,
    T5Vocabulary,
)

FOLDER = Path(__file__).resolve().parents[2] / "data" / "masked"
CASES: dict[str, Any] = json.loads((FOLDER / "cases.json").read_text())
FIM: dict[str, Any] = json.loads((FOLDER / "fim.json").read_text())
TOKENS: dict[str, int] = json.loads((FOLDER / "vocabulary.json").read_text())["vocabulary"]
CLS, SEP, MASK, EOS = (TOKENS[name] for name in ("[CLS]", "[SEP]", "[MASK]", "[EOS]"))
FIRST_WORD = 37


def expected(file: str = "expected") -> dict[str, NDArray]:
    """Recorded arrays by name, as int64."""
    with np.load(FOLDER / f"{file}.npz") as arrays:
        return {name: arrays[name].astype(np.int64) for name in arrays.files}


def masking(case: dict[str, Any]) -> MaskingConfig:
    """The options of a recorded case."""
    return MaskingConfig(
        probability=case["p"],
        max_ngram=case["ngram"],
        whole_words=case["word"],
        longer_ngrams=case.get("longer", False),
        geometric=case.get("geo", False),
        permute=case.get("perm", False),
    )


def bert(
    config: BERTDataConfig | None = None,
    indexed: IndexedDataset | None = None,
    *,
    samples: int | None = None,
    seq_length: int = 64,
    seed: int = 1234,
    **options: Any,
) -> BERTDataset:
    """A data set over all documents of the recorded (or another) corpus."""
    indexed = IndexedDataset(FOLDER / "sentences") if indexed is None else indexed
    config = config or BERTDataConfig()
    documents = range(len(indexed.document_indices) - 1)
    vocabulary = BERTVocabulary.from_tokens(TOKENS, config)
    place = (indexed, documents, samples, seq_length, seed)
    return BERTDataset(*place, vocabulary, config, **options)


def t5(
    config: T5DataConfig | None = None,
    indexed: IndexedDataset | None = None,
    *,
    samples: int | None = None,
    seq_length: int = 64,
    seed: int = 1234,
    tokens: dict[str, int] = TOKENS,
    **options: Any,
) -> T5Dataset:
    """The same for spans."""
    indexed = IndexedDataset(FOLDER / "sentences") if indexed is None else indexed
    config = config or T5DataConfig(decoder_seq_length=seq_length)
    documents = range(len(indexed.document_indices) - 1)
    vocabulary = T5Vocabulary.from_tokens(tokens, config)
    return T5Dataset(indexed, documents, samples, seq_length, seed, vocabulary, config, **options)


def write(folder: Path, documents: Sequence[Sequence[Sequence[int]]]) -> IndexedDataset:
    """Writes documents of sentences of tokens as a pair."""
    with IndexedDatasetWriter(folder / "written", "uint16") as writer:
        for sentences in documents:
            tokens = [token for sentence in sentences for token in sentence]
            writer.add_document(tokens, [len(sentence) for sentence in sentences])
    return IndexedDataset(folder / "written")
