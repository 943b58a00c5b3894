"""Resume: bitwise in the same layout, within tolerance in another, optimizer and all."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.models.gpt import GPTModel
from tests import tolerances
from tests.harness import run_ranks_fresh
from tests.layout_runs import Batches, Recorder, Run, assemble, boxes, make_strategy, tiny_config

STEPS, SAVED_AT = 6, 3


def fit(
    rank: int,
    world_size: int,
    run: Run,
    folder: str,
    stop: int,
    resume: str | None,
    frozen: str = "",
) -> dict[str, Any]:
    """Train up to step `stop`, from `resume` if given; save every `SAVED_AT` steps under
    `folder`.
    """
    model = GPTModel(
        run.config,
        OptimizerConfig(lr=run.learning_rate),
        SchedulerConfig(lr_warmup_steps=2, lr_decay_steps=STEPS),
    )
    if frozen:
        model.configure_model()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen not in name)
    recorder = Recorder(run)
    saver = ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=SAVED_AT, save_top_k=-1, save_last=True
    )
    trainer = L.Trainer(
        strategy=make_strategy(run.layout),
        devices=world_size,
        max_steps=stop,
        gradient_clip_val=1.0,
        logger=False,
        callbacks=[recorder, saver],
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        **{"accelerator": "cpu", **run.trainer},
    )
    trainer.fit(model, Batches(run), ckpt_path=resume)
    optimizer = trainer.optimizers[0]
    names = {id(p): name for name, p in trainer.strategy.update.updated().items()}
    moments = {
        names[id(p)]: {key: torch.as_tensor(value).clone() for key, value in state.items()}
        for p, state in optimizer.state.items()
    }
    return {
        "losses": recorder.losses,
        "rates": recorder.rates,
        "final": boxes(trainer, "value"),
        "moments": moments,
        "global_step": trainer.global_step,
    }


def run_of(**changes: Any) -> Run:
    return Run(steps=STEPS, **changes)


def test_same_layout_continues_bitwise(tmp_path: Path) -> None:
    run = run_of(
        config=tiny_config(hidden_dropout=0.1, attention_dropout=0.1),
        layout=dict(tensor_parallel_size=2),
        learning_rate=1e-4,
        trainer=dict(precision="bf16-mixed"),
    )
    whole = run_ranks_fresh(fit, 2, run, str(tmp_path / "whole"), STEPS, None)
    run_ranks_fresh(fit, 2, run, str(tmp_path / "half"), SAVED_AT, None)
    rest = run_ranks_fresh(
        fit, 2, run, str(tmp_path / "half"), STEPS, str(tmp_path / "half" / "last.ckpt")
    )
    for one, other in zip(whole, rest, strict=True):
        assert other["global_step"] == STEPS
        assert other["losses"] == one["losses"][SAVED_AT:]
        assert other["rates"] == one["rates"][SAVED_AT:]
        for name, (_, _, _, value) in one["final"].items():
            assert torch.equal(other["final"][name][3], value), name
        for name, state in one["moments"].items():
            for key, value in state.items():
                assert torch.equal(other["moments"][name][key], value), (name, key)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "tp2_sp": (2, dict(tensor_parallel_size=2, sequence_parallel=True)),
    "pp2_interleaved": (2, dict(pipeline_parallel_size=2, virtual=2, micro_batch_size=2)),
    "dp2": (2, {}),
    "tp2_pp2": (4, dict(tensor_parallel_size=2, pipeline_parallel_size=2, micro_batch_size=2)),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of TP=2 x PP=2 with tied embeddings, and the uninterrupted run."""
    folder = tmp_path_factory.mktemp("saved")
    run = run_of(config=tiny_config(tie_word_embeddings=True), layout=LAYOUTS["tp2_pp2"][1])
    ranks = run_ranks_fresh(fit, 4, run, str(folder), STEPS, None)
    return folder / f"step={SAVED_AT}.ckpt", ranks[0] | {
        "final": assemble([r["final"] for r in ranks])
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_layout_continues(
    layout: str, saved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    checkpoint, whole = saved
    world_size, options = LAYOUTS[layout]
    run = run_of(config=tiny_config(tie_word_embeddings=True), layout=options)
    ranks = run_ranks_fresh(fit, world_size, run, str(tmp_path), STEPS, str(checkpoint))
    assert ranks[0]["rates"] == whole["rates"][SAVED_AT:]
    for step, (got, want) in enumerate(
        zip(ranks[0]["losses"], whole["losses"][SAVED_AT:], strict=True)
    ):
        tolerances.assert_loss_close(got, want, step)


def test_frozen_parameters_and_missing_state(tmp_path: Path) -> None:
    """Saved with a frozen embedding, loaded with it trainable: its state begins afresh, nothing
    else does.
    """
    run = run_of(config=tiny_config(tie_word_embeddings=False))
    run_ranks_fresh(fit, 1, run, str(tmp_path), SAVED_AT, None, "embedding")
    [rest] = run_ranks_fresh(fit, 1, run, str(tmp_path / "b"), STEPS, str(tmp_path / "last.ckpt"))
    assert rest["global_step"] == STEPS
    steps = {name: float(state["step"]) for name, state in rest["moments"].items()}
    embedding = steps.pop("network.embedding.word_embeddings.weight")
    assert embedding == STEPS - SAVED_AT
    assert set(steps.values()) == {float(STEPS)}
