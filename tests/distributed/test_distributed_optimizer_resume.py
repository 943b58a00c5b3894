"""Sharded optimizer state in checkpoints: bitwise on in the same layout, and through any other."""

import functools
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

import megatron_lightning.checkpoint as store
from megatron_lightning.config import DataParallelConfig
from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.models.gpt import GPTModel
from tests.distributed.test_resume import fit
from tests.harness import run_ranks_fresh
from tests.layout_runs import Batches, Run, make_strategy, tiny_config

STEPS, SAVED_AT = 6, 3
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def fully(**changes: Any) -> DataParallelConfig:
    return DataParallelConfig(sharding="fsdp", **changes)


def sharded(**changes: Any) -> DataParallelConfig:
    return DataParallelConfig(sharding="optimizer", bucket_size=20_000, **changes)


@pytest.mark.parametrize(
    "data_parallel",
    [
        pytest.param(sharded(), id="optimizer"),
        pytest.param(sharded(moments_dtype="bfloat16"), id="moments", marks=pytest.mark.slow),
        pytest.param(fully(), id="fsdp", marks=pytest.mark.slow),
    ],
)
def test_same_layout_continues_bitwise(data_parallel: DataParallelConfig, tmp_path: Path) -> None:
    """Bfloat16 weights, sharded masters, warm-up, dropout: 6 steps, or 3, a new process, 3
    (C30).
    """
    run = Run(
        config=tiny_config(hidden_dropout=0.1, attention_dropout=0.1),
        layout=dict(tensor_parallel_size=2, data_parallel=data_parallel),
        learning_rate=1e-4,
        trainer=dict(precision="bf16-mixed"),
        steps=STEPS,
    )
    whole = run_ranks_fresh(fit, 4, run, str(tmp_path / "whole"), STEPS, None)
    run_ranks_fresh(fit, 4, run, str(tmp_path / "half"), SAVED_AT, None)
    last = str(tmp_path / "half" / "last.ckpt")
    rest = run_ranks_fresh(fit, 4, run, str(tmp_path / "half"), STEPS, last)
    for one, other in zip(whole, rest, strict=True):
        assert other["losses"] == one["losses"][SAVED_AT:]
        assert other["rates"] == one["rates"][SAVED_AT:]
        assert_equal(other["final"], one["final"])
        assert one["moments"]
        for name, state in one["moments"].items():
            assert state["exp_avg"].dtype is getattr(torch, data_parallel.moments_dtype)
            for key, value in state.items():
                assert torch.equal(other["moments"][name][key], value), (name, key)


def assert_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Bitwise, of boxes."""
    assert found.keys() == wanted.keys()
    for name, held in wanted.items():
        pairs = zip(*(h if isinstance(h, list) else [h] for h in (found[name], held)), strict=True)
        for one, other in pairs:
            assert one[:3] == other[:3], name
            assert torch.equal(one[3], other[3]), name


def pass_through(rank: int, world_size: int, run: Run, resume: str, folder: str) -> None:
    """Load a checkpoint, do no step, save another."""
    model = GPTModel(
        run.config,
        OptimizerConfig(lr=run.learning_rate),
        SchedulerConfig(lr_warmup_steps=2, lr_decay_steps=STEPS),
    )
    trainer = L.Trainer(
        strategy=make_strategy(run.layout),
        accelerator="cpu",
        devices=world_size,
        max_steps=SAVED_AT,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        **run.trainer,
    )
    trainer.fit(model, Batches(run), ckpt_path=resume)
    trainer.save_checkpoint(folder)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {
        name: torch.full(
            info.shape, torch.nan if info.dtype.is_floating_point else 0, dtype=info.dtype
        )
        for name, info in store.list_tensors(folder).items()
    }
    store.load(folder, tensors)
    return tensors


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "dp4": (4, dict(data_parallel=sharded())),
    "dp4_partial": (4, dict(data_parallel=sharded(replicas=2))),
    "dp3_offload": (3, dict(data_parallel=sharded(offload_optimizer=True))),
    "tp2_dp2": (4, dict(tensor_parallel_size=2, data_parallel=sharded())),
    "dp4_full": (4, dict(data_parallel=fully())),
    "tp2_dp2_full": (4, dict(tensor_parallel_size=2, data_parallel=fully())),
    "dp4_hybrid": (4, dict(data_parallel=fully(replicas=2))),
    "tp2": (2, dict(tensor_parallel_size=2)),
    "pp2_dp2": (
        4,
        dict(pipeline_parallel_size=2, micro_batch_size=2, data_parallel=sharded()),
    ),
}


@pytest.mark.parametrize(
    ("precision", "route"),
    [
        ("bf16-mixed", ("tp2_dp2", "dp4_full", "single", "pp2_dp2")),
        slow("bf16-mixed", ("tp2_dp2_full", "dp4_partial", "dp4_hybrid")),
        slow("32-true", ("tp2", "dp3_offload", "dp4", "dp4_full", "single")),
    ],
)
def test_state_passes_through_layouts_bitwise(
    precision: str, route: tuple[str, ...], tmp_path: Path
) -> None:
    """Save in one layout, load and save again in others: not a bit of weights, masters and moments
    changes.
    """
    config = tiny_config(tie_word_embeddings=True)
    options = dict(config=config, trainer=dict(precision=precision), steps=STEPS)
    options["global_batch_size"] = 12
    world_size, layout = LAYOUTS[route[0]]
    first = Run(layout=layout, **options)
    run_ranks_fresh(fit, world_size, first, str(tmp_path), SAVED_AT, None)
    checkpoint = tmp_path / "last.ckpt"
    wanted = stored(checkpoint)
    names = {name.partition(".")[0] for name in wanted}
    assert names == {"model", "optimizer"} | ({"master"} if precision == "bf16-mixed" else set())
    for stop in route[1:]:
        world_size, layout = LAYOUTS[stop]
        after = tmp_path / f"{stop}.ckpt"
        run = Run(layout=layout, **options)
        run_ranks_fresh(pass_through, world_size, run, str(checkpoint), str(after))
        found = stored(after)
        assert found.keys() == wanted.keys(), stop
        for name, value in wanted.items():
            assert torch.equal(found[name], value), (stop, name)
        checkpoint = after


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "dp4_full"])
def test_masters_begin_as_exactly_as_the_weights_were_stored(layout: str, tmp_path: Path) -> None:
    """A float32 run goes on in bfloat16: masters are its weights, not their rounding."""
    options: dict[str, Any] = dict(steps=STEPS, global_batch_size=12)
    run_ranks_fresh(fit, 1, Run(**options), str(tmp_path), SAVED_AT, None)
    wanted = stored(tmp_path / "last.ckpt")
    world_size, changes = LAYOUTS[layout]
    run = Run(layout=changes, trainer=dict(precision="bf16-mixed"), **options)
    after = tmp_path / "after.ckpt"
    run_ranks_fresh(pass_through, world_size, run, str(tmp_path / "last.ckpt"), str(after))
    found = stored(after)
    for name, value in wanted.items():
        if name.startswith("model."):
            assert torch.equal(found[name.replace("model.", "master.", 1)], value), name
            assert torch.equal(found[name], value.bfloat16()), name
