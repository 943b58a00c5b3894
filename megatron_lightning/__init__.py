"""Megatron-class training under PyTorch Lightning, on torch.distributed alone.

The public names are imported when they are first used, so that `import megatron_lightning` costs
nothing and tools can read the version without torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_lightning.bridge import pretrained
    from megatron_lightning.config import (
        CheckpointConfig,
        ContextConfig,
        DataParallelConfig,
        ExpertConfig,
        LocalCheckpointConfig,
        LoraConfig,
        LossScaleConfig,
        ParallelConfig,
        PipelineConfig,
        QuantizationConfig,
        RuntimeConfig,
    )
    from megatron_lightning.data import HFDataModule, PretrainingDataModule, SFTDataModule
    from megatron_lightning.models import GPTModel
    from megatron_lightning.strategies import MegatronStrategy

__version__ = "0.1.0.dev0"

__all__ = [
    "CheckpointConfig",
    "ContextConfig",
    "DataParallelConfig",
    "ExpertConfig",
    "GPTModel",
    "HFDataModule",
    "LocalCheckpointConfig",
    "LoraConfig",
    "LossScaleConfig",
    "MegatronStrategy",
    "ParallelConfig",
    "PipelineConfig",
    "PretrainingDataModule",
    "QuantizationConfig",
    "RuntimeConfig",
    "SFTDataModule",
    "__version__",
    "pretrained",
]

_PACKAGES = {
    "CheckpointConfig": "config",
    "ContextConfig": "config",
    "DataParallelConfig": "config",
    "ExpertConfig": "config",
    "GPTModel": "models",
    "HFDataModule": "data",
    "LocalCheckpointConfig": "config",
    "LoraConfig": "config",
    "LossScaleConfig": "config",
    "MegatronStrategy": "strategies",
    "ParallelConfig": "config",
    "PipelineConfig": "config",
    "PretrainingDataModule": "data",
    "QuantizationConfig": "config",
    "RuntimeConfig": "config",
    "SFTDataModule": "data",
    "pretrained": "bridge",
}


def __getattr__(name: str) -> object:
    if name not in _PACKAGES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PACKAGES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
