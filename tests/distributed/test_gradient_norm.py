"""The global norm of cut models on gloo ranks against the norm of the whole."""

import math

import pytest
import torch
from torch import Tensor

from megatron_lightning.config.plan import ParameterInfo, replicated, row
from megatron_lightning.optim.clip import global_grad_norm
from megatron_lightning.parallel.mesh import ParallelMesh
from tests.harness import run_ranks

CPU = torch.device("cpu")


def _whole() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"split": (4, 6), "norm": (5,), "tied": (3, 2), "deep": (4, 6)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _info(name: str, grad: Tensor, *, split: bool, tied_copy: bool = False) -> ParameterInfo:
    return ParameterInfo(
        name=name,
        global_shape=tuple(grad.shape),
        offsets=(0,) * grad.dim(),
        sizes=tuple(grad.shape),
        split=row() if split else replicated(),
        tied_copy=tied_copy,
    )


def _norm(rank: int, world_size: int, tensor: int, pipeline: int, norm_type: float) -> float:
    mesh = ParallelMesh.build(device=CPU, tensor=tensor, pipeline=pipeline)
    whole = _whole()
    stage = {"split", "norm", "tied"} if mesh.pp.is_first else set()
    stage |= {"deep", "tied"} if mesh.pp.is_last else set()
    grads, table = {}, {}
    for name in sorted(stage):
        split = name in ("split", "deep")
        grads[name] = whole[name].chunk(tensor, 1)[mesh.tp.rank] if split else whole[name]
        copied = name == "tied" and pipeline > 1 and mesh.pp.is_last
        table[name] = _info(name, grads[name], split=split, tied_copy=copied)
    return global_grad_norm(grads, table, mesh, norm_type=norm_type).item()


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2), (1, 1), (1, 4)])
@pytest.mark.parametrize("norm_type", [2.0, math.inf, 1.0])
def test_every_parameter_counts_once(tensor: int, pipeline: int, norm_type: float) -> None:
    whole = torch.cat([grad.flatten() for grad in _whole().values()]).double()
    wanted = torch.linalg.vector_norm(whole, norm_type).item()
    got = run_ranks(_norm, 4, tensor, pipeline, norm_type)
    assert got == [got[0]] * 4
    assert got[0] == pytest.approx(wanted, rel=1e-6)


def _expert_norm(rank: int, world_size: int, expert: int, expert_tensor: int) -> float:
    """4 ranks with tp 2 x dp 2 for the dense parameters."""
    mesh = ParallelMesh.build(device=CPU, tensor=2, expert=expert, expert_tensor=expert_tensor)
    whole = _whole()
    experts = whole["deep"].chunk(expert, 0)[mesh.axis("ep").rank]
    if expert_tensor > 1:
        experts = experts.chunk(expert_tensor, 1)[mesh.axis("etp").rank]
    grads = {"split": whole["split"].chunk(2, 1)[mesh.tp.rank], "norm": whole["norm"]}
    table = {name: _info(name, g, split=name == "split") for name, g in grads.items()}
    grads["deep"] = experts
    table["deep"] = ParameterInfo(
        name="deep",
        global_shape=(4, 6),
        offsets=(0, 0),
        sizes=tuple(experts.shape),
        split=row() if expert_tensor > 1 else replicated(),
        expert=True,
    )
    return global_grad_norm(grads, table, mesh).item()


@pytest.mark.parametrize(("expert", "expert_tensor"), [(1, 1), (2, 1), (4, 1), (2, 2), (1, 2)])
def test_experts_count_once_in_every_folding(expert: int, expert_tensor: int) -> None:
    whole = _whole()
    counted = torch.cat([whole[name].flatten() for name in ("split", "norm", "deep")]).double()
    for got in run_ranks(_expert_norm, 4, expert, expert_tensor):
        assert got == pytest.approx(counted.norm().item(), rel=1e-6)
