"""Layers with experts under `compile_layers`: the same training, and nothing is compiled anew when
the numbers of tokens of the experts change.
"""

import dataclasses
from typing import Any

import pytest
import torch

from megatron_lightning.config import MoEConfig, RecomputeConfig, RuntimeConfig
from tests.harness import run_ranks_fresh
from tests.layout_runs import Recorder, Run, assert_same_training, tiny_config, train

MOE = MoEConfig(
    num_experts=4,
    ffn_hidden_size=48,
    shared_expert_ffn_hidden_size=32,
    aux_loss_coeff=0.1,
    layer_pattern="ED",
)


def counted(rank: int, world_size: int, run: Run) -> dict[str, Any]:
    """A run, and how many graphs were compiled by the end of each step."""
    graphs: list[int] = []
    after_batch = Recorder.on_train_batch_end

    def note(self: Recorder, *args: Any) -> None:
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        after_batch(self, *args)

    Recorder.on_train_batch_end = note  # this rank is forked for this run alone
    return train(rank, world_size, run) | {"graphs": graphs}


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [None, "full"])
def test_compiled_layers_with_experts_train_alike(recompute: str | None) -> None:
    layout: dict[str, Any] = {"runtime": RuntimeConfig(compile_layers=True)}
    if recompute is not None:
        layout["recompute"] = RecomputeConfig(mode="full")
    config = tiny_config(moe=MOE, init_method_std=0.1)
    run = Run(config=config, layout=layout, steps=3, keep_gradients=(0, 2))
    alone = dataclasses.replace(run, layout={})
    compiled = run_ranks_fresh(counted, 1, run, timeout=280)
    assert_same_training(compiled, run_ranks_fresh(train, 1, alone)[0])
    graphs = compiled[0]["graphs"]
    assert graphs[0] > 0
    assert graphs[-1] == graphs[0]
