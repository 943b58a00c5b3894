"""Which linear layers of a whole network get low precision, and what keeps them from it."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase

from torch import Tensor, nn

from megatron_lightning.config.lora import is_adapter
from megatron_lightning.config.plan import ParallelPlan
from megatron_lightning.config.quantization import QuantizationConfig
from megatron_lightning.parallel.quantized.tensor_split import tensor_split_of

_REAL_MULTIPLE = 16
"""Features that products on FP8 units take at once."""


def chosen_linears(
    network: nn.Module, plan: ParallelPlan, config: QuantizationConfig
) -> dict[str, nn.Module]:
    """Linear layers of a whole network that get low precision, by path. Low-rank adapters do not:
    they are small, and all that is trained.
    """
    if plan.layers is None:
        return {}
    layers = [name for name, _ in network.get_submodule(plan.layers).named_children()]
    kept = {*layers[: config.keep_first], *layers[max(0, len(layers) - config.keep_last) :]}
    found = {}
    for layer in (name for name in layers if name not in kept):
        path = f"{plan.layers}.{layer}"
        for name, module in network.get_submodule(path).named_modules(prefix=path):
            is_linear = type(module) is nn.Linear or hasattr(module, "quantized")
            is_linear |= config.experts and hasattr(module, "quantized_experts")
            if is_adapter(name):
                continue
            if is_linear and not any(fnmatchcase(name, glob) for glob in config.exclude):
                found[name] = module
    return found


def quantization_problems(
    network: nn.Module,
    plan: ParallelPlan,
    config: QuantizationConfig | None,
    tensor_size: int,
    expert_tensor_size: int = 1,
) -> list[str]:
    """What keeps the layers of a whole network from low precision, as explained sentences."""
    if config is None or config.check():
        return []
    chosen = chosen_linears(network, plan, config)
    if not chosen:
        return [
            f"quantization with keep_first={config.keep_first}, keep_last={config.keep_last},"
            f" exclude={list(config.exclude)}: no linear layer within plan.layers={plan.layers!r}"
            " is left for it; keep fewer layers, or leave quantization out"
        ]
    problems = []
    for path, module in chosen.items():
        is_expert = hasattr(module, "quantized_experts")
        size = expert_tensor_size if is_expert else tensor_size
        problems += _size_problems(path, module, plan, config, size)
    has_experts = any(hasattr(module, "quantized_experts") for module in network.modules())
    if config.experts and not has_experts:
        problems.append(
            f"quantization.experts=True: {type(network).__name__} has no layer of experts; set"
            " experts=False, or give the model some (config.moe)"
        )
    unused = [
        glob
        for glob in config.exclude
        if not any(fnmatchcase(name, glob) for name, _ in network.named_modules())
    ]
    if unused:
        problems.append(f"quantization.exclude: {unused} match no module")
    return problems[:5]


def _size_problems(
    path: str,
    module: nn.Module,
    plan: ParallelPlan,
    config: QuantizationConfig,
    tensor_size: int,
) -> list[str]:
    weight = module.weight
    assert isinstance(weight, Tensor)
    *outputs, inputs = weight.shape[1:] if hasattr(module, "quantized_experts") else weight.shape
    split = tensor_split_of(plan.split_of(f"{path}.weight"), weight.dim())
    if split == "rows":
        inputs //= tensor_size
    if split == "columns":
        outputs[-1] //= tensor_size
    label = f"quantization.recipe={config.recipe!r}: {path} has {{}} {{}} features on a rank"
    sizes = {"input": inputs, "output": math.prod(outputs)}
    if not config.simulate and any(size % _REAL_MULTIPLE for size in sizes.values()):
        return [
            label.format(size, side)
            + f", and products of FP8 take multiples of {_REAL_MULTIPLE}; exclude it by name"
            for side, size in sizes.items()
            if size % _REAL_MULTIPLE
        ]
    block = {"fp8_blockwise": 128, "mxfp8": 32, "nvfp4": 16}.get(config.recipe, 1)
    side, size = ("input", inputs) if split == "rows" else ("output", outputs[-1])
    if tensor_size > 1 and split != "none" and size % block:
        return [
            label.format(size, side)
            + f" (tensor_parallel_size={tensor_size}), which blocks of {block} values do not"
            " divide: blocks would reach over ranks; exclude it by name, or use a smaller"
            " tensor_parallel_size"
        ]
    return []
