"""Passing name of `indexed.writer`."""

from megatron_lightning.data.indexed import IndexedDatasetWriter, merge

__all__ = ["IndexedDatasetWriter", "merge"]
