"""The same training in every layout: losses, norms, gradients and weights against one process."""

import functools
from typing import Any

import pytest

from tests.harness import run_ranks_fresh
from tests.layout_runs import Run, assert_same_training, tiny_config, train

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, dict(tensor_parallel_size=2)),
    "tp2_sp": (2, dict(tensor_parallel_size=2, sequence_parallel=True)),
    "pp2": (2, dict(pipeline_parallel_size=2, micro_batch_size=2)),
    "pp4": (4, dict(pipeline_parallel_size=4, micro_batch_size=1)),
    "pp2_interleaved": (2, dict(pipeline_parallel_size=2, virtual=2, micro_batch_size=2)),
    "dp2": (2, dict()),
    "tp2_sp_pp2_dp2": (
        8,
        dict(
            tensor_parallel_size=2,
            pipeline_parallel_size=2,
            sequence_parallel=True,
            micro_batch_size=1,
        ),
    ),
}
MODELS: dict[str, dict[str, Any]] = {
    "swiglu_rope": {},
    "gelu_learned_tied_biases_qknorm": dict(
        norm="layernorm",
        activation="gelu",
        gated_linear_unit=False,
        add_bias_linear=True,
        position_embedding="learned",
        max_position_embeddings=32,
        qk_layernorm=True,
        tie_word_embeddings=True,
    ),
}


@functools.cache
def single(model: str, normalization: str = "token") -> dict[str, Any]:
    run = Run(config=tiny_config(**MODELS[model]), normalization=normalization)
    return run_ranks_fresh(train, 1, run)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_training_equals_one_process(model: str, layout: str) -> None:
    world_size, options = LAYOUTS[layout]
    run = Run(config=tiny_config(**MODELS[model]), layout=options)
    assert_same_training(run_ranks_fresh(train, world_size, run), single(model))
