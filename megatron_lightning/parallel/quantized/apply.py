"""Give linear layers of a cut network their low precision, by `QuantizationConfig`.

Linear layers within the plan's layers are meant, but those of the first and last layers and what is
excluded by name (`chosen_layers`). Nothing changes in names, shapes or values of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megatron_lightning.config.plan import ParallelPlan, ParameterInfo, Split
from megatron_lightning.config.quantization import QuantizationConfig
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.column import ColumnInput
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.overlap.layers import Overlap
from megatron_lightning.parallel.philox import make_key
from megatron_lightning.parallel.plain_layers import adopt
from megatron_lightning.parallel.quantized.borders import one_operation
from megatron_lightning.parallel.quantized.experts import RowScaledExperts
from megatron_lightning.parallel.quantized.experts_in_turn import QuantizedExperts
from megatron_lightning.parallel.quantized.noise import RoundingNoise
from megatron_lightning.parallel.quantized.products import QuantizedProducts, WeightClock
from megatron_lightning.parallel.quantized.quantization import Quantization
from megatron_lightning.parallel.quantized.recipes import build_recipe, check_device
from megatron_lightning.parallel.quantized.tensor_split import tensor_split_of
from megatron_lightning.parallel.row import RowOutput
from megatron_lightning.parallel.streams import Streams
from megatron_lightning.precision.delayed import DelayedScaling
from megatron_lightning.precision.grouped import ExpertRecipe, rounds_weight_gradient


def apply_quantization(
    chunks: Sequence[nn.Module],
    names: Collection[str],
    plan: ParallelPlan,
    config: QuantizationConfig,
    mesh: ParallelMesh,
    *,
    table: Mapping[str, ParameterInfo],
    streams: Streams | None,
    sequence_parallel: bool,
    keeps_weights: bool,
    seed: int,
    prefix: str,
    whole: bool = False,
) -> Quantization:
    """Set the products of the linear layers `names` (paths in the whole network) that the chunks
    of this rank hold; `whole`: see `Quantization`. ValueError where the device can't run the
    recipe.
    """
    check_device(config, mesh.device)
    modules: dict[str, Any] = {
        name: module for chunk in chunks for name, module in chunk.named_modules() if name in names
    }
    delayed = _delayed_scaling(config, modules, mesh.device)
    quantization = Quantization(mesh, delayed, whole=whole)
    whole_layers = one_operation(
        mesh.tp, sequence_parallel=sequence_parallel, sequence_dim=plan.sequence_dim
    )
    for name, module in modules.items():
        row, split = table[f"{prefix}{name}.weight"], plan.split_of(f"{name}.weight")
        if hasattr(module, "quantized_experts"):
            module.quantized_experts = _experts(
                config,
                prefix + name,
                row,
                split,
                mesh,
                clock=quantization.clock,
                streams=streams,
                seed=seed,
                keeps_weights=keeps_weights,
            )
            continue
        adopt(module)
        kind = tensor_split_of(split, len(row.global_shape)) if mesh.tp.size > 1 else "none"
        recipe = build_recipe(config, name, delayed, seed)
        module.quantized = QuantizedProducts(
            recipe=recipe,
            split=kind,
            tensor_axis=mesh.tp,
            context_axis=mesh.cp,
            splits_sequence=sequence_parallel and kind == "none" and mesh.tp.size > 1,
            clock=quantization.clock,
            keeps_weights=keeps_weights,
            noise=_noise(config, prefix + name, row, plan.sequence_dim, streams, seed),
            overlap=overlap_of(module) if recipe.joins_parts and recipe.layout else None,
            in_regions=bool(recipe.layout) and keeps_weights and whole_layers,
        )
        quantization.add(module.quantized, module)
    if config.fp8_gather:
        quantization.gathered = frozenset(f"{prefix}{name}.weight" for name in modules)
    return quantization


def overlap_of(layer: Any) -> Overlap | None:
    """How a layer's parts of a sequence are moved under products, by what stands at its borders."""
    if isinstance(layer.before, ColumnInput):
        return layer.before.overlap
    return layer.after.overlap if isinstance(layer.after, RowOutput) else None


def _delayed_scaling(
    config: QuantizationConfig, modules: Mapping[str, Any], device: torch.device
) -> DelayedScaling | None:
    if config.recipe != "fp8_delayed":
        return None
    return DelayedScaling(
        [name for name, module in modules.items() if not hasattr(module, "quantized_experts")],
        gradient=config.gradient,
        length=config.amax_history_length,
        margin=config.margin,
        device=device,
    )


def _experts(
    config: QuantizationConfig,
    name: str,
    row: ParameterInfo,
    split: Split,
    mesh: ParallelMesh,
    *,
    clock: WeightClock,
    streams: Streams | None,
    seed: int,
    keeps_weights: bool,
) -> QuantizedExperts | RowScaledExperts:
    """Products of all experts held; or one set for each of them, by its number in the whole
    layer.
    """
    axis = mesh.axis("etp")
    kind = tensor_split_of(split, len(row.global_shape)) if axis.size > 1 else "none"
    if config.scales_rows_of_experts:
        _, *outputs, inputs = row.global_shape  # the same in every layout
        recipe = ExpertRecipe(
            simulate=config.simulate,
            rounds_weight_gradient=rounds_weight_gradient(math.prod(outputs), inputs),
        )
        return RowScaledExperts(
            recipe=recipe,
            split=kind,
            axis=axis,
            clock=clock,
            keeps_weights=keeps_weights,
        )
    products = []
    for expert in range(row.offsets[0], row.offsets[0] + row.sizes[0]):
        one = replace(
            row,
            global_shape=row.global_shape[1:],
            offsets=row.offsets[1:],
            sizes=row.sizes[1:],
        )
        products.append(
            QuantizedProducts(
                recipe=build_recipe(config, name, None, seed),
                split=kind,
                tensor_axis=axis,
                context_axis=MeshAxis(name="context"),  # rows come from everywhere
                splits_sequence=False,
                clock=clock,
                keeps_weights=keeps_weights,
                noise=_noise(config, f"{name}.{expert}", one, 0, streams, seed),
            )
        )
    return QuantizedExperts(tuple(products))


def _noise(
    config: QuantizationConfig,
    name: str,
    row: ParameterInfo,
    sequence_dim: int,
    streams: Streams | None,
    seed: int,
) -> RoundingNoise | None:
    if config.recipe != "nvfp4" or not config.stochastic_rounding:
        return None
    *shape, _ = row.global_shape
    whole = torch.arange(math.prod(shape)).view(shape)
    for dim, (offset, size) in enumerate(zip(row.offsets[:-1], row.sizes[:-1], strict=True)):
        whole = whole.narrow(dim, offset, size)
    return RoundingNoise(
        key=make_key("rounding", seed, name),
        streams=streams,
        features=whole.flatten(),
        sequence_dim=sequence_dim,
    )
