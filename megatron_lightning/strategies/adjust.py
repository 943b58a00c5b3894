"""What of a user's module or Trainer means something else on several ranks, and is adjusted so that
it keeps its meaning, or is said to show a part alone.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchmetrics import Metric

from megatron_lightning.parallel.mesh import ParallelMesh

if TYPE_CHECKING:
    from megatron_lightning.strategies.model_strategy import ModelStrategy


def confine_metrics(module: LightningModule, mesh: ParallelMesh) -> None:
    """Let the torchmetrics objects of `module` that have no process group of their own sum over
    data-parallel ranks alone. Over the world they would count the samples of a model copy once for
    each of its ranks.
    """
    if mesh.dp.size == mesh.world_size:
        return
    for metric in module.modules():
        if not isinstance(metric, Metric) or metric.process_group is not None:
            continue
        if mesh.dp.size == 1:
            metric.distributed_available_fn = _not_distributed
        else:
            metric.process_group = mesh.dp.group


def _not_distributed() -> bool:
    return False


def cast_inputs(network: nn.Module, dtype: torch.dtype) -> None:
    """Give a network that is built in another dtype its floating-point inputs in that dtype, as
    Lightning's precision plugins do with whole batches. Targets and masks of the step stay as they
    are.
    """

    def cast(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return pytree.tree_map(convert, (args, kwargs))

    def convert(value: Any) -> Any:
        is_number = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if is_number else value

    if dtype is not torch.float32:
        network.register_forward_pre_hook(cast, with_kwargs=True)


def apply_layer_sync(strategy: ModelStrategy, module: LightningModule) -> None:
    """Exchange batch norms as `Trainer(sync_batchnorm=True)` asks, in place, before anything else
    knows the module. Plans and tensor or pipeline ranks were refused before the start.
    """
    if strategy._layer_sync is not None and strategy.world_size > 1:
        strategy._layer_sync.apply(module)


def revert_layer_sync(strategy: ModelStrategy) -> None:
    """Put ordinary batch norms back, as DDP does at the end of a fit."""
    module = strategy.lightning_module
    if strategy._layer_sync is None or strategy.world_size == 1 or module is None:
        return
    if module._trainer is not None and module._trainer.state.fn == TrainerFn.FITTING:
        strategy._layer_sync.revert(module)


def announce_summary(strategy: ModelStrategy, trainer: Trainer) -> None:
    """Say how much of the model Lightning's summary shows: what rank 0 holds."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    model, mesh = strategy.parallel_model, strategy.mesh
    shown = any(isinstance(callback, ModelSummary) for callback in callbacks)
    if not shown or strategy.config.model_parallel_size * strategy.config.expert_parallel_size == 1:
        return
    total = torch.tensor([0, 0])  # dense parameters and experts, which have other replicas
    for name, info in model.table.items():
        axis = mesh.axis("etp") if info.expert else mesh.tp
        if name in model.parameters and not info.tied_copy:
            total[int(info.expert)] += info.numel * (info.split.dim is not None or axis.is_first)
    dist.all_reduce(total, group=mesh.control_group)
    dense, experts = total.tolist()
    number = dense // mesh.dp_cp.size + experts // mesh.axis("edp").size
    held = sum(math.prod(parameter.shape) for parameter in model.parameters.values())
    rank_zero_info(
        f"The model has {number:,} parameters; the summary shows the "
        f"{held:,} of them that rank 0 holds ({mesh.describe()})"
    )


def evaluate_with_no_grad(strategy: ModelStrategy, trainer: Trainer) -> None:
    """Let the Trainer's evaluations of fully sharded parameters run under `no_grad` in place of
    `inference_mode`, as Lightning does with its own FSDP strategy: the buffers that parameters are
    gathered into are made by the first forward pass and kept, and made under `inference_mode` they
    could take part in no backward pass.
    """
    if not any(strategy.parallel_model.sharded_roots):
        return
    loops: Any = trainer
    for loop in (loops.validate_loop, loops.test_loop, loops.predict_loop):
        loop.inference_mode = False  # that of validations within a fit is False anyway
