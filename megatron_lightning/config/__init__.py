"""Frozen configs: what a model is, how it is laid out, and the checks between them."""

from megatron_lightning.config.checkpoint import CheckpointConfig
from megatron_lightning.config.context import ContextConfig, ContextForm
from megatron_lightning.config.expert import DispatcherName, ExpertConfig
from megatron_lightning.config.latent_attention import LatentAttentionConfig
from megatron_lightning.config.local_checkpoint import LocalCheckpointConfig
from megatron_lightning.config.lora import LoraConfig
from megatron_lightning.config.loss_scale import LossScaleConfig
from megatron_lightning.config.model import GPTConfig
from megatron_lightning.config.moe import MoEConfig
from megatron_lightning.config.multi_token_prediction import MultiTokenPredictionConfig
from megatron_lightning.config.parallel import (
    DataParallelConfig,
    ParallelConfig,
    PipelineConfig,
    RuntimeConfig,
)
from megatron_lightning.config.plan import (
    Gradient,
    ParallelPlan,
    ParameterInfo,
    Role,
    Split,
    column,
    experts,
    follows,
    replicated,
    row,
    vocabulary,
)
from megatron_lightning.config.quantization import QuantizationConfig
from megatron_lightning.config.recompute import RecomputeConfig
from megatron_lightning.config.rotary import RotaryConfig
from megatron_lightning.config.variants import AttentionConfig, ClampConfig, StreamConfig

__all__ = [
    "AttentionConfig",
    "CheckpointConfig",
    "ClampConfig",
    "ContextConfig",
    "ContextForm",
    "DataParallelConfig",
    "DispatcherName",
    "ExpertConfig",
    "GPTConfig",
    "Gradient",
    "LatentAttentionConfig",
    "LocalCheckpointConfig",
    "LoraConfig",
    "LossScaleConfig",
    "MoEConfig",
    "MultiTokenPredictionConfig",
    "ParallelConfig",
    "ParallelPlan",
    "ParameterInfo",
    "PipelineConfig",
    "QuantizationConfig",
    "RecomputeConfig",
    "Role",
    "RotaryConfig",
    "RuntimeConfig",
    "Split",
    "StreamConfig",
    "column",
    "experts",
    "follows",
    "replicated",
    "row",
    "vocabulary",
]
