"""Corpora in the `.bin/.idx` format: reading, writing, merging, cutting and describing them."""

from megatron_lightning.data.indexed.edit import merge, split_documents
from megatron_lightning.data.indexed.format import best_dtype, bin_path, idx_path
from megatron_lightning.data.indexed.info import CorpusInfo, check_digests, corpus_info
from megatron_lightning.data.indexed.reader import IndexedDataset, missing_files
from megatron_lightning.data.indexed.remote import BlockCache
from megatron_lightning.data.indexed.storage import Access
from megatron_lightning.data.indexed.writer import IndexedDatasetWriter

__all__ = [
    "Access",
    "BlockCache",
    "CorpusInfo",
    "IndexedDataset",
    "IndexedDatasetWriter",
    "best_dtype",
    "bin_path",
    "check_digests",
    "corpus_info",
    "idx_path",
    "merge",
    "missing_files",
    "split_documents",
]
