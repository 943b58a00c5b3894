"""Models by preset, for config files: `class_path: megatron_lightning.cli.presets.gpt_preset`."""

from typing import Literal

from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.models import GPTModel, preset_config


def gpt_preset(
    preset: str,
    optimizer: OptimizerConfig | None = None,
    scheduler: SchedulerConfig | None = None,
    loss_normalization: Literal["token", "micro_batch"] = "token",
) -> GPTModel:
    """Make a published architecture by name, with new weights.

    Args:
        preset: name of the architecture, such as llama3-8b.
        optimizer: optimizer and its numbers.
        scheduler: learning rate and weight decay over the run.
        loss_normalization: see `GPTModel`.

    Raises:
        ValueError: the preset is unknown; the message lists those that there are.

    """
    return GPTModel(preset_config(preset), optimizer, scheduler, loss_normalization)
