"""Samples for masked language models (BERT), span corruption (T5) and fill-in-the-middle."""

from megatron_lightning.data.masked.bert import BERTDataset
from megatron_lightning.data.masked.fim import FillInMiddle, FIMDataset
from megatron_lightning.data.masked.options import (
    BERTDataConfig,
    FIMConfig,
    MaskingConfig,
    T5DataConfig,
)
from megatron_lightning.data.masked.sentence_index import (
    DocumentCounts,
    build_sentence_index,
    usable_documents,
)
from megatron_lightning.data.masked.t5 import T5Dataset
from megatron_lightning.data.masked.vocabulary import (
    BERTVocabulary,
    FIMTokens,
    MaskedVocabulary,
    T5Vocabulary,
)

__all__ = [
    "BERTDataConfig",
    "BERTDataset",
    "BERTVocabulary",
    "DocumentCounts",
    "FIMConfig",
    "FIMDataset",
    "FIMTokens",
    "FillInMiddle",
    "MaskedVocabulary",
    "MaskingConfig",
    "T5DataConfig",
    "T5Dataset",
    "T5Vocabulary",
    "build_sentence_index",
    "usable_documents",
]
