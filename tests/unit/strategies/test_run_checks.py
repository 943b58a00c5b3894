"""Runs over data that nobody gives, before any process is started."""

from typing import Any

import lightning as L
import pytest
from lightning.pytorch.trainer.states import TrainerFn

from megatron_lightning.strategies.run_checks import _loader_problems


class Plain(L.LightningModule):
    """Has no loader."""


class GivesLater(L.LightningModule):
    """Has one once it is set up."""

    def setup(self, stage: str) -> None:
        self.predict_dataloader = list


class Giver(L.Callback):
    """Gives the module one."""

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        module.predict_dataloader = list


@pytest.mark.parametrize(
    ("module", "options", "refused"),
    [
        (Plain, {}, True),
        (GivesLater, {}, False),
        (Plain, dict(callbacks=[Giver()]), False),
        (Plain, dict(limit_predict_batches=0), False),
    ],
)
def test_a_loader_that_may_still_come_is_not_missed(
    module: type[L.LightningModule], options: dict[str, Any], refused: bool
) -> None:
    quiet: dict[str, Any] = dict(logger=False, enable_checkpointing=False, accelerator="cpu")
    trainer = L.Trainer(**quiet, **options)
    trainer.state.fn = TrainerFn.PREDICTING
    problems = _loader_problems(trainer, {"model": module()})
    assert bool(problems) is refused
