"""Models of other programs in and out: Hugging Face architectures by tables that read both ways."""

from megatron_lightning.bridge.export import to_hf
from megatron_lightning.bridge.hf import FAMILIES
from megatron_lightning.bridge.load import from_hf
from megatron_lightning.bridge.mapping import (
    Form,
    Fused,
    PackedQKV,
    Piece,
    Rule,
    Same,
    Stacked,
    TensorMap,
    Transposed,
    apply_rules,
)

__all__ = [
    "FAMILIES",
    "Form",
    "Fused",
    "PackedQKV",
    "Piece",
    "Rule",
    "Same",
    "Stacked",
    "TensorMap",
    "Transposed",
    "apply_rules",
    "from_hf",
    "to_hf",
]
