"""Lightning data modules."""

from megatron_lightning.data.modules.base import TokenDataModule
from megatron_lightning.data.modules.huggingface import HFDataModule
from megatron_lightning.data.modules.pretraining import PretrainingDataModule

__all__ = ["HFDataModule", "PretrainingDataModule", "TokenDataModule"]
