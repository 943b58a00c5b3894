"""Checkpoints of other kinds, and other forms of ours: read and written without ranks or GPUs."""

from megatron_lightning.checkpoint.convert.content import Content
from megatron_lightning.checkpoint.convert.convert import Conversion, Kind, convert
from megatron_lightning.checkpoint.convert.lazy import LazyTensor
from megatron_lightning.checkpoint.convert.rules import (
    Renamed,
    Rows,
    Rule,
    Same,
    Stacked,
    Unflatten,
    Values,
    to_ours,
    to_theirs,
)

__all__ = [
    "Content",
    "Conversion",
    "Kind",
    "LazyTensor",
    "Renamed",
    "Rows",
    "Rule",
    "Same",
    "Stacked",
    "Unflatten",
    "Values",
    "convert",
    "to_ours",
    "to_theirs",
]
