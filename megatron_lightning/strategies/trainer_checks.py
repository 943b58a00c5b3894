"""What Lightning offers and a layout can't honour, refused by name before any process is started.

One small function a rule: it yields nothing, or one explained problem. `docs/lightning.md` lists
for every flag, hook and built-in callback of Lightning whether it keeps its meaning or is refused
here; nothing is silently ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Callback,
    ModelPruning,
    ModelSummary,
    StochasticWeightAveraging,
    ThroughputMonitor,
    WeightAveraging,
)
from lightning.pytorch.plugins import TorchSyncBatchNorm
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer
from torchmetrics import Metric

from megatron_lightning.strategies.precision_checks import precision_problems
from megatron_lightning.strategies.sharding_checks import sharding_problems
from megatron_lightning.strategies.trainer_numbers import number_problems

if TYPE_CHECKING:
    from megatron_lightning.strategies.mesh_strategy import MeshStrategy

Rule = Callable[["MeshStrategy", Trainer, LightningModule], Iterator[str]]


def trainer_problems(
    strategy: MeshStrategy, trainer: Trainer, module: LightningModule
) -> list[str]:
    """Everything that this Trainer or module asks for and the layout can't give. Needs no process
    group; asked before the start, and again when callbacks of `configure_callbacks` are known.
    """
    return [problem for rule in _RULES for problem in rule(strategy, trainer, module)]


def optimizer_problems(optimizers: Sequence[Optimizer]) -> list[str]:
    """What no schedule can drive. Known only when `configure_optimizers` has run, on every rank."""
    return [
        _several_evaluations(optimizer)
        for optimizer in optimizers
        if isinstance(optimizer, torch.optim.LBFGS)
    ]


def evaluated_once(closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
    """The closure of one optimizer step, which an optimizer unknown to `optimizer_problems` may
    not evaluate again: ValueError.
    """
    calls = 0

    def once() -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise ValueError(_several_evaluations(optimizer))
        return closure()

    return once


def _several_evaluations(optimizer: Optimizer) -> str:
    return (
        f"configure_optimizers: {type(optimizer).__name__} evaluates the closure several times a "
        f"step, and training_step's gradients are reduced once; use another optimizer, or manual "
        f"optimization under data parallelism"
    )


def _callbacks(trainer: Trainer, kind: type[Callback]) -> Iterator[str]:
    """Class names of the Trainer's callbacks of a kind."""
    found: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    yield from dict.fromkeys(type(each).__name__ for each in found if isinstance(each, kind))


def _layout(strategy: MeshStrategy) -> str:
    sizes = {
        name: getattr(strategy.config, name)
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
    }
    return " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)


def _is_cut(strategy: MeshStrategy, module: LightningModule) -> bool:
    """Whether the strategy builds or cuts the network, in place of the module's constructor."""
    own_plan = hasattr(module, "parallel_plan") or strategy.user_plan is not None
    return own_plan or strategy.config.model_parallel_size > 1


def _is_pipelined(strategy: MeshStrategy) -> bool:
    config = strategy.config
    return config.pipeline_parallel_size > 1 or config.pipeline.virtual_pipeline_size > 1


# ---------------------------------------------------------------------- callbacks


def _averaging(strategy: Any, trainer: Trainer, module: LightningModule) -> Iterator[str]:
    if not _is_cut(strategy, module):
        return
    for kind in (WeightAveraging, StochasticWeightAveraging):
        for name in _callbacks(trainer, kind):
            yield (
                f"callback {name}: it averages a copy of the module made before the strategy has "
                f"cut or built the network of {type(module).__name__}; use it with a module "
                f"without a plan, under data parallelism"
            )


def _pruning(strategy: Any, trainer: Trainer, module: LightningModule) -> Iterator[str]:
    if _is_cut(strategy, module):
        for name in _callbacks(trainer, ModelPruning):
            yield (
                f"callback {name}: it ranks and renames the parameters that one rank holds, and "
                f"the network of {type(module).__name__} is described by a plan; prune under data "
                f"parallelism with a module without a plan"
            )


def _finetuning(strategy: Any, trainer: Trainer, module: LightningModule) -> Iterator[str]:
    if _is_pipelined(strategy):
        for name in _callbacks(trainer, BaseFinetuning):
            yield (
                f"callback {name} with {_layout(strategy)}: the layers that it unfreezes during "
                f"training are spread over stages; freeze in the constructor or configure_model, "
                f"or use pipeline_parallel_size=1"
            )
    precision = str(strategy.precision_plugin.precision)
    if _is_cut(strategy, module) and precision in ("bf16-mixed", "16-mixed"):
        for name in _callbacks(trainer, BaseFinetuning):
            yield (
                f"callback {name} with precision={precision!r}: it looks for the module's "
                f"parameters in the optimizer, which holds masters of them; freeze in "
                f"configure_model, or use precision='32-true' or 'bf16-true'"
            )


def _batch_size_finder(strategy: Any, trainer: Trainer, _: Any) -> Iterator[str]:
    if strategy.num_processes * strategy.num_nodes > 1:
        for name in _callbacks(trainer, BatchSizeFinder):
            yield (
                f"callback {name} (Tuner.scale_batch_size): it tries sizes until one process runs "
                f"out of memory, and a rank that does so alone would stop the others; use it with "
                f"one device, or set the batch size"
            )


