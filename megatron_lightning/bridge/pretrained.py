"""The model of a config file that begins from pretrained weights."""

from __future__ import annotations

from typing import Any

from megatron_lightning.bridge.load import from_hf
from megatron_lightning.config.lora import LoraConfig
from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.layers.torch_backend import AttentionKernel
from megatron_lightning.models import GPTModel
from megatron_lightning.models.gpt import LossNormalization


def pretrained(
    path: str,
    optimizer: OptimizerConfig | None = None,
    scheduler: SchedulerConfig | None = None,
    loss_normalization: LossNormalization = "token",
    attention: AttentionKernel = "fused",
    lora: LoraConfig | None = None,
    adapters: str | None = None,
    overrides: dict[str, Any] | None = None,
    revision: str | None = None,
) -> GPTModel:
    """`GPTModel.from_hf` for config files: `class_path: megatron_lightning.pretrained`.

    Args:
        path: Folder of a Hugging Face model, or id of the hub.
        optimizer: See `OptimizerConfig`.
        scheduler: See `SchedulerConfig`.
        loss_normalization: As for `GPTModel`.
        attention: As for `GPTModel`.
        lora: Adapters, which alone are trained; None: all weights are.
        adapters: Folder of `peft` with adapters to begin from; it says their rank and targets.
        overrides: Fields of config.json to replace.
        revision: Of a repository of the hub.

    """
    module = from_hf(
        path,
        overrides=overrides,
        revision=revision,
        optimizer=optimizer,
        scheduler=scheduler,
        loss_normalization=loss_normalization,
        attention=attention,
    )
    if lora is not None:
        module.add_lora(lora)
    return module if adapters is None else module.load_adapters(adapters)
