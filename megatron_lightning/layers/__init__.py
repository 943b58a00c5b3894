"""Layers written as for one device, and the back ends that make them."""

from megatron_lightning.layers.attention import (
    FusedAttention,
    ReferenceAttention,
    SelfAttention,
    causal_mask,
)
from megatron_lightning.layers.backend import LayerBackend, check_supported
from megatron_lightning.layers.block import TransformerLayer
from megatron_lightning.layers.dropout import Dropout, apply_random
from megatron_lightning.layers.embedding import (
    PositionEmbedding,
    VocabularyEmbedding,
    VocabularyHead,
)
from megatron_lightning.layers.linear import Linear
from megatron_lightning.layers.loss import CrossEntropy, masked_mean
from megatron_lightning.layers.mlp import MLP
from megatron_lightning.layers.norm import LayerNorm, RMSNorm
from megatron_lightning.layers.rotary import RotaryEmbedding, RotaryTables, inverse_frequencies
from megatron_lightning.layers.sequence import PackedSequences, SequenceInfo
from megatron_lightning.layers.staged import StagedNetwork
from megatron_lightning.layers.torch_backend import TorchBackend

__all__ = [
    "MLP",
    "CrossEntropy",
    "Dropout",
    "FusedAttention",
    "LayerBackend",
    "LayerNorm",
    "Linear",
    "PackedSequences",
    "PositionEmbedding",
    "RMSNorm",
    "ReferenceAttention",
    "RotaryEmbedding",
    "RotaryTables",
    "SelfAttention",
    "SequenceInfo",
    "StagedNetwork",
    "TorchBackend",
    "TransformerLayer",
    "VocabularyEmbedding",
    "VocabularyHead",
    "apply_random",
    "causal_mask",
    "check_supported",
    "inverse_frequencies",
    "masked_mean",
]
