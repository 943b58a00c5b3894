"""The recipe that a config asks for, for one layer, and whether a device can run it."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lightning.config.quantization import QuantizationConfig
from megatron_lightning.parallel.philox import make_key, philox
from megatron_lightning.precision.delayed import DelayedScaling
from megatron_lightning.precision.fp8 import (
    FP8BlockRecipe,
    FP8RowRecipe,
    FP8TensorRecipe,
    device_problem,
)
from megatron_lightning.precision.operands import Recipe
from megatron_lightning.precision.simulated import (
    BlockRecipe,
    MXFP8Recipe,
    NVFP4Recipe,
    RowRecipe,
    TensorRecipe,
)
from megatron_lightning.precision.te_recipes import TEBlockRecipe, TETensorRecipe, recipe_problem


def check_device(config: QuantizationConfig, device: torch.device) -> None:
    """Raise ValueError where the device can't run the recipe."""
    problem = None
    if config.kernels == "transformer_engine":
        problem = recipe_problem(config.recipe, device)
    elif not config.simulate:
        problem = device_problem(device, blocks=config.recipe == "fp8_blockwise")
    if problem is not None:
        raise ValueError(f"quantization.recipe={config.recipe!r}: {problem}")


def build_recipe(
    config: QuantizationConfig, name: str, delayed: DelayedScaling | None, seed: int
) -> Recipe:
    """For the layer `name`; `delayed` holds its history, if the recipe has any."""
    gradient = config.gradient
    if config.kernels == "transformer_engine":
        if config.recipe == "fp8_blockwise":
            return TEBlockRecipe(gradient)
        return TETensorRecipe(gradient, None if delayed is None else delayed.recipe(name))
    if not config.simulate:
        if config.recipe == "fp8_rowwise":
            return FP8RowRecipe(gradient)
        if config.recipe == "fp8_blockwise":
            return FP8BlockRecipe(gradient)
        return FP8TensorRecipe(gradient, None if delayed is None else delayed.recipe(name))
    if delayed is not None:
        return delayed.recipe(name)
    if config.recipe == "nvfp4":
        signs = _signs(seed) if config.hadamard else None
        return NVFP4Recipe(stochastic=config.stochastic_rounding, signs=signs)
    kinds = {
        "fp8_tensorwise": TensorRecipe,
        "fp8_delayed": TensorRecipe,  # without a history
        "fp8_rowwise": RowRecipe,
        "fp8_blockwise": BlockRecipe,
        "mxfp8": MXFP8Recipe,
    }
    return kinds[config.recipe](gradient)


def _signs(seed: int) -> Tensor:
    """16 random signs, the same for all layers and ranks of a run."""
    counter = [torch.tensor(word) for word in (0, 0, 0, 0)]
    word = int(philox(counter, make_key("hadamard", seed, ""))[0])
    return torch.tensor([1.0 if word >> i & 1 else -1.0 for i in range(16)])
