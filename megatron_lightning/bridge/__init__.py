"""Models of other programs in and out: Hugging Face architectures by tables that read both ways."""

from megatron_lightning.bridge.adapters import load_adapters, save_adapters
from megatron_lightning.bridge.export import ExportOptions, to_hf
from megatron_lightning.bridge.hf import FAMILIES
from megatron_lightning.bridge.load import from_hf
from megatron_lightning.bridge.mapping import (
    Form,
    Fused,
    PackedQKV,
    Piece,
    Rearranged,
    Rule,
    Same,
    Stacked,
    TensorMap,
    Transposed,
    apply_rules,
)
from megatron_lightning.bridge.native import export_checkpoint, import_checkpoint
from megatron_lightning.bridge.pretrained import pretrained

__all__ = [
    "FAMILIES",
    "ExportOptions",
    "Form",
    "Fused",
    "PackedQKV",
    "Piece",
    "Rearranged",
    "Rule",
    "Same",
    "Stacked",
    "TensorMap",
    "Transposed",
    "apply_rules",
    "export_checkpoint",
    "from_hf",
    "import_checkpoint",
    "load_adapters",
    "pretrained",
    "save_adapters",
    "to_hf",
]
