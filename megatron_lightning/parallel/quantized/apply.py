"""Give linear layers of a cut network their low precision, by `QuantizationConfig`.

Linear layers within the plan's layers are meant, but those of the first and last layers and what is
excluded by name. Nothing changes in names, shapes or values of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lightning.config.lora import is_adapter
from megatron_lightning.config.plan import ParallelPlan, ParameterInfo, Role, Split
from megatron_lightning.config.quantization import QuantizationConfig
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.philox import make_key, philox
from megatron_lightning.parallel.plain_layers import adopt
from megatron_lightning.parallel.quantized.borders import one_operation
from megatron_lightning.parallel.quantized.experts import RowScaledExperts
from megatron_lightning.parallel.quantized.noise import RoundingNoise
from megatron_lightning.parallel.quantized.products import (
    QuantizedExperts,
    QuantizedProducts,
    TensorSplit,
    WeightClock,
    largest_over,
)
from megatron_lightning.parallel.quantized.region import announce
from megatron_lightning.parallel.streams import Streams
from megatron_lightning.precision.delayed import DelayedScaling
from megatron_lightning.precision.fp8 import (
    FP8BlockRecipe,
    FP8RowRecipe,
    FP8TensorRecipe,
    device_problem,
)
from megatron_lightning.precision.grouped import ExpertRecipe, rounds_weight_gradient
from megatron_lightning.precision.operands import (
    BlockRecipe,
    MXFP8Recipe,
    NVFP4Recipe,
    Recipe,
    RowRecipe,
    TensorRecipe,
)
from megatron_lightning.precision.te_recipes import (
    TEBlockRecipe,
    TETensorRecipe,
    recipe_problem,
)
from megatron_lightning.precision.weight_casts import WeightCasts, fit

_REAL_MULTIPLE = 16
_SPLITS: dict[Role, TensorSplit] = {Role.COLUMN: "columns", Role.ROW: "rows"}


class Quantization:
    """What the runtime does for the low-precision layers of one rank's model."""

    def __init__(
        self, mesh: ParallelMesh, delayed: DelayedScaling | None, *, whole: bool = False
    ) -> None:
        """`whole`: when a batch begins every weight is there, and none is still being gathered."""
        self._whole = whole
        self._casts: WeightCasts | None = None
        self.clock = WeightClock()
        self.delayed = delayed
        self._over_ranks = partial(largest_over, axes=[mesh.dp_cp, mesh.tp])
        self._window_is_new = True
        self.gathered: frozenset[str] = frozenset()
        """Weights that the sharded optimizer gathers in eight bits."""
        self._in_regions: list[tuple[QuantizedProducts, nn.Module]] = []
        self._by_weight: dict[int, list[QuantizedProducts]] = {}

    def add(self, products: QuantizedProducts, module: nn.Module) -> None:
        """A layer whose products may be operations of a compiled region. Those that share a weight
        stay outside of it: by the weight's address one would find what another holds.
        """
        if not products.in_regions:
            return
        weight = module.weight
        sharing = self._by_weight.setdefault(id(weight), [])
        sharing.append(products)
        if len(sharing) == 1:
            self._in_regions.append((products, module))
            return
        for one in sharing:
            one.in_regions = False
        self._in_regions = [each for each in self._in_regions if each[1].weight is not weight]

    def begin_run(self, *, training: bool) -> None:
        """Before the passes of a batch: weights are rounded anew where they may have changed.

        Between evaluations that may be by a checkpoint read straight into their memory, or by
        `.data` (weight averaging), of which neither version nor address tells.
        """
        old = self._window_is_new or not training
        if old:
            self.clock.tick()
        self._window_is_new = not training
        for products, module in self._in_regions:
            assert isinstance(module.weight, Tensor)
            announce(products, module.weight)
        if old and self._whole:
            self._round_together()
        if self.delayed is not None:
            self.delayed.recording = training

    def _round_together(self) -> None:
        """Round all weights that have scales of their own at once, where kernels can."""
        members = [
            (products, module.weight.detach().flatten(0, -2))
            for products, module in self._in_regions
            if products.rounds_apart and isinstance(module.weight, Tensor)
        ]
        weights = [weight for _, weight in members]
        if not fit(weights):
            self._casts = None
            return
        if self._casts is None or not self._casts.fits(weights):
            self._casts = WeightCasts(weights)
        for (products, weight), pair in zip(members, self._casts.cast(), strict=True):
            products.hold(weight, pair)

    def finish_window(self) -> None:
        """After a window's last backward pass. All ranks of the mesh must call it."""
        self._window_is_new = True
        if self.delayed is not None:
            self.delayed.finish_window(self._over_ranks)


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
    split = _kind(plan.split_of(f"{path}.weight"), weight.dim())
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
    _check_device(config, mesh.device)
    modules: dict[str, Any] = {
        name: module for chunk in chunks for name, module in chunk.named_modules() if name in names
    }
    delayed = None
    if config.recipe == "fp8_delayed":
        delayed = DelayedScaling(
            [name for name, module in modules.items() if hasattr(module, "quantized")],
            gradient=config.gradient,
            length=config.amax_history_length,
            margin=config.margin,
            device=mesh.device,
        )
    quantization = Quantization(mesh, delayed, whole=whole)
    whole_layers = one_operation(
        mesh.tp, sequence_parallel=sequence_parallel, sequence_dim=plan.sequence_dim
    )
    for name, module in modules.items():
        if hasattr(module, "quantized_experts"):
            row = table[f"{prefix}{name}.weight"]
            split = plan.split_of(f"{name}.weight")
            module.quantized_experts = _experts(
                config, prefix + name, row, split, mesh, quantization.clock, seed, keeps_weights
            )
            continue
        adopt(module)
        split = plan.split_of(f"{name}.weight")
        row = table[f"{prefix}{name}.weight"]
        kind = _kind(split, len(row.global_shape)) if mesh.tp.size > 1 else "none"
        recipe = _recipe(config, name, delayed, seed)
        module.quantized = QuantizedProducts(
            recipe=recipe,
            split=kind,
            tensor_axis=mesh.tp,
            context_axis=mesh.cp,
            splits_sequence=sequence_parallel and kind == "none" and mesh.tp.size > 1,
            clock=quantization.clock,
            keeps_weights=keeps_weights,
            noise=_noise(config, prefix + name, row, plan.sequence_dim, streams, seed),
            in_regions=bool(recipe.layout) and keeps_weights and whole_layers,
        )
        quantization.add(module.quantized, module)
    if config.fp8_gather:
        quantization.gathered = frozenset(f"{prefix}{name}.weight" for name in modules)
    return quantization


