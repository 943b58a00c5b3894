"""Where user code writes to no weight, none is found: else each step would compare all of them with
their masters.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from torch import Tensor

from megatron_lightning import GPTModel
from megatron_lightning.config import QuantizationConfig
from megatron_lightning.precision.changes import WeightWrites
from megatron_lightning.runtime import user_writes
from tests import layout_runs
from tests.distributed.test_user_writes import LAYOUTS, RUN, SHARDED
from tests.harness import run_ranks_fresh
from tests.layout_runs import Batches, Recorder, Run, train
from tests.user_runs import quiet_trainer

EIGHT = QuantizationConfig(
    recipe="fp8_tensorwise", simulate=True, fp8_gather=True, keep_first=0, keep_last=0
)
QUIET: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    **LAYOUTS,
    "dp2_fp8_gather": (2, dict(data_parallel=SHARDED, quantization=EIGHT)),
    "tp2_dp2_fp8_gather": (
        4,
        dict(tensor_parallel_size=2, data_parallel=SHARDED, quantization=EIGHT),
    ),
}
FAST = {("one", Recorder), ("dp2_sharded", Recorder), ("pp2_tied", Recorder)}


class Reads(Recorder):
    """Might write, so that weights are compared too; writes nothing."""

    reads_parameters = True


class ClampsRightBefore(Reads):
    """Writes that a counter tells of."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        super().on_before_optimizer_step(trainer, module, optimizer)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.clamp_(-0.011, 0.011)


def fit(rank: int, world_size: int, run: Run, recorder: type[Recorder]) -> dict[str, Any]:
    """What is found written in a run, and said."""
    found: list[list[str]] = []
    said: list[str] = []
    counted = WeightWrites.names

    def names(self: WeightWrites) -> list[str]:
        found.append(counted(self))
        return found[-1]

    with (
        patch.object(layout_runs, "Recorder", recorder),
        patch.object(WeightWrites, "names", names),  # of `UserWrites` and `TiedCopies`
        patch.object(user_writes, "_looks_in", lambda step: True),
        patch.object(user_writes, "warn_once", said.append),
    ):
        train(rank, world_size, run)
    return {"asked": len(found), "found": [one for one in found if one], "said": said}


@pytest.mark.parametrize(
    ("layout", "recorder"),
    [
        pytest.param(layout, recorder, marks=() if (layout, recorder) in FAST else pytest.mark.slow)
        for layout in QUIET
        for recorder in (Recorder, Reads)
    ],
)
def test_nothing_is_found_where_nothing_was_written(layout: str, recorder: type[Recorder]) -> None:
    size, options = QUIET[layout]
    trainer = {**RUN.trainer, "limit_val_batches": 1, "accumulate_grad_batches": 2}
    run = replace(RUN, layout=options, trainer=trainer)
    for rank in run_ranks_fresh(fit, size, run, recorder):
        assert rank["asked"] >= (0 if "fsdp" in layout else RUN.steps)
        assert not rank["found"]
        assert not rank["said"]


def test_counted_writes_are_no_silent_ones_in_eight_bits() -> None:
    size, options = QUIET["dp2_fp8_gather"]
    for rank in run_ranks_fresh(fit, size, replace(RUN, layout=options), ClampsRightBefore):
        assert not rank["said"]


# ---------------------------------------------------------------- around a fit


def updated(trainer: L.Trainer) -> dict[str, Tensor]:
    strategy: Any = trainer.strategy
    return {name: value.detach().clone() for name, value in strategy.update.updated().items()}


def fit_and_cast(rank: int, world_size: int, run: Run, folder: str) -> dict[str, Any]:
    module, trainer = GPTModel(run.config), quiet_trainer(run, world_size, [])
    trainer.fit(module, Batches(run))
    before = updated(trainer)
    module.float()
    trainer.validate(module, Batches(run), verbose=False)
    module.float()
    trainer.save_checkpoint(folder)
    after = updated(trainer)
    return {
        "equal": all(torch.equal(after[name], value) for name, value in before.items()),
        "unrounded": any(bool((value != value.bfloat16()).any()) for value in before.values()),
        "dtypes": {parameter.dtype for parameter in module.parameters()},
    }


@pytest.mark.parametrize("layout", ["one", "dp2_sharded"])
def test_a_module_that_is_cast_after_a_fit_stays_so(layout: str, tmp_path: Path) -> None:
    size, options = QUIET[layout]
    run = replace(RUN, layout=options)
    for rank in run_ranks_fresh(fit_and_cast, size, run, str(tmp_path / "saved")):
        assert rank == {"equal": True, "unrounded": True, "dtypes": {torch.float32}}


class WritesOne(L.Callback):
    """One element of each weight, right before the first step of a fit."""

    def __init__(self) -> None:
        self.changed: dict[str, int] = {}

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if self.changed:
            return
        before = updated(trainer)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.view(-1)[0] = 0.25
        trainer.strategy.update.take_writes()
        after = updated(trainer)
        self.changed = {name: int((after[name] != value).sum()) for name, value in before.items()}


def fit_twice(rank: int, world_size: int, run: Run, folder: str) -> dict[str, int]:
    first = quiet_trainer(run, world_size, [])
    first.fit(GPTModel(run.config), Batches(run))
    first.save_checkpoint(folder)
    callback = WritesOne()
    again = quiet_trainer(replace(run, steps=run.steps + 1), world_size, [callback])
    again.fit(GPTModel(run.config), Batches(replace(run, steps=run.steps + 1)), ckpt_path=folder)
    return callback.changed


def test_after_a_resume_in_eight_bits_masters_keep_their_digits(tmp_path: Path) -> None:
    size, options = QUIET["dp2_fp8_gather"]
    run = replace(RUN, layout=options, steps=2)
    changed = run_ranks_fresh(fit_twice, size, run, str(tmp_path / "saved"))
    assert all(max(rank.values()) == 1 for rank in changed)
