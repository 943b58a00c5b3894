"""Checkpoints with experts: saved in each of six layouts, loaded in three others, with weights and
both moments bitwise and the next loss as in one process (C34).
"""

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron_lightning.config import DataParallelConfig, MoEConfig
from megatron_lightning.models.gpt import GPTModel
from tests import tolerances
from tests.distributed.test_load_anywhere import go_on, read_whole
from tests.distributed.test_resume import fit
from tests.harness import run_ranks_fresh
from tests.layout_runs import Run, tiny_config

SAVED_AT = 3
CONFIG = tiny_config(
    num_layers=3,
    hidden_size=32,
    ffn_hidden_size=48,
    add_bias_linear=True,
    moe=MoEConfig(
        num_experts=4,
        ffn_hidden_size=24,
        first_dense_layers=1,
        expert_bias=True,
        router_score_function="sigmoid",
    ),
)
ZERO = DataParallelConfig(sharding="optimizer", bucket_size=5_000)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "tp2_sp_ep2": (
        2,
        dict(
            tensor_parallel_size=2,
            sequence_parallel=True,
            expert_parallel_size=2,
            expert_tensor_parallel_size=1,
        ),
    ),
    "tp2_ep2_etp2": (4, dict(tensor_parallel_size=2, expert_parallel_size=2)),
    "pp2_ep2": (4, dict(pipeline_parallel_size=2, expert_parallel_size=2, micro_batch_size=2)),
    "ep2_zero": (4, dict(expert_parallel_size=2, data_parallel=ZERO)),
    "ep2_fsdp": (
        4,
        dict(expert_parallel_size=2, data_parallel=DataParallelConfig(sharding="fsdp")),
    ),
}
FAST = {("tp2_ep2_etp2", "ep2_zero")}
NAMES = list(LAYOUTS)
PAIRS = [(one, NAMES[(i + step) % len(NAMES)]) for i, one in enumerate(NAMES) for step in (1, 2, 3)]
"""Each layout to three others: what is saved doesn't depend on who will load it."""


def run_of(layout: str) -> Run:
    return Run(
        config=CONFIG,
        layout=LAYOUTS[layout][1],
        steps=2 * SAVED_AT,
        keep_gradients=(),
        global_batch_size=4,
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By layout: the checkpoint after three steps, made when it is first asked for."""

    @cache
    def make(layout: str) -> Path:
        folder = tmp_path_factory.mktemp(layout)
        run_ranks_fresh(fit, LAYOUTS[layout][0], run_of(layout), str(folder), SAVED_AT, None)
        return folder / "last.ckpt"

    return make


@pytest.fixture(scope="module")
def next_loss(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Of the fourth step in one process, without interruption."""
    folder = str(tmp_path_factory.mktemp("whole"))
    [whole] = run_ranks_fresh(fit, 1, run_of("single"), folder, SAVED_AT + 1, None)
    return whole["losses"][SAVED_AT]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(one, other, marks=[] if (one, other) in FAST else pytest.mark.slow)
        for one, other in PAIRS
    ],
)
def test_save_here_load_there(source: str, target: str, saved: Any, next_loss: float) -> None:
    checkpoint = saved(source)
    ranks = run_ranks_fresh(go_on, LAYOUTS[target][0], run_of(target), str(checkpoint))
    parameters = sum(map(math.prod, GPTModel(CONFIG).global_shapes().values()))
    for kind in ("model", "optimizer.0.exp_avg", "optimizer.0.exp_avg_sq"):
        assert sum(rank["elements"][kind] for rank in ranks) >= parameters, kind
    moments = read_whole(
        checkpoint,
        ["optimizer.0.exp_avg_sq.network.decoder.layers.1.mlp.experts.linear_fc1.weight"],
    )
    assert all(bool((value > 0).any()) for value in moments.values())
    for rank in ranks:
        tolerances.assert_loss_close(rank["losses"][0], next_loss, SAVED_AT)
