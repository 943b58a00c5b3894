"""Data sets of the `datasets` library as samples of tokens."""

from megatron_lightning.data.huggingface.samples import DocumentDataset
from megatron_lightning.data.huggingface.sources import DatasetTokens, RowTokens, open_dataset
from megatron_lightning.data.huggingface.stream import SampleStream, StreamedSet
from megatron_lightning.data.huggingface.stream_loader import StreamLoader

__all__ = [
    "DatasetTokens",
    "DocumentDataset",
    "RowTokens",
    "SampleStream",
    "StreamLoader",
    "StreamedSet",
    "open_dataset",
]
