"""The few touch points with Lightning that are not quite public. Each has a test that fails when
Lightning changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.optim import Optimizer

from megatron_lightning.parallel.mesh import ParallelMesh

if TYPE_CHECKING:
    from megatron_lightning.strategies.megatron import MegatronStrategy


def set_world_ranks(strategy: MegatronStrategy) -> None:
    """Give the cluster environment this process' global rank and the world size, as Lightning's
    DDP strategy does.
    """
    environment = strategy.cluster_environment
    if environment is not None:
        environment.set_global_rank(
            strategy.node_rank * strategy.num_processes + strategy.local_rank
        )
        environment.set_world_size(strategy.num_nodes * strategy.num_processes)
    rank_zero_only.rank = strategy.global_rank


def optimizers_to_device(optimizers: Sequence[Optimizer], device: torch.device) -> None:
    """Move optimizer state that exists already to `device`."""
    _optimizers_to_device(optimizers, device)


def reduce_tensor(tensor: Tensor, group: Any, reduce_op: Any) -> Tensor:
    """Sum or mean of `tensor` over `group` (None: all ranks), as Lightning's `Strategy.reduce`
    promises it.
    """
    group = dist.group.WORLD if group is None else group
    result = tensor.clone()
    mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
    if mean and not result.is_floating_point():
        result = result.float()
    op = reduce_op if isinstance(reduce_op, dist.ReduceOp) else _NAMED_OPS[str(reduce_op).lower()]
    dist.all_reduce(result, op=op, group=group)
    return result / dist.get_world_size(group) if mean else result


_NAMED_OPS: dict[str, Any] = {
    "mean": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def share_predictions(prediction: Any, mesh: ParallelMesh) -> Any:
    """Give every pipeline stage the last stage's prediction (its tensors on the CPU when they
    travelled).
    """
    if mesh.pp.size == 1:
        return prediction
    box = [prediction]
    dist.broadcast_object_list(box, src=mesh.pp.ranks[-1], group=mesh.pp.group)
    return prediction if mesh.pp.is_last else box[0]
