"""Zero-bubble training in every layout: losses, norms, gradients, weights against one process."""

import dataclasses
import functools
from typing import Any

import lightning as L
import pytest
import torch

from megatron_lightning.config import (
    DataParallelConfig,
    PipelineConfig,
    RecomputeConfig,
    RuntimeConfig,
)
from tests import layout_runs
from tests.harness import run_ranks_fresh
from tests.layout_runs import Recorder, Run, assert_same_training, tiny_config, train

ZB_H1 = PipelineConfig(schedule="zb-h1")
ZB_V = PipelineConfig(schedule="zb-v", virtual_pipeline_size=2)
HEAD_AT_ONCE = dataclasses.replace(ZB_V, defer_head_gradient=False)
EIGHT = dict(
    tensor_parallel_size=2, pipeline_parallel_size=2, sequence_parallel=True, micro_batch_size=1
)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "h1_pp2": (2, dict(pipeline_parallel_size=2, micro_batch_size=2, pipeline=ZB_H1)),
    "h1_pp4": (4, dict(pipeline_parallel_size=4, micro_batch_size=1, pipeline=ZB_H1)),
    "v_pp2": (2, dict(pipeline_parallel_size=2, micro_batch_size=2, pipeline=ZB_V)),
    "v_pp4": (4, dict(pipeline_parallel_size=4, micro_batch_size=1, pipeline=ZB_V)),
    "h1_tp2_sp_pp2_dp2": (8, EIGHT | dict(pipeline=ZB_H1)),
    "v_tp2_sp_pp2_dp2": (8, EIGHT | dict(pipeline=ZB_V)),
}
# 6 layers: with embedding and head, 8 units for the 8 stages of a V over 4 ranks.
MODELS: dict[str, dict[str, Any]] = {
    "swiglu_rope": dict(num_layers=6),
    "gelu_learned_tied_biases_qknorm": dict(
        num_layers=6,
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
SLOW = {
    ("gelu_learned_tied_biases_qknorm", "v_pp2"),
    ("swiglu_rope", "v_pp2"),
    ("swiglu_rope", "h1_pp4"),
    ("swiglu_rope", "v_pp4"),
    ("swiglu_rope", "h1_tp2_sp_pp2_dp2"),
    ("gelu_learned_tied_biases_qknorm", "h1_pp2"),
    ("gelu_learned_tied_biases_qknorm", "h1_tp2_sp_pp2_dp2"),
    ("gelu_learned_tied_biases_qknorm", "h1_pp4"),
    ("swiglu_rope", "v_tp2_sp_pp2_dp2"),
}
CASES = [
    pytest.param(model, layout, marks=[pytest.mark.slow] if (model, layout) in SLOW else [])
    for model in MODELS
    for layout in LAYOUTS
]


def run_of(model: str, layout: dict[str, Any]) -> Run:
    return Run(config=tiny_config(**MODELS[model]), layout=layout, steps=5, keep_gradients=(0, 4))


@functools.cache
def single(model: str) -> dict[str, Any]:
    return run_ranks_fresh(train, 1, run_of(model, {}))[0]


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_training_equals_one_process(model: str, layout: str) -> None:
    world_size, options = LAYOUTS[layout]
    ranks = run_ranks_fresh(train, world_size, run_of(model, options))
    assert_same_training(ranks, single(model))


@pytest.mark.parametrize("layout", ["v_pp2", pytest.param("h1_pp4", marks=pytest.mark.slow)])
def test_exact_dropout_equals_one_process(layout: str) -> None:
    world_size, options = LAYOUTS[layout]
    runtime = RuntimeConfig(exact_dropout=True)
    run = Run(
        config=tiny_config(hidden_dropout=0.1, attention_dropout=0.1),
        layout=options | {"runtime": runtime},
        attention="reference",
        steps=3,
        keep_gradients=(0, 2),
    )
    alone = dataclasses.replace(run, layout={"runtime": runtime})
    assert_same_training(
        run_ranks_fresh(train, world_size, run), run_ranks_fresh(train, 1, alone)[0]
    )


def train_with(rank: int, world_size: int, run: Run, recorder: type[Recorder]) -> dict[str, Any]:
    """`train`, watched by another recorder; in ranks of its own, hence without a way back."""
    layout_runs.Recorder = recorder
    return train(rank, world_size, run)


class Overlap(Recorder):
    """Whether every bucket was on its way before the window was finished."""

    def on_before_backward(self, trainer: L.Trainer, module: Any, loss: Any) -> None:
        buckets = trainer.strategy.parallel_model.buckets
        expected = len(buckets.bucket_names) if trainer.strategy._reduce_now else 0
        assert buckets.num_launched == expected
        assert expected == 0 or expected > 4


@pytest.mark.parametrize(
    "schedule", [ZB_V, HEAD_AT_ONCE, pytest.param(ZB_H1, marks=pytest.mark.slow)]
)
def test_buckets_are_reduced_as_weight_gradients_come(schedule: PipelineConfig) -> None:
    """With small buckets, a tied pair (within one rank in the V), and several batches a window."""
    layout = dict(
        pipeline_parallel_size=2,
        micro_batch_size=1,
        pipeline=schedule,
        data_parallel=DataParallelConfig(bucket_size=5000),
    )
    run = Run(
        config=tiny_config(**MODELS["gelu_learned_tied_biases_qknorm"]),
        layout=layout,
        trainer=dict(accumulate_grad_batches=2, val_check_interval=1.0),
        steps=2,
        keep_gradients=(0, 1),
    )
    alone = run_ranks_fresh(train, 1, dataclasses.replace(run, layout={}))[0]
    assert_same_training(run_ranks_fresh(train_with, 4, run, Overlap), alone)


class Freezing(Recorder):
    """Freezes some linears, a norm and the embedding before the second step."""

    frozen = ("linear_qkv.weight", "0.mlp.linear_fc2.weight", "1.input_layernorm", "embedding")

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, index: int) -> None:
        for name, parameter in trainer.strategy.parallel_model.parameters.items():
            frozen = index > 0 and any(part in name for part in self.frozen)
            parameter.requires_grad_(not frozen)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["v_pp2", "h1_pp2"])
