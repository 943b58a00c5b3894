"""torchmetrics objects of a user's module under model parallelism.

Such an object sums its state over the world, which would count the samples of a model copy once for
each of its ranks.
"""

from __future__ import annotations

from lightning.pytorch import LightningModule
from torchmetrics import Metric

from megatron_lightning.parallel.mesh import ParallelMesh


def confine_metrics(module: LightningModule, mesh: ParallelMesh) -> None:
    """Let the metrics of `module` that have no process group of their own sum over data-parallel
    ranks alone.
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
