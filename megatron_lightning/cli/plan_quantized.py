"""What products in eight or four bits hold on one rank: copies of weights, rounded inputs.

Which linear layers those are is asked of the network itself, built on the meta device and split by
its plan table.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_lightning.cli.plan_request import PlanRequest
from megatron_lightning.config.model import GPTConfig
from megatron_lightning.config.quantization import QuantizationConfig
from megatron_lightning.config.rounded_inputs import (
    SIMULATED_BYTES,
    RoundedInputs,
    input_bytes,
    value_bytes,
    weight_copies,
)
from megatron_lightning.models.gpt import GPTModel
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.column import ColumnInput
from megatron_lightning.parallel.quantized.chosen_layers import chosen_linears
from megatron_lightning.parallel.tensor import ExpertAxes, apply_tensor_parallel
from megatron_lightning.precision.delayed import ROLES
from megatron_lightning.precision.grouped import rounds_weight_gradient

_FLOAT = 4
_DELAYED_NUMBERS = 6
"""Of a role of a layer beside its history: largest value, scale, and its inverse in four places."""
_ALIGNMENT = 16
"""Rows of a part of the sequence that is rounded before it is gathered."""


@dataclass(frozen=True, kw_only=True)
class QuantizedLayer:
    """The linear layers in low precision of one layer, on one rank."""

    inputs: RoundedInputs = ()
    bytes_held: float = 0.0
    """Both operands of all weights with their scales, and histories."""
    bytes_at_once: float = 0.0
    """One operand of the largest weight: where weights are rounded at each use."""
    share_at_once: float = 0.0
    """Share of the layer's weights whose gradients a split backward doesn't put off."""


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """What decides which linear layers they are, and their shapes, besides the model."""

    quantization: QuantizationConfig
    tensor: int = 1
    sequence_parallel: bool = False
    expert: int = 1
    expert_tensor: int = 1


@dataclass(frozen=True, kw_only=True)
class _Linear:
    path: str
    """Within its layer."""
    shape: tuple[int, ...]
    """Of the weight held."""
    whole: tuple[int, ...]
    """Of the whole weight."""
    experts: bool
    gathers: bool
    """Its input is gathered along the sequence."""


def quantized_layers(request: PlanRequest) -> Sequence[QuantizedLayer]:
    """Of every layer of the model; nothing of those that stay in the run's precision."""
    config = request.parallel
    if config.quantization is None:
        return (QuantizedLayer(),) * request.model.num_layers
    layout = _Layout(
        quantization=replace(config.quantization, exclude=tuple(config.quantization.exclude)),
        tensor=config.tensor_parallel_size,
        sequence_parallel=config.sequence_parallel,
        expert=config.expert_parallel_size,
        expert_tensor=config.expert_tensor_size,
    )
    tokens = request.micro_batch_size * -(-request.seq_length // config.context_parallel_size)
    return layers_of(request.model, layout, tokens)


@functools.lru_cache(maxsize=256)
def layers_of(
    model: GPTConfig, layout: _Layout, tokens: int, simulated_bytes: int = SIMULATED_BYTES
) -> tuple[QuantizedLayer, ...]:
    """`tokens` are those of a micro-batch on a context rank; `simulated_bytes` of a rounded value
    of recipes that are simulated.
    """
    return tuple(
        _layer(linears, parameters, layout, tokens, simulated_bytes)
        for linears, parameters in _linears(model, layout)
    )


@functools.lru_cache(maxsize=64)
def _linears(model: GPTConfig, layout: _Layout) -> list[tuple[list[_Linear], int]]:
    """(linear layers in low precision, number of parameters) of each layer, on one rank."""
    module = GPTModel(model)
    network, plan = module.build_network("meta"), module.parallel_plan()
    chosen: dict[str, Any] = chosen_linears(network, plan, layout.quantization)
    shapes = {path: linear.weight.shape for path, linear in chosen.items()}
    apply_tensor_parallel(
        network,
        plan,
        MeshAxis(name="tp", size=layout.tensor),
        sequence_parallel=layout.sequence_parallel,
        experts=ExpertAxes(
            expert=MeshAxis(name="ep", size=layout.expert),
            tensor=MeshAxis(name="etp", size=layout.expert_tensor),
        ),
    )
    found = []
    for number in range(model.num_layers):
        path = f"{plan.layers}.{number}"
        parameters = sum(p.numel() for p in network.get_submodule(path).parameters())
        linears = [
            _Linear(
                path=name.removeprefix(f"{path}."),
                shape=tuple(linear.weight.shape),
                whole=tuple(shapes[name]),
                experts=hasattr(linear, "quantized_experts"),
                gathers=_gathers(linear),
            )
            for name, linear in chosen.items()
            if name.startswith(f"{path}.")
        ]
        found.append((linears, parameters))
    return found


def _gathers(linear: Any) -> bool:
    before = linear.before if hasattr(linear, "before") else None
    return isinstance(before, ColumnInput) and before.sequence_dim is not None


def _layer(
    linears: Sequence[_Linear],
    parameters: int,
    layout: _Layout,
    tokens: int,
    simulated_bytes: int,
) -> QuantizedLayer:
    config = layout.quantization
    inputs: list[tuple[str, float]] = []
    held = largest = at_once = 0.0
    for linear in linears:
        elements = math.prod(linear.shape)
        by_rows = linear.experts and config.scales_rows_of_experts
        one = elements * value_bytes(config, simulated_bytes)
        held += one * weight_copies(config, experts=linear.experts)
        held += _FLOAT * _numbers(config, linear, by_rows=by_rows)
        one_by_one = linear.experts and not by_rows
        largest = max(largest, one / linear.shape[0] if one_by_one else one)
        at_once += 0.0 if by_rows else elements
        if by_rows and not rounds_weight_gradient(math.prod(linear.whole[1:-1]), linear.whole[-1]):
            continue  # the gradient's product takes the input as it is
        size = input_bytes(config, tokens, simulated_bytes)
        keeps_whole = linear.gathers and not _joins_parts(config, tokens // layout.tensor)
        inputs.append((linear.path, size * (layout.tensor if keeps_whole else 1)))
    return QuantizedLayer(
        inputs=tuple(inputs),
        bytes_held=held,
        bytes_at_once=largest,
        share_at_once=at_once / parameters if parameters else 0.0,
    )


def _numbers(config: QuantizationConfig, linear: _Linear, *, by_rows: bool) -> float:
    """Scales and histories beside both operands of a weight; a scale of a tensor counts nothing."""
    elements, inputs = math.prod(linear.shape), linear.shape[-1]
    if by_rows:
        return elements / inputs + linear.shape[0] * inputs
    if config.recipe == "fp8_rowwise":
        return elements / inputs + inputs
    if config.recipe == "fp8_delayed" and not linear.experts:
        return len(ROLES) * (config.amax_history_length + _DELAYED_NUMBERS)
    blocks = config.recipe == "fp8_blockwise" and not config.simulate
    return 2 * elements / 128**2 if blocks else 0.0


def _joins_parts(config: QuantizationConfig, rows: int) -> bool:
    """Whether parts of the sequence, of so many rows, are rounded before they are gathered: then
    each rank keeps its own, else what it has gathered.
    """
    if config.recipe == "fp8_blockwise" and not config.simulate:
        return False  # its scales lie by blocks first
    block = {"fp8_blockwise": 128, "mxfp8": 32}.get(config.recipe, _ALIGNMENT)
    return rows % block == 0
