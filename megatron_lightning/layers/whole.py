"""A network in one process, whole: for use outside of a Trainer and under Lightning's own
strategies.
"""

from __future__ import annotations

import torch
from torch import nn

from megatron_lightning.config.plan import ParallelPlan
from megatron_lightning.layers.dropout import apply_random
from megatron_lightning.layers.given import expect_values
from megatron_lightning.parallel.materialise import materialise
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.tensor import apply_tensor_parallel


def materialise_whole(
    network: nn.Module,
    plan: ParallelPlan,
    *,
    seed: int,
    prefix: str,
    device: torch.device | str = "cpu",
) -> None:
    """Give a network on the meta device all its initial values, bitwise those of any layout with
    this seed.

    `prefix` stands before the parameter names, e.g. "network.": values are drawn by canonical name.
    """
    mesh = ParallelMesh.single(device)
    table = apply_tensor_parallel(network, plan, mesh.tp, prefix=prefix)
    apply_random(network, mesh, seed=seed)
    expect_values(network, table, prefix)
    materialise(network, table, seed=seed, device=device, prefix=prefix)
