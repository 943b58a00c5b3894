"""What balances experts besides the weights is resumed: the bias that chooses, and the shares of
the last window. Bitwise in the same layout, within tolerance in another.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lightning.config import MoEConfig
from tests import tolerances
from tests.distributed.test_resume import SAVED_AT, STEPS, fit
from tests.harness import run_ranks_fresh
from tests.layout_runs import Run, tiny_config
from tests.router_margins import assert_margins, smallest_margins

MODELS: dict[str, MoEConfig] = {
    "bias": MoEConfig(
        num_experts=4,
        ffn_hidden_size=48,
        router_score_function="sigmoid",
        load_balancing="none",
        expert_bias=True,
        expert_bias_update_rate=0.05,
        layer_pattern="DE",
    ),
    "global_loss": MoEConfig(
        num_experts=4, ffn_hidden_size=48, load_balancing="global_aux_loss", aux_loss_coeff=1.0
    ),
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, dict(pipeline_parallel_size=2, micro_batch_size=2)),
    "single": (1, dict(micro_batch_size=2)),
    "ep2": (2, dict(expert_parallel_size=2, micro_batch_size=2)),
}


def watched(
    rank: int, world_size: int, run: Run, folder: str, stop: int, resume: str | None
) -> dict[str, Any]:
    with smallest_margins() as margins:
        return fit(rank, world_size, run, folder, stop, resume) | {"margins": margins}


def run_of(model: str, layout: str) -> tuple[int, Run]:
    world_size, options = LAYOUTS[layout]
    config = tiny_config(moe=MODELS[model], init_method_std=0.1)
    return world_size, Run(steps=STEPS, config=config, layout=options)


@pytest.fixture(scope="module", params=MODELS)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, list[dict[str, Any]]]:
    """A run in two stages without interruption, and its checkpoint half-way."""
    folder = tmp_path_factory.mktemp("saved")
    world_size, run = run_of(request.param, "pp2")
    ranks = run_ranks_fresh(watched, world_size, run, str(folder), STEPS, None)
    assert_margins([margin for rank in ranks for margin in rank["margins"]])
    return request.param, folder / f"step={SAVED_AT}.ckpt", ranks


@pytest.mark.parametrize(
    "layout", ["pp2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("single", "ep2"))]
)
def test_training_continues(
    layout: str, saved: tuple[str, Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    model, checkpoint, whole = saved
    world_size, run = run_of(model, layout)
    ranks = run_ranks_fresh(fit, world_size, run, str(tmp_path), STEPS, str(checkpoint))
    want = whole[0]["losses"][SAVED_AT:]
    if layout != "pp2":
        for step, (got, expected) in enumerate(zip(ranks[0]["losses"], want, strict=True)):
            tolerances.assert_loss_close(got, expected, step)
        return
    assert ranks[0]["losses"] == want
    for rank, before in zip(ranks, whole, strict=True):
        for name, (_, _, _, value) in before["final"].items():
            assert torch.equal(rank["final"][name][3], value), name