def _throughput(strategy: Any, trainer: Trainer, _: Any) -> Iterator[str]:
    if strategy.config.model_parallel_size > 1:
        for name in _callbacks(trainer, ThroughputMonitor):
            yield (
                f"callback {name} with {_layout(strategy)}: it multiplies samples by the number of "
                f"processes, and the ranks of a model copy work on the same samples; use it under "
                f"data parallelism only"
            )


def _example_input(strategy: Any, trainer: Trainer, module: LightningModule) -> Iterator[str]:
    if not _is_pipelined(strategy) or module.example_input_array is None:
        return
    graph = [
        f"{type(logger).__name__}(log_graph=True)"
        for logger in trainer.loggers
        if getattr(logger, "_log_graph", False)
    ]
    for reader in [*_callbacks(trainer, ModelSummary), *graph]:
        yield (
            f"example_input_array with {reader} and {_layout(strategy)}: the network can be called "
            f"in steps alone, where every stage takes part; set example_input_array=None"
        )


# ---------------------------------------------------------------------- flags and plugins


def _accelerator(strategy: Any, trainer: Trainer, _: Any) -> Iterator[str]:
    if not isinstance(strategy.accelerator, (CPUAccelerator, CUDAAccelerator)):
        yield (
            f"accelerator={type(strategy.accelerator).__name__}: this strategy runs on CPU and "
            f"CUDA; set accelerator='cpu' or 'gpu'"
        )


def _backend(strategy: Any, trainer: Trainer, _: Any) -> Iterator[str]:
    backend, device = strategy.config.runtime.backend, strategy.root_device.type
    if backend is None:
        return
    known = [name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED]
    names = {part.rpartition(":")[2] for part in backend.lower().split(",")}
    if names - set(known):
        yield (
            f"runtime.backend={backend!r}: torch.distributed knows {known} here; choose one of"
            f" them, or None for the usual one of the device"
        )
    elif device == "cpu" and names == {"nccl"}:
        yield (
            f"runtime.backend={backend!r} with accelerator='cpu': NCCL moves what GPUs hold; set"
            f" backend='gloo', or None"
        )


def _checkpoint_plugin(strategy: Any, trainer: Any, _: Any) -> Iterator[str]:
    given = trainer._accelerator_connector.checkpoint_io
    if given is not None:
        yield (
            f"plugins=[{type(given).__name__}(...)]: checkpoints are written by all ranks together "
            f"in this strategy's format, so a CheckpointIO has nothing to write; leave it out"
        )


def _sync_batchnorm(strategy: Any, trainer: Trainer, module: LightningModule) -> Iterator[str]:
    sync = strategy._layer_sync
    if sync is None or strategy.num_processes * strategy.num_nodes == 1:
        return
    given = (
        "sync_batchnorm=True"
        if isinstance(sync, TorchSyncBatchNorm)
        else f"plugins=[{type(sync).__name__}(...)]"
    )
    if _is_cut(strategy, module):
        yield (
            f"{given}: layers would be exchanged in a network that a plan describes; use it with a "
            f"module without a plan, under data parallelism"
        )
    elif isinstance(sync, TorchSyncBatchNorm) and strategy.root_device.type == "cpu":
        yield f"{given}: torch has no synchronised batch norm on the CPU; set it to False there"


def _model_registry(strategy: Any, trainer: Any, _: Any) -> Iterator[str]:
    if trainer._model_registry:
        yield (
            f"model_registry={trainer._model_registry!r}: it uploads one checkpoint file, and "
            f"checkpoints of this strategy are folders; leave it out and upload the folder"
        )


# ---------------------------------------------------------------------- the module's hooks


def _manual_optimization(strategy: Any, _: Any, module: LightningModule) -> Iterator[str]:
    size = strategy.config.model_parallel_size
    if not module.automatic_optimization and size > 1:
        yield (
            f"automatic_optimization=False with {size} model-parallel ranks: the schedule runs "
            f"forward and backward itself; use automatic optimization, or data parallelism only"
        )


def _backward_hook(_: Any, __: Any, module: LightningModule) -> Iterator[str]:
    if module.automatic_optimization and is_overridden("backward", module):
        yield (
            f"{type(module).__name__}.backward: the strategy runs forward and backward of all "
            f"micro-batches inside training_step, so the hook would not be called; change the loss "
            f"in training_step, or the gradients in on_after_backward"
        )


def _metrics_in_pipeline(strategy: Any, _: Any, module: LightningModule) -> Iterator[str]:
    if _is_pipelined(strategy):
        found = [name for name, each in module.named_modules() if isinstance(each, Metric)]
        if found:
            yield (
                f"{type(module).__name__}.{found[0]} is a torchmetrics object, with "
                f"{_layout(strategy)}: steps get past the network on the last stage alone, so the "
                f"others never update it; log numbers (self.log averages them over the epoch)"
            )


_RULES: tuple[Rule, ...] = (
    _accelerator,
    _backend,
    _averaging,
    _pruning,
    _finetuning,
    _batch_size_finder,
    _throughput,
    _example_input,
    _checkpoint_plugin,
    _sync_batchnorm,
    _model_registry,
    _manual_optimization,
    _backward_hook,
    _metrics_in_pipeline,
    sharding_problems,
    precision_problems,
    number_problems,
)
