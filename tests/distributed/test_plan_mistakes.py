"""Rows of a plan that don't go with what the network does: the layer and its row are named."""

import pytest
import torch
from torch import Tensor, nn

from megatron_lightning.config.plan import ParallelPlan, Split, column, follows, row
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.tensor import apply_tensor_parallel
from megatron_lightning.runtime.stages import layer_names
from tests.harness import run_ranks


class Network(nn.Module):
    """Two layers, of which the second takes as much as the first gives, or more."""

    def __init__(self, extra: int = 0) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32 + extra, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


def run(rank: int, size: int, extra: int, splits: dict[str, Split]) -> str:
    network = Network(extra)
    axis = ParallelMesh.build(device=torch.device("cpu"), tensor=size).tp
    apply_tensor_parallel(network, ParallelPlan(splits=splits), axis)
    try:
        network(torch.ones(3, 8))
    except ValueError as error:
        return str(error)
    return ""


UP: dict[str, Split] = {"up.weight": column(), "up.bias": follows()}


def test_column_where_row_belongs() -> None:
    for told in run_ranks(run, 2, 0, UP | {"down.weight": column()}):
        assert "down.weight is split by column()" in told
        assert "its whole input of 32 features, and gets 16: the part of one of 2" in told
        assert "split this one by row(), or that one by column(gather_output=True)" in told


def test_sizes_that_never_fit() -> None:
    for told in run_ranks(run, 2, 4, UP | {"down.weight": column()}):
        assert "36 features, and gets 16; check the sizes of the layers before it" in told


@pytest.mark.parametrize(
    "splits",
    [
        UP | {"down.weight": row()},
        UP | {"up.weight": column(gather_output=True), "down.weight": column()},
    ],
    ids=["row", "gathered"],
)
def test_rows_that_fit(splits: dict[str, Split]) -> None:
    assert run_ranks(run, 2, 0, splits) == ["", ""]


def test_a_plain_module_in_a_pipeline() -> None:
    """Both things that it lacks are said at once."""
    with pytest.raises(ValueError, match="plan.layers=None.*make Network a .*StagedNetwork"):
        layer_names(Network(), ParallelPlan())
