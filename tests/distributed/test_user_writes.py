"""What hooks write to weights between steps counts, in every layout as in one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron_lightning.checkpoint import list_tensors, load
from megatron_lightning.config import DataParallelConfig
from megatron_lightning.runtime import user_writes
from tests import layout_runs
from tests.harness import run_ranks_fresh
from tests.layout_runs import (
    Batches,
    Recorder,
    Run,
    assemble,
    assert_same_training,
    tiny_config,
    train,
)
from tests.user_modules import VOCABULARY, OwnTransformer, decoder_plan
from tests.user_runs import quiet_trainer

LIMIT = 2.0**-5
"""Bfloat16 has it, float16 too."""
RUN = Run(
    config=tiny_config(num_layers=2, tie_word_embeddings=True),
    steps=4,
    keep_gradients=(0, 3),
    trainer=dict(precision="bf16-mixed", limit_val_batches=0, num_sanity_val_steps=0),
)
SHARDED = DataParallelConfig(sharding="optimizer")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "dp2_sharded": (2, dict(data_parallel=SHARDED)),
    "tp2": (2, dict(tensor_parallel_size=2, sequence_parallel=True)),
    "pp2_tied": (2, dict(pipeline_parallel_size=2, micro_batch_size=2)),
    "dp2_fsdp": (2, dict(data_parallel=DataParallelConfig(sharding="fsdp"))),
    "dp2_offload": (2, dict(data_parallel=replace(SHARDED, offload_optimizer=True))),
    "tp2_dp2_sharded": (4, dict(tensor_parallel_size=2, data_parallel=SHARDED)),
    "pp2_dp2_sharded": (
        4,
        dict(pipeline_parallel_size=2, micro_batch_size=2, data_parallel=SHARDED),
    ),
}


class Clamps(Recorder):
    """After each batch, as a WGAN's critic is; what was best is loaded again after the third."""

    reads_parameters = True

    def on_train_batch_end(self, trainer: Any, module: Any, *arguments: Any) -> None:
        super().on_train_batch_end(trainer, module, *arguments)
        steps = trainer.global_step
        if steps == 1:
            self.best = {name: value.clone() for name, value in module.state_dict().items()}
        if steps == 3:
            module.load_state_dict(self.best)
        with torch.no_grad():
            for parameter in module.parameters():
                self.clamp(parameter)

    def clamp(self, parameter: torch.nn.Parameter) -> None:
        parameter.clamp_(-LIMIT, LIMIT)


class ClampsData(Clamps):
    """So that no counter tells."""

    def clamp(self, parameter: torch.nn.Parameter) -> None:
        parameter.data.clamp_(-LIMIT, LIMIT)


class ClampsElsewhere(Clamps):
    """Into memory that the parameter gets."""

    def clamp(self, parameter: torch.nn.Parameter) -> None:
        parameter.data = parameter.data.clamp(-LIMIT, LIMIT)


class ClampsBefore(Clamps):
    """Right before each step, and within accumulation windows."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        super().on_before_optimizer_step(trainer, module, optimizer)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.5)


class Swaps(Recorder):
    """Other weights for a validation, as averages are shown, and the own ones again."""

    reads_parameters = True

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.held = {name: value.clone() for name, value in module.state_dict().items()}
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.5)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        module.load_state_dict(self.held)


def fit(rank: int, world_size: int, run: Run, recorder: type[Recorder]) -> dict[str, Any]:
    said: list[str] = []
    with (
        patch.object(layout_runs, "Recorder", recorder),
        patch.object(user_writes, "warn_once", said.append),
    ):
        return {**train(rank, world_size, run), "said": said}


def alone(recorder: type[Recorder], run: Run = RUN) -> dict[str, Any]:
    (single,) = run_ranks_fresh(fit, 1, run, recorder)
    return single


def limited(tensors: dict[str, Tensor]) -> bool:
    """A master that is rounded to the limit may be beyond it."""
    return all(bool((value.bfloat16().abs() <= LIMIT).all()) for value in tensors.values())


def unrounded(masters: dict[str, Tensor]) -> float:
    """The share of values that bfloat16 hasn't."""
    found = torch.cat([value.flatten() for value in masters.values()])
    return float((found != found.bfloat16().float()).float().mean())


@pytest.fixture(scope="module")
def clamped() -> dict[str, Any]:
    return alone(Clamps)


def test_one_process(clamped: dict[str, Any]) -> None:
    """The weights of a float32 run with the same hook, and masters that keep their digits."""
    exact = alone(Clamps, replace(RUN, trainer={**RUN.trainer, "precision": "32-true"}))
    assert not clamped["said"]
    weights, masters = assemble([clamped["final"]]), assemble([clamped["masters"][1]])
    assert limited(weights)
    assert limited(masters)
    assert unrounded(masters) > 0.5
    for name, want in assemble([exact["final"]]).items():
        assert (masters[name] - want).abs().mean() < 2e-4, name
        assert (want.abs() <= LIMIT).all(), name
    for got, want in zip(clamped["losses"], exact["losses"], strict=True):
        assert got == pytest.approx(want, rel=2e-3)