def _check_device(config: QuantizationConfig, device: torch.device) -> None:
    problem = None
    if config.kernels == "transformer_engine":
        problem = recipe_problem(config.recipe, device)
    elif not config.simulate:
        problem = device_problem(device, blocks=config.recipe == "fp8_blockwise")
    if problem is not None:
        raise ValueError(f"quantization.recipe={config.recipe!r}: {problem}")


def _kind(split: Split, dims: int) -> TensorSplit:
    """What of a layer a tensor axis splits."""
    if split.role is Role.EXPERT and split.dim is not None:
        return "rows" if split.dim % dims == dims - 1 else "columns"
    return _SPLITS.get(split.role, "none")


def _experts(
    config: QuantizationConfig,
    name: str,
    row: ParameterInfo,
    split: Split,
    mesh: ParallelMesh,
    clock: WeightClock,
    seed: int,
    keeps_weights: bool,
) -> QuantizedExperts | RowScaledExperts:
    """Products of all experts held; or one set for each of them, by its number in the whole
    layer.
    """
    axis = mesh.axis("etp")
    kind = _kind(split, len(row.global_shape)) if axis.size > 1 else "none"
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
                recipe=_recipe(config, name, None, seed),
                split=kind,
                tensor_axis=axis,
                context_axis=MeshAxis(name="context"),  # rows come from everywhere
                splits_sequence=False,
                clock=clock,
                keeps_weights=keeps_weights,
                noise=_noise(config, f"{name}.{expert}", one, 0, None, seed),
            )
        )
    return QuantizedExperts(tuple(products))


def _recipe(
    config: QuantizationConfig, name: str, delayed: DelayedScaling | None, seed: int
) -> Recipe:
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
