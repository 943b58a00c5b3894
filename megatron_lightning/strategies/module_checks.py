"""What keeps a module and its data from a layout, found without processes: a network is looked at
on the meta device, and no file but indexes is opened.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule
from torch import nn

from megatron_lightning.config.parallel import ParallelConfig
from megatron_lightning.config.recompute import RecomputeConfig
from megatron_lightning.config.validate import check_batch_sizes
from megatron_lightning.parallel.context.apply import check_context_parallel
from megatron_lightning.parallel.quantized.chosen_layers import quantization_problems
from megatron_lightning.parallel.tensor_checks import check_tensor_plan
from megatron_lightning.runtime.parallelize import Target, outside_problems, stage_layout
from megatron_lightning.runtime.recompute import recompute_problems
from megatron_lightning.runtime.stages import PipelinedNetwork
from megatron_lightning.strategies.targets import find_target
from megatron_lightning.utils.wording import merge_alike

if TYPE_CHECKING:
    from megatron_lightning.strategies.mesh_strategy import MeshStrategy


def module_problems(
    strategy: MeshStrategy, module: LightningModule, datamodule: Any, world_size: int
) -> list[str]:
    """Every violation that can be known before processes exist."""
    config = strategy.config
    problems: list[str] = []
    own_check = getattr(module, "check_parallel", None)
    if own_check is not None:
        problems += own_check(config)
    problems += _cut_problems(strategy, module)
    if datamodule is not None:
        problems += _data_problems(config, module, datamodule, world_size)
    return problems


# -------------------------------------------------------------------- the data


def _data_problems(
    config: ParallelConfig, module: LightningModule, datamodule: Any, world_size: int
) -> list[str]:
    data_check = getattr(datamodule, "validate", None)
    wrong_data = [] if data_check is None else data_check()
    problems = [
        *wrong_data,
        *_batch_size_problems(config, datamodule, world_size),
        *_seq_length_problems(config, datamodule),
    ]
    pair_check = getattr(module, "check_data", None)
    if pair_check is not None and not wrong_data:  # else nothing is known of its vocabulary
        problems += pair_check(datamodule)
    return problems


def _batch_size_problems(config: ParallelConfig, datamodule: Any, world_size: int) -> Iterator[str]:
    global_size = getattr(datamodule, "global_batch_size", None)
    micro_size = config.micro_batch_size or getattr(datamodule, "micro_batch_size", None)
    if global_size is None or micro_size is None:
        return
    for size in getattr(datamodule, "global_batch_sizes", (global_size,)):
        ramp = "" if size == global_size else "rampup_batch_size: "
        for problem in check_batch_sizes(config, world_size, micro_size, size):
            yield ramp + problem


def _seq_length_problems(config: ParallelConfig, datamodule: Any) -> Iterator[str]:
    seq_length = getattr(datamodule, "seq_length", None)
    if (
        config.sequence_parallel
        and config.context_parallel_size == 1  # pads to what divides
        and seq_length is not None
        and seq_length % config.tensor_parallel_size
    ):
        yield (
            f"sequence_parallel=True: seq_length={seq_length} is not a multiple of"
            f" tensor_parallel_size={config.tensor_parallel_size}; use"
            f" {-(-seq_length // config.tensor_parallel_size) * config.tensor_parallel_size}"
        )


# -------------------------------------------------------------------- the network


def _cut_problems(strategy: MeshStrategy, module: LightningModule) -> list[str]:
    """What keeps the module from being cut, found on the meta device."""
    config = strategy.config
    if _is_built_later(strategy, module):
        return []
    problems: list[str] = []
    try:
        target = find_target(module, strategy.user_plan)
        if target is None:
            return [_no_plan(module, config)] if _needs_plan(config) else []
        build = getattr(module, "build_network", None)
        network = build("meta") if build is not None else _existing_network(module, target)
        if network is None:
            return []  # made in configure_model; checked when it is cut
        for problem in _network_problems(config, module, network, target):
            problems.append(problem)  # one by one: an error leaves those before it
    except ValueError as error:
        problems.append(str(error))
    return merge_alike(problems)


def _network_problems(
    config: ParallelConfig, module: LightningModule, network: nn.Module, target: Target
) -> Iterator[str]:
    """Of a whole network; a ValueError is one more."""
    yield from check_tensor_plan(
        network,
        target.plan,
        config.tensor_parallel_size,
        sequence_parallel=config.sequence_parallel,
        expert_size=config.expert_parallel_size,
        expert_tensor_size=config.expert_tensor_size,
        allows=_allowed_by(module, config),
    )
    names = [name for name, _ in network.named_parameters(remove_duplicate=False)]
    for row in target.plan.unused_rows(names):
        yield (
            f"plan.splits: row {row!r} matches no parameter, so it would split nothing; correct or"
            " remove it"
        )
    yield from check_context_parallel(network, config)
    yield from recompute_problems(network, target.plan, config.recompute)
    yield from quantization_problems(
        network,
        target.plan,
        config.quantization,
        config.tensor_parallel_size,
        config.expert_tensor_size,
    )
    yield from outside_problems(module, network, target)
    stages = config.pipeline_parallel_size * config.pipeline.virtual_pipeline_size
    if stages > 1 or config.pipeline.layout is not None:
        stage_layout(network, target.plan, config)


def _allowed_by(module: LightningModule, config: ParallelConfig) -> Callable[[int], bool]:
    """Whether the module's own rules say nothing of a tensor size that they don't say of 1."""
    own_check = getattr(module, "check_parallel", None)
    if own_check is None:
        return lambda size: True

    @functools.cache
    def problems(size: int) -> frozenset[str]:
        return frozenset(own_check(replace(config, tensor_parallel_size=size)))

    return lambda size: problems(size) <= problems(1)


def _is_built_later(strategy: MeshStrategy, module: LightningModule) -> bool:
    """Whether nothing is known yet of the network that the user's plan describes, since
    `configure_model` will make it.
    """
    named = hasattr(module, "parallel_plan") or hasattr(module, "network_attribute")
    has_parameters = any(True for _ in module.parameters())
    return strategy.user_plan is not None and not named and not has_parameters


def _existing_network(module: LightningModule, target: Target) -> nn.Module | None:
    try:
        network = module.get_submodule(target.attribute)
    except AttributeError:
        return None
    return None if isinstance(network, PipelinedNetwork) else network


def _needs_plan(config: ParallelConfig) -> bool:
    """Whether something is asked for that can't be done to a network as a whole."""
    return (
        config.model_parallel_size * config.expert_parallel_size > 1
        or config.recompute != RecomputeConfig()
        or config.quantization is not None
    )


def _no_plan(module: LightningModule, config: ParallelConfig) -> str:
    names = (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "context_parallel_size",
        "expert_parallel_size",
    )
    sizes = {name: getattr(config, name) for name in names}
    needs = [f"{name}={size}" for name, size in sizes.items() if size > 1]
    if config.recompute != RecomputeConfig():
        needs.append(str(config.recompute))
    if config.quantization is not None:
        needs.append(f"quantization.recipe={config.quantization.recipe!r}")
    return (
        f"{type(module).__name__} has no plan, which {' and '.join(needs)}"
        f" need{'s' if len(needs) == 1 else ''}; pass MegatronStrategy(plan=ParallelPlan(...))"
    )
