"""Networks and LightningModules of the zoo, their split tables, presets and generation."""

from megatron_lightning.models.generate import Sampling, generate
from megatron_lightning.models.gpt import GPTModel
from megatron_lightning.models.gpt_network import GPTNetwork
from megatron_lightning.models.module import MegatronModule
from megatron_lightning.models.plans import check_tensor_parallel, gpt_plan
from megatron_lightning.models.presets import PRESETS, preset_config
from megatron_lightning.models.upcycle import upcycle

__all__ = [
    "PRESETS",
    "GPTModel",
    "GPTNetwork",
    "MegatronModule",
    "Sampling",
    "check_tensor_parallel",
    "generate",
    "gpt_plan",
    "preset_config",
    "upcycle",
]