@pytest.mark.parametrize(
    "layout",
    [
        name if name in ("dp2_sharded", "pp2_tied") else pytest.param(name, marks=pytest.mark.slow)
        for name in LAYOUTS
    ],
)
def test_every_layout(layout: str, clamped: dict[str, Any]) -> None:
    size, options = LAYOUTS[layout]
    ranks = run_ranks_fresh(fit, size, replace(RUN, layout=options), Clamps)
    assert_same_training(ranks, clamped, torch.bfloat16)
    assert limited(assemble([rank["masters"][1] for rank in ranks]))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2_sharded", "dp2_fsdp", "dp2_offload", "pp2_tied"])
def test_float32(layout: str) -> None:
    run = replace(RUN, trainer={**RUN.trainer, "precision": "32-true"})
    size, options = LAYOUTS[layout]
    ranks = run_ranks_fresh(fit, size, replace(run, layout=options), Clamps)
    assert_same_training(ranks, alone(Clamps, run))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2_sharded", "tp2_dp2_sharded", "dp2_fsdp"])
def test_in_accumulation_windows(layout: str) -> None:
    run = replace(RUN, trainer={**RUN.trainer, "accumulate_grad_batches": 2})
    size, options = LAYOUTS[layout]
    single = alone(ClampsBefore, run)
    ranks = run_ranks_fresh(fit, size, replace(run, layout=options), ClampsBefore)
    assert_same_training(ranks, single, torch.bfloat16)
    assert limited(assemble([single["masters"][1]]))


@pytest.mark.parametrize("recorder", [ClampsData, ClampsElsewhere])
def test_writes_through_data(recorder: type[Clamps], clamped: dict[str, Any]) -> None:
    """They count from the second step on, before which nothing was lost; other memory is given
    back.
    """
    run = replace(RUN, layout=dict(data_parallel=SHARDED))
    ranks = run_ranks_fresh(fit, 2, run, recorder)
    assert_same_training(ranks, clamped, torch.bfloat16)
    said = [message for message in ranks[0]["said"] if "torch.no_grad()" in message]
    assert len(said) == (recorder is ClampsData)
    assert all(recorder.__name__ in message for message in said)


def test_weights_that_come_back_have_their_masters() -> None:
    trainer = {**RUN.trainer, "limit_val_batches": 1, "val_check_interval": 1}
    run = replace(RUN, trainer=trainer)
    plain, swapped = alone(Recorder, run), alone(Swaps, run)
    for name, want in assemble([plain["masters"][1]]).items():
        assert torch.equal(assemble([swapped["masters"][1]])[name], want), name


class Saves(Clamps):
    """Right after a write."""

    folder = ""

    def on_train_batch_end(self, trainer: Any, module: Any, *arguments: Any) -> None:
        super().on_train_batch_end(trainer, module, *arguments)
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.folder)


def fit_and_save(rank: int, world_size: int, run: Run, folder: str) -> dict[str, Any]:
    with patch.object(Saves, "folder", folder):
        return fit(rank, world_size, run, Saves)


def test_a_checkpoint_between_write_and_step(tmp_path: Path, clamped: dict[str, Any]) -> None:
    run = replace(RUN, layout=dict(data_parallel=SHARDED))
    ranks = run_ranks_fresh(fit_and_save, 2, run, str(tmp_path / "saved"))
    stored = list_tensors(tmp_path / "saved")
    tensors = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in stored.items()}
    load(tmp_path / "saved", tensors)
    masters = {n.removeprefix("master."): v for n, v in tensors.items() if n.startswith("master.")}
    assert masters
    assert limited(masters)
    for name, master in masters.items():
        assert torch.equal(master.bfloat16(), tensors[f"model.{name}"]), name
    assert_same_training(ranks, clamped, torch.bfloat16)


class Critic(OwnTransformer):
    """Two optimizers by hand; what the first one updates is clamped before the second's step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def blocks(self) -> list[torch.nn.Parameter]:
        return [p for name, p in self.named_parameters() if "blocks" in name]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss, _ = self.losses(batch)
        self.manual_backward(loss)
        optimizers: Any = self.optimizers()
        optimizers[0].step()
        with torch.no_grad():
            for parameter in self.blocks():
                parameter.clamp_(-LIMIT, LIMIT)
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        return {"loss": loss.detach()}

    def configure_optimizers(self) -> Any:
        blocks = self.blocks()
        others = [p for p in self.parameters() if all(p is not one for one in blocks)]
        return [torch.optim.AdamW(group, lr=1e-3) for group in (blocks, others)]


def fit_by_hand(rank: int, world_size: int, run: Run) -> dict[str, Tensor]:
    trainer = quiet_trainer(run, world_size, [])
    trainer.fit(Critic(), Batches(run))
    updated: Any = trainer.strategy
    return {name: value.detach().clone() for name, value in updated.update.updated().items()}


@pytest.mark.slow
def test_manual_optimization() -> None:
    masters, exact = (
        run_ranks_fresh(
            fit_by_hand,
            1,
            Run(
                config=tiny_config(vocab_size=VOCABULARY),
                steps=6,
                layout=dict(plan=decoder_plan()),
                trainer=dict(precision=precision, limit_val_batches=0),
            ),
        )[0]
        for precision in ("bf16-mixed", "32-true")
    )
    assert limited({name: value for name, value in masters.items() if "blocks" in name})
    assert any(value.abs().max() > LIMIT for value in masters.values())
    for name, want in exact.items():
        assert (masters[name] - want).abs().mean() < 2e-3, name  # begun rounded
