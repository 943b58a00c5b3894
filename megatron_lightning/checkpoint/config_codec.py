"""The codec of this package's checkpoints: our frozen configs may occur among hyper-parameters."""

from megatron_lightning.checkpoint.codec import Codec
from megatron_lightning.config.checkpoint import CheckpointConfig
from megatron_lightning.config.expert import ExpertConfig
from megatron_lightning.config.latent_attention import LatentAttentionConfig
from megatron_lightning.config.lora import LoraConfig
from megatron_lightning.config.model import GPTConfig
from megatron_lightning.config.moe import MoEConfig
from megatron_lightning.config.multi_token_prediction import MultiTokenPredictionConfig
from megatron_lightning.config.parallel import (
    DataParallelConfig,
    ParallelConfig,
    PipelineConfig,
    RuntimeConfig,
)
from megatron_lightning.config.rotary import RotaryConfig
from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.config.variants import AttentionConfig, ClampConfig, StreamConfig

CODEC = Codec(
    classes=(
        AttentionConfig,
        CheckpointConfig,
        ClampConfig,
        DataParallelConfig,
        ExpertConfig,
        GPTConfig,
        LoraConfig,
        LatentAttentionConfig,
        MoEConfig,
        MultiTokenPredictionConfig,
        OptimizerConfig,
        ParallelConfig,
        PipelineConfig,
        RotaryConfig,
        RuntimeConfig,
        SchedulerConfig,
        StreamConfig,
    )
)
