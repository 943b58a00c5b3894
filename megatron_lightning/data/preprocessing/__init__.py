"""From raw text to an indexed corpus with a data card."""

from megatron_lightning.data.preprocessing.dataset_sources import DatasetName, open_dataset
from megatron_lightning.data.preprocessing.options import PreprocessOptions
from megatron_lightning.data.preprocessing.run import preprocess, preprocess_jsonl
from megatron_lightning.data.preprocessing.sentences import split_sentences
from megatron_lightning.data.preprocessing.sources import open_files

__all__ = [
    "DatasetName",
    "PreprocessOptions",
    "open_dataset",
    "open_files",
    "preprocess",
    "preprocess_jsonl",
    "split_sentences",
]
