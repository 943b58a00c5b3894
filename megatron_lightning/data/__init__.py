"""Corpora, samples, their order, and the loaders of a Trainer."""

from megatron_lightning.data.blend import (
    BlendedDataset,
    BlendIndex,
    build_blend,
    build_blend_index,
    build_exhaustive_index,
    parse_blend,
)
from megatron_lightning.data.card import DataCard, card_path, read_card, write_card
from megatron_lightning.data.gpt import GPTDataset
from megatron_lightning.data.gpt_index import (
    EpochPlan,
    build_document_index,
    build_sample_index,
    build_shuffle_index,
    plan_epochs,
)
from megatron_lightning.data.indexed import (
    BlockCache,
    CorpusInfo,
    IndexedDataset,
    IndexedDatasetWriter,
    best_dtype,
    corpus_info,
    merge,
    split_documents,
)
from megatron_lightning.data.loader import StatefulLoader
from megatron_lightning.data.modules import PretrainingDataModule, TokenDataModule
from megatron_lightning.data.preprocess import preprocess_jsonl
from megatron_lightning.data.sample_text import python_help_texts, write_python_help
from megatron_lightning.data.samplers import PADDING, GlobalBatchSampler, epoch_order
from megatron_lightning.data.sft import (
    ChatTemplate,
    PackedDataset,
    PackingStatistics,
    SFTDataModule,
    load_chat_template,
)
from megatron_lightning.data.splits import Splits, parse_split, split_ranges
from megatron_lightning.data.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
    load_tokenizer,
    train_byte_bpe,
)

__all__ = [
    "PADDING",
    "BlendIndex",
    "BlendedDataset",
    "BlockCache",
    "ByteTokenizer",
    "ChatTemplate",
    "CorpusInfo",
    "DataCard",
    "EpochPlan",
    "FileTokenizer",
    "GPTDataset",
    "GlobalBatchSampler",
    "IndexedDataset",
    "IndexedDatasetWriter",
    "PackedDataset",
    "PackingStatistics",
    "PretrainingDataModule",
    "SFTDataModule",
    "Splits",
    "StatefulLoader",
    "TokenDataModule",
    "Tokenizer",
    "best_dtype",
    "build_blend",
    "build_blend_index",
    "build_document_index",
    "build_exhaustive_index",
    "build_sample_index",
    "build_shuffle_index",
    "card_path",
    "corpus_info",
    "epoch_order",
    "load_chat_template",
    "load_tokenizer",
    "merge",
    "parse_blend",
    "parse_split",
    "plan_epochs",
    "preprocess_jsonl",
    "python_help_texts",
    "read_card",
    "split_documents",
    "split_ranges",
    "train_byte_bpe",
    "write_card",
    "write_python_help",
]
