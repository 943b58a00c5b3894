"""The network of docs/own_modules.md, as it stands there, against one process."""

import functools
import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from tests.harness import run_ranks_fresh
from tests.layout_runs import Run, assert_same_training
from tests.user_runs import fit_module, user_run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "own_modules.md"


@functools.cache
def page() -> dict[str, Any]:
    """What the page's code defines; the call of a Trainer, which names your data, is left out."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks:
        if "L.Trainer(" not in block:
            exec(block, names)
    return names


def written(cores: bool) -> L.LightningModule:
    """The page's module with equal weights on every call, its attention with a core or without."""
    names = page()
    torch.manual_seed(3)
    model = names["Model"]()
    if cores:
        blocks = model.net.blocks
        for index, block in enumerate(blocks):
            made = names["ContextBlock"](32, 4)
            made.load_state_dict(block.state_dict())
            blocks[index] = made
    return model


def run_of(**layout: Any) -> Run:
    return user_run(layout=dict(plan=page()["PLAN"], **layout))


@functools.cache
def alone() -> dict[str, Any]:
    """Training of the page's network in one process, without a core."""
    return run_ranks_fresh(fit_module, 1, functools.partial(written, False), run_of())[0]


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (2, dict(context_parallel_size=2)),
        pytest.param(
            4,
            dict(context_parallel_size=2, tensor_parallel_size=2, sequence_parallel=True),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            4,
            dict(context_parallel_size=2, pipeline_parallel_size=2, micro_batch_size=2),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["cp2", "tp2_sp_cp2", "pp2_cp2"],
)
def test_context_parallel_by_a_core_and_positions_of_the_batch(
    size: int, layout: dict[str, Any]
) -> None:
    """A rank holds a part of the sequence: positions counted by the network would be its own."""
    ranks = run_ranks_fresh(fit_module, size, functools.partial(written, True), run_of(**layout))
    assert_same_training(ranks, alone())


@pytest.mark.slow
def test_the_network_with_all_three() -> None:
    layout = dict(
        tensor_parallel_size=2, pipeline_parallel_size=2, sequence_parallel=True, micro_batch_size=2
    )
    ranks = run_ranks_fresh(fit_module, 4, functools.partial(written, False), run_of(**layout))
    assert_same_training(ranks, alone())
