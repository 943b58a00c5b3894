"""What happens around a run: checks before anything starts, the process group, and how a failure
is reported.
"""

from __future__ import annotations

import atexit
import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn

from megatron_lightning.config.parallel import ParallelConfig
from megatron_lightning.config.plan import ParallelPlan
from megatron_lightning.config.recompute import RecomputeConfig
from megatron_lightning.config.validate import check_batch_sizes, raise_if_any
from megatron_lightning.parallel.context.apply import check_context_parallel
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.peers.exchange import abandon_exchanges, release_exchanges
from megatron_lightning.parallel.quantized.apply import quantization_problems
from megatron_lightning.parallel.tensor_checks import check_tensor_plan
from megatron_lightning.runtime.parallelize import Target, outside_problems, stage_layout
from megatron_lightning.runtime.recompute import recompute_problems
from megatron_lightning.runtime.stages import PipelinedNetwork
from megatron_lightning.strategies.checkpoint_checks import check_checkpoint_path
from megatron_lightning.strategies.recovery import recover_folders
from megatron_lightning.strategies.resume import use_folders
from megatron_lightning.strategies.trainer_checks import trainer_problems
from megatron_lightning.utils.env import Launch, provide
from megatron_lightning.utils.logging import warn_once
from megatron_lightning.utils.wording import merge_alike

if TYPE_CHECKING:
    from megatron_lightning.strategies.mesh_strategy import MeshStrategy

_FIRST_RANK_SECONDS = 10.0
_OWNER = "_megatron_strategy"
"""Attribute of a LightningModule: the strategy that cut it in this process."""


def raise_on_first_rank(problems: Sequence[str], rank: int) -> None:
    """Raise the full message on global rank 0. Other ranks, started from outside, leave quietly
    with status 1, and not before rank 0 has had time to speak: launchers end all ranks with the
    first.
    """
    if problems and rank != 0:
        time.sleep(_FIRST_RANK_SECONDS)
        raise SystemExit(1)
    raise_if_any(problems)


def check_run(strategy: MeshStrategy, trainer: Trainer, arguments: Mapping[str, Any]) -> None:
    """Check what `Trainer.fit` (or validate, ...) was given against the layout.

    No process group is needed, and no file but indexes is opened. Raises ConfigurationError with
    every violation.
    """
    use_folders(trainer)
    recover_folders(strategy, trainer)
    problems = _started_problems(strategy)
    problems += check_checkpoint_path(
        arguments.get("ckpt_path"), given_module(trainer, arguments), given_datamodule(arguments)
    )
    trainer_check = getattr(given_datamodule(arguments), "check_trainer", None)
    if trainer_check is not None:
        problems += trainer_check(trainer)
    module = given_module(trainer, arguments)
    if module is not None:
        world_size = strategy.num_processes * strategy.num_nodes
        problems += run_problems(strategy, module, given_datamodule(arguments), world_size)
        problems += trainer_problems(strategy, trainer, module)
    raise_on_first_rank(problems, strategy.global_rank)


def given_module(trainer: Trainer, arguments: Mapping[str, Any]) -> LightningModule | None:
    """The module of this call of the Trainer, else that of the call before."""
    module = arguments.get("model")
    return module if module is not None else trainer.lightning_module


def given_datamodule(arguments: Mapping[str, Any]) -> LightningDataModule | None:
    """The data module of this call of the Trainer."""
    for name in ("datamodule", "train_dataloaders", "dataloaders"):
        if isinstance(arguments.get(name), LightningDataModule):
            return arguments[name]
    return None


def _started_problems(strategy: MeshStrategy) -> list[str]:
    """Whether as many processes run as devices and num_nodes say."""
    environment = strategy.cluster_environment
    assert environment is not None
    if not environment.creates_processes_externally:
        return []
    started = (
        dist.get_world_size() if dist.is_initialized() else Launch.from_environment().world_size
    )
    wanted = strategy.num_processes * strategy.num_nodes
    if started in (1, wanted):  # 1 also where nothing says how many
        return []
    return [
        f"devices x num_nodes = {strategy.num_processes} x {strategy.num_nodes} = {wanted}, but "
        f"{started} processes were started (by torchrun, srun, or an earlier Trainer of this "
        f"script); start {wanted}, or set devices and num_nodes to match"
    ]


