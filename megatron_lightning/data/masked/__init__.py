"""Samples for masked language models (BERT), span corruption (T5) and fill-in-the-middle."""

from megatron_lightning.data.masked.bert import BERTDataset
from megatron_lightning.data.masked.build import (
    DatasetKind,
    MaskedConfig,
    build_masked,
    masked_config,
    masked_errors,
    split_elements,
    task_vocabulary,
)
from megatron_lightning.data.masked.fim import FillInMiddle, FIMDataset
from megatron_lightning.data.masked.options import (
    BERTDataConfig,
    FIMConfig,
    MaskingConfig,
    T5DataConfig,
)
from megatron_lightning.data.masked.sentence_index import (
    DocumentCounts,
    SentenceIndex,
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
    "DatasetKind",
    "DocumentCounts",
    "FIMConfig",
    "FIMDataset",
    "FIMTokens",
    "FillInMiddle",
    "MaskedConfig",
    "MaskedVocabulary",
    "MaskingConfig",
    "SentenceIndex",
    "T5DataConfig",
    "T5Dataset",
    "T5Vocabulary",
    "build_masked",
    "build_sentence_index",
    "masked_config",
    "masked_errors",
    "split_elements",
    "task_vocabulary",
    "usable_documents",
]