def test_frozen_weights(layout: str) -> None:
    world_size, options = LAYOUTS[layout]
    run = dataclasses.replace(run_of("swiglu_rope", options), steps=3, keep_gradients=(0, 1, 2))
    alone = dataclasses.replace(run, layout={})
    single = run_ranks_fresh(train_with, 1, alone, Freezing)[0]
    assert len(single["gradients"][1]) < len(single["gradients"][0])
    assert_same_training(run_ranks_fresh(train_with, world_size, run, Freezing), single)


@pytest.mark.slow
def test_bfloat16() -> None:
    world_size, options = LAYOUTS["v_pp2"]
    run = dataclasses.replace(
        run_of("swiglu_rope", options), trainer=dict(precision="bf16-mixed"), steps=3
    )
    run = dataclasses.replace(run, keep_gradients=(0, 2))
    alone = run_ranks_fresh(train, 1, dataclasses.replace(run, layout={}))[0]
    assert_same_training(run_ranks_fresh(train, world_size, run), alone, torch.bfloat16)


class Compiling(Recorder):
    """Compiles the layers; `aot_eager` differentiates as inductor does, without its kernels."""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        super().on_train_start(trainer, module)
        for network in trainer.strategy.parallel_model.networks:
            for layer in network.decoder.layers.children():
                layer.compile(backend="aot_eager")


@pytest.mark.slow
def test_compiled_layers_give_the_eager_training() -> None:
    world_size, options = LAYOUTS["v_pp2"]
    run = Run(config=tiny_config(num_layers=2), layout=options, steps=2, keep_gradients=(0, 1))
    alone = run_ranks_fresh(train, 1, dataclasses.replace(run, layout={}))[0]
    assert_same_training(run_ranks_fresh(train_with, world_size, run, Compiling), alone)


COMBINED: dict[str, tuple[int, dict[str, Any]]] = {
    "recompute": (2, dict(recompute=RecomputeConfig(mode="full"))),
    "context": (4, dict(context_parallel_size=2)),
    "sharded_optimizer": (4, dict(data_parallel=DataParallelConfig(sharding="optimizer"))),
}


@pytest.mark.slow
@pytest.mark.parametrize("other", COMBINED)
def test_with_other_ways_to_save_memory(other: str) -> None:
    world_size, options = COMBINED[other]
    layout = dict(pipeline_parallel_size=2, micro_batch_size=1, pipeline=ZB_V) | options
    run = run_of("gelu_learned_tied_biases_qknorm", layout)
    ranks = run_ranks_fresh(train, world_size, run)
    assert_same_training(ranks, single("gelu_learned_tied_biases_qknorm"))


def predict(rank: int, world_size: int, layout: dict[str, Any]) -> Any:
    """Predictions of a run's model in this layout, as every rank sees them."""
    run = run_of("swiglu_rope", layout)

    class Predicting(layout_runs.GPTModel):
        def predict_step(self, batch: Any, index: int) -> Any:
            return {"logits": self(batch["tokens"])}

    class Data(layout_runs.Batches):
        def predict_dataloader(self) -> Any:
            return self._loader(2)

    trainer = L.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=layout_runs.make_strategy(layout),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    return trainer.predict(Predicting(run.config), Data(run))


def test_predictions_come_from_the_rank_of_the_last_stage() -> None:
    world_size, options = LAYOUTS["v_pp2"]
    (want,) = run_ranks_fresh(predict, 1, {})
    for got in run_ranks_fresh(predict, world_size, options):
        assert len(got) == len(want) == 2
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one["logits"], other["logits"], rtol=1e-4, atol=1e-5)