def run_problems(
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
        data_check = getattr(datamodule, "validate", None)
        wrong_data = [] if data_check is None else data_check()
        problems += wrong_data
        global_size = getattr(datamodule, "global_batch_size", None)
        micro_size = config.micro_batch_size or getattr(datamodule, "micro_batch_size", None)
        if global_size is not None and micro_size is not None:
            for size in getattr(datamodule, "global_batch_sizes", (global_size,)):
                found = check_batch_sizes(config, world_size, micro_size, size)
                ramp = "" if size == global_size else "rampup_batch_size: "
                problems += [ramp + problem for problem in found]
        seq_length = getattr(datamodule, "seq_length", None)
        if (
            config.sequence_parallel
            and config.context_parallel_size == 1  # pads to what divides
            and seq_length is not None
            and seq_length % config.tensor_parallel_size
        ):
            problems.append(
                f"sequence_parallel=True: seq_length={seq_length} is not a multiple of"
                f" tensor_parallel_size={config.tensor_parallel_size}; use"
                f" {-(-seq_length // config.tensor_parallel_size) * config.tensor_parallel_size}"
            )
        pair_check = getattr(module, "check_data", None)
        if pair_check is not None and not wrong_data:  # else nothing is known of its vocabulary
            problems += pair_check(datamodule)
    return problems


def _cut_problems(strategy: MeshStrategy, module: LightningModule) -> list[str]:
    """What keeps the module from being cut, found on the meta device."""
    config = strategy.config
    if _is_built_later(strategy, module):
        return []
    problems: list[str] = []
    try:
        target = find_target(module, strategy.user_plan)
        if target is None:
            needs_plan = (
                config.model_parallel_size * config.expert_parallel_size > 1
                or config.recompute != RecomputeConfig()
                or config.quantization is not None
            )
            return [_no_plan(module, config)] if needs_plan else []
        build = getattr(module, "build_network", None)
        network = build("meta") if build is not None else _existing_network(module, target)
        if network is None:
            return []  # made in configure_model; checked when it is cut
        problems += check_tensor_plan(
            network,
            target.plan,
            config.tensor_parallel_size,
            sequence_parallel=config.sequence_parallel,
            expert_size=config.expert_parallel_size,
            expert_tensor_size=config.expert_tensor_size,
            allows=_allowed_by(module, config),
        )
        names = [name for name, _ in network.named_parameters(remove_duplicate=False)]
        problems += [
            f"plan.splits: row {row!r} matches no parameter, so it would split nothing; correct or"
            " remove it"
            for row in target.plan.unused_rows(names)
        ]
        problems += check_context_parallel(network, config)
        problems += recompute_problems(network, target.plan, config.recompute)
        problems += quantization_problems(
            network,
            target.plan,
            config.quantization,
            config.tensor_parallel_size,
            config.expert_tensor_size,
        )
        problems += outside_problems(module, network, target)
        stages = config.pipeline_parallel_size * config.pipeline.virtual_pipeline_size
        if stages > 1 or config.pipeline.layout is not None:
            stage_layout(network, target.plan, config)
    except ValueError as error:
        problems.append(str(error))
    return merge_alike(problems)


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


def find_target(module: LightningModule, plan: ParallelPlan | None) -> Target | None:
    """The network that is cut, with its plan; None when the whole module is merely replicated.

    A module of this package has `parallel_plan()` and `network_attribute`. For a user's module
    with a plan it is the attribute named by `network_attribute`, else the only child that has
    parameters.
    """
    own = getattr(module, "parallel_plan", None)
    if plan is None and own is not None:
        plan = own()
    if plan is None:
        return None
    named = getattr(module, "network_attribute", None)
    if named is not None:
        return Target(plan=plan, attribute=named)
    children = [
        name for name, child in module.named_children() if any(True for _ in child.parameters())
    ]
    if len(children) != 1:
        raise ValueError(
            f"{type(module).__name__}: which of {children} does the plan describe? Set the class "
            f"attribute"
            " network_attribute = '<name>'"
        )
    return Target(plan=plan, attribute=children[0])


def has_experts(module: LightningModule, plan: ParallelPlan | None) -> bool:
    """Whether the module's plan, or the given one in its place, has rows of experts."""
    own = getattr(module, "parallel_plan", None)
    if plan is None and own is not None:
        plan = own()
    return plan is not None and plan.has_experts


def claim(module: LightningModule, strategy: MeshStrategy) -> None:
    """Note that `strategy` cuts `module`; ValueError when another strategy has cut it into parts
    before.
    """
    owner: MeshStrategy | None = vars(module).get(_OWNER)
    is_cut = owner is not None and (
        owner.config.model_parallel_size * owner.config.pipeline.virtual_pipeline_size > 1
        or owner.config.expert_parallel_size > 1
        or owner.config.data_parallel.sharding == "fsdp"
    )
    if owner is not None and owner is not strategy and is_cut:
        raise ValueError(
            f"{type(module).__name__} was cut for {owner.mesh.describe()} by another strategy of "
            f"this process; make a new"
            " module and load the checkpoint into it"
        )
    object.__setattr__(module, _OWNER, strategy)


def init_process_group(strategy: MeshStrategy, timeout: timedelta) -> None:
    """Join the default process group, over the cluster environment's address or, in a forked rank,
    a file.
    """
    environment = strategy.cluster_environment
    assert environment is not None
    backend = strategy.config.runtime.backend
    if backend is None:
        backend = "nccl" if strategy.root_device.type == "cuda" else "gloo"
    options: dict[str, Any] = {"device_id": strategy.root_device} if backend == "nccl" else {}
    if strategy.config.runtime.cuda_graphs != "none":
        # Else NCCL lets ranks map each other's memory while they record, for which all must be
        # there, and which segments that expand don't allow.
        provide(override=False, NCCL_GRAPH_REGISTER="0")
    if strategy.store_file:
        options["store"] = dist.FileStore(strategy.store_file, strategy.world_size)
        options["store"].set_timeout(timeout)
    else:
        options["init_method"] = f"tcp://{environment.main_address}:{environment.main_port}"
    dist.init_process_group(
        backend,
        rank=strategy.global_rank,
        world_size=strategy.world_size,
        timeout=timeout,
        **options,
    )
    atexit.register(end_process_group)


def end_process_group() -> None:
    """Leave the process group in order, when Python ends."""
    if dist.is_initialized():
        release_exchanges()
        dist.destroy_process_group()


def abort_groups(mesh: ParallelMesh) -> None:
    """Give up everything that runs in the groups of NCCL, or waits for the peers' memory; they are
    of no use afterwards.

    Streams may wait for both in any order, so signals are given while groups are aborted.
    """
    atexit.unregister(end_process_group)
    if mesh.device.type != "cuda":
        return
    aborted = threading.Event()
    signals = threading.Thread(target=_abandon_exchanges, args=(aborted, mesh.device), daemon=True)
    signals.start()
    try:
        for group in mesh.groups:
            group._get_backend(mesh.device).abort()
    finally:
        aborted.set()
        signals.join()


def _abandon_exchanges(aborted: threading.Event, device: torch.device) -> None:
    try:
        with torch.cuda.device(device):  # a thread's own, else signals make a context on GPU 0
            abandon_exchanges(aborted.is_set)
    except RuntimeError as error:  # of the device, whose kernels then wait for nothing any more
        message = f"waits for the peers' memory couldn't be ended: {error}"
        warn_once(message, every_rank=True)


def is_interactive() -> bool:
    """True in a notebook kernel or an interactive shell."""
    return bool(_IS_INTERACTIVE)


def check_zeroed(parameters: Mapping[str, Tensor]) -> None:
    """Refuse an `optimizer_zero_grad` that keeps gradients: windows are zeroed by the strategy."""
    kept = [name for name, parameter in parameters.items() if parameter.grad is not None]
    if kept:
        raise ValueError(
            f"gradients of {kept[:3]} were there before backward: gradients accumulate in the "
            f"strategy's buckets, so an"
            " optimizer_zero_grad that keeps them has no effect; use "
            "Trainer(accumulate_grad_batches=...)"
        )


def warn_no_tokens() -> None:
    """Warn that a window held no token with a loss."""
    warn_once(
        "No token of an accumulation window has a loss (every label is masked, or training_step "
        "returned None): the optimizer "
        "step leaves all parameters"
        " unchanged, weight decay included; it still counts as a step."
    )
