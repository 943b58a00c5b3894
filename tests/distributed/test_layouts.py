"""The same training in every layout: losses, norms, gradients and weights against one process."""

import dataclasses
import functools
from typing import Any

import pytest
import torch

from megatron_lightning.config import RuntimeConfig
from megatron_lightning.models import GPTModel
from tests import tolerances
from tests.harness import run_ranks_fresh
from tests.layout_runs import Run, assert_same_training, global_batch, tiny_config, train

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


@pytest.mark.parametrize("layout", ["tp2_sp", "pp2_interleaved", "dp2", "tp2_sp_pp2_dp2"])
def test_exact_dropout_equals_one_process(layout: str) -> None:
    """Masks by global position: the same training in every layout with dropout on."""
    world_size, options = LAYOUTS[layout]
    runtime = RuntimeConfig(exact_dropout=True)
    run = Run(
        config=tiny_config(hidden_dropout=0.1, attention_dropout=0.1),
        layout=options | {"runtime": runtime},
        attention="reference",
        steps=5,
        keep_gradients=(0, 4),
    )
    alone = dataclasses.replace(run, layout={"runtime": runtime})
    single = run_ranks_fresh(train, 1, alone)[0]
    assert_same_training(run_ranks_fresh(train, world_size, run), single)


@pytest.mark.parametrize("layout", ["dp2", "pp2", "tp2_sp_pp2_dp2"])
def test_accumulation_and_a_short_last_window(layout: str) -> None:
    """10 batches, accumulation 4: three steps, the last a token mean over two batches (C08)."""
    world_size, options = LAYOUTS[layout]
    trainer = dict(
        accumulate_grad_batches=4,
        limit_train_batches=10,
        max_epochs=1,
        max_steps=-1,
        val_check_interval=1.0,
    )
    run = Run(layout=options, trainer=trainer, steps=3, keep_gradients=(0, 1, 2))
    alone = dataclasses.replace(run, layout={})
    single = run_ranks_fresh(train, 1, alone)[0]
    ranks = run_ranks_fresh(train, world_size, run)
    assert len(single["norms"]) == 3
    assert_same_training(ranks, single)


def test_window_gradient_is_the_token_mean() -> None:
    """The accumulated gradient equals that of one batch that holds all samples of the window
    (C08).
    """
    trainer = dict(accumulate_grad_batches=2, val_check_interval=1.0)
    windows = run_ranks_fresh(train, 1, Run(trainer=trainer, steps=1, keep_gradients=(0,)))[0]
    whole = run_ranks_fresh(one_batch_gradient, 1)[0]
    for name, (_, _, _, got) in windows["gradients"][0].items():
        tolerances.assert_gradient_close(name, got, whole["gradients"][name], whole["norm"])
    # the logged value is the window's token mean, not the last batch's (C10)
    assert windows["logged"][-1] == pytest.approx(whole["loss"], rel=1e-5)


def one_batch_gradient(rank: int, world_size: int) -> dict[str, Any]:
    """Loss and gradients of all samples of the first two batches at once, in plain torch."""
    run = Run()
    model = GPTModel(run.config)
    parts = [global_batch(run, 0), global_batch(run, 1)]
    batch = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    losses = model(batch["tokens"], None, batch["labels"])
    loss = (losses * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
    loss.backward()
    gradients = {
        info: parameter.grad[tuple(slice(0, size) for size in model.global_shapes()[info])]
        for info, parameter in model.canonical_parameters().items()
        if parameter.grad is not None
    }
    norm = torch.stack([g.double().norm() for g in gradients.values()]).norm()
    return {"loss": float(loss), "gradients": gradients, "norm": float(norm)}


@pytest.mark.slow
def test_compiled_layers_train_alike() -> None:
    """torch.compile of each layer changes kernels, not the training; with collectives inside."""
    world_size, options = LAYOUTS["tp2_sp"]
    options = options | {"runtime": RuntimeConfig(compile_layers=True)}
    ranks = run_ranks_fresh(train, world_size, Run(layout=options), timeout=280)
    assert_same_training(ranks, single("swiglu_rope"))
