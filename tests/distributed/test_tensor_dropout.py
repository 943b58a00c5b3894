"""Dropout over tensor ranks: streams agree where activations do, exact masks in every layout."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from megatron_lightning.layers.dropout import Dropout, apply_random
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.streams import Layout
from tests.harness import run_ranks

LAYOUTS = {Layout.HIDDEN: (8, 3, 20), Layout.FEATURES: (8, 3, 24), Layout.HEADS: (3, 4, 8, 8)}


def _network() -> nn.ModuleDict:
    return nn.ModuleDict({layout.value: Dropout(0.3, layout) for layout in LAYOUTS})


def _masks(mesh: ParallelMesh, exact: bool, sequence_parallel: bool) -> dict[Layout, Tensor]:
    """Masks of this rank's part of each activation."""
    network = _network()
    streams = apply_random(network, mesh, seed=1, exact=exact, sequence_parallel=sequence_parallel)
    streams.begin(4, 1, 300)
    dims = {Layout.HIDDEN: 0 if sequence_parallel else None, Layout.FEATURES: 2, Layout.HEADS: 1}
    masks = {}
    for layout, shape in LAYOUTS.items():
        local = torch.ones(shape)
        if dims[layout] is not None:
            local = local.chunk(mesh.tp.size, dims[layout])[mesh.tp.rank]
        masks[layout] = network[layout.value](local) == 0
    return masks


def _tensor_ranks(rank: int, size: int, exact: bool, sequence_parallel: bool):
    mesh = ParallelMesh.build(device=torch.device("cpu"), tensor=size)
    return _masks(mesh, exact, sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_exact_masks_are_the_same_in_every_layout(size: int, sequence_parallel: bool) -> None:
    whole = _masks(ParallelMesh.single(), exact=True, sequence_parallel=False)
    parts = run_ranks(_tensor_ranks, size, True, sequence_parallel)
    for part in parts if not sequence_parallel else ():
        assert torch.equal(part[Layout.HIDDEN], whole[Layout.HIDDEN])
    split = {Layout.FEATURES: 2, Layout.HEADS: 1} | (
        {Layout.HIDDEN: 0} if sequence_parallel else {}
    )
    for layout, dim in split.items():
        assert torch.equal(torch.cat([part[layout] for part in parts], dim), whole[layout])


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_streams_agree_on_whole_activations_and_differ_on_split_ones(
    sequence_parallel: bool,
) -> None:
    first, second = run_ranks(_tensor_ranks, 2, False, sequence_parallel)
    assert torch.equal(first[Layout.HIDDEN], second[Layout.HIDDEN]) != sequence_parallel
    assert not torch.equal(first[Layout.FEATURES], second[Layout.FEATURES])
    assert not torch.equal(first[Layout.HEADS], second[Layout.HEADS])


def _data_ranks(rank: int, size: int) -> tuple[dict[Layout, Tensor], Tensor]:
    mesh = ParallelMesh.build(device=torch.device("cpu"))
    masks = _masks(mesh, exact=False, sequence_parallel=False)
    return masks, torch.rand(4)


def test_data_ranks_draw_other_masks_and_the_same_default_numbers() -> None:
    (first, default), (second, other) = run_ranks(_data_ranks, 2)
    assert not torch.equal(first[Layout.HIDDEN], second[Layout.HIDDEN])
    assert torch.equal(default, other)


def test_exact_masks_under_context_parallelism_need_positions() -> None:
    mesh = ParallelMesh.single()
    mesh = replace(mesh, axes={**mesh.axes, "cp": replace(mesh.cp, size=2, ranks=(0, 1))})
    with pytest.raises(ValueError, match="context_parallel_size=2 needs"):
        _masks(mesh, exact=True, sequence_parallel=False)
