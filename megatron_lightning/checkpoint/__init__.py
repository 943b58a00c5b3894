"""One checkpoint that loads anywhere: global tensors in boxes, JSON for the rest, committed by a
rename.
"""

from megatron_lightning.checkpoint.boxed_tensor import BoxedTensor
from megatron_lightning.checkpoint.boxes import Box, FlatBox, split_flat_slice
from megatron_lightning.checkpoint.checks import is_checkpoint, verify
from megatron_lightning.checkpoint.codec import Codec
from megatron_lightning.checkpoint.commit import recover, remove
from megatron_lightning.checkpoint.errors import CheckpointError
from megatron_lightning.checkpoint.manifest import Manifest, read_manifest
from megatron_lightning.checkpoint.report import LoadReport, Strictness, TensorInfo
from megatron_lightning.checkpoint.save_times import SaveTimes
from megatron_lightning.checkpoint.saver import Saver
from megatron_lightning.checkpoint.saving import save
from megatron_lightning.checkpoint.state import (
    list_tensors,
    load,
    load_metadata,
    load_objects,
)
from megatron_lightning.checkpoint.storage import BoxReader, BoxWriter

__all__ = [
    "Box",
    "BoxReader",
    "BoxWriter",
    "BoxedTensor",
    "CheckpointError",
    "Codec",
    "FlatBox",
    "LoadReport",
    "Manifest",
    "SaveTimes",
    "Saver",
    "Strictness",
    "TensorInfo",
    "is_checkpoint",
    "list_tensors",
    "load",
    "load_metadata",
    "load_objects",
    "read_manifest",
    "recover",
    "remove",
    "save",
    "split_flat_slice",
    "verify",
]
