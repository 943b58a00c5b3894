"""Reported cases on the pipeline, through whole runs: depth kept by every cut, tiny batches."""

from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
from torch import Tensor

from megatron_lightning.config import PipelineConfig
from megatron_lightning.models import GPTModel
from tests import tolerances
from tests.harness import RankError, run_ranks_fresh
from tests.layout_runs import Batches, Recorder, Run, TokenBatches, assemble, boxes, tiny_config
from tests.user_runs import quiet_trainer

# ---------------------------------------------------------------- C11


def built(rank: int, world_size: int, run: Run) -> dict[str, Any]:
    recorder = Recorder(run)
    trainer = quiet_trainer(run, world_size, [recorder])
    trainer.fit(GPTModel(run.config), Batches(run))
    return {"held": boxes(trainer, "value"), "losses": recorder.losses}


@pytest.mark.parametrize(
    ("layers", "layout"),
    [
        pytest.param(30, dict(pipeline_parallel_size=4), marks=pytest.mark.slow),
        (10, dict(pipeline_parallel_size=2, virtual=2, micro_batch_size=2)),
        (5, dict(pipeline_parallel_size=2)),
        (3, dict(pipeline_parallel_size=4)),
        (4, dict(pipeline_parallel_size=2, pipeline=PipelineConfig(layout="Et|tttL"))),
    ],
)
def test_c11_no_cut_loses_a_layer(layers: int, layout: dict[str, Any]) -> None:
    """C11: the stages sum to the asked depth, and give the loss of one process."""
    config = tiny_config(num_layers=layers, hidden_size=32, ffn_hidden_size=64)
    run = Run(config=config, layout=layout, steps=2, keep_gradients=())
    ranks = run_ranks_fresh(built, layout["pipeline_parallel_size"], run)
    [single] = run_ranks_fresh(built, 1, Run(config=config, steps=2, keep_gradients=()))
    whole = assemble([rank["held"] for rank in ranks])
    assert whole.keys() == single["held"].keys()
    count = sum(tensor.numel() for tensor in whole.values())
    assert count == config.num_parameters()
    assert sum(len(rank["held"]) for rank in ranks) == len(whole)  # nothing is held twice
    for step, want in enumerate(single["losses"]):
        tolerances.assert_loss_close(ranks[0]["losses"][step], want, step)


@pytest.mark.parametrize("layout", ["Et|tttL", "EtttL"])
def test_c11_a_layout_is_not_ignored_without_a_pipeline(layout: str) -> None:
    """A stage option at PP=1 must not change the depth, nor be passed over in silence."""
    run = Run(layout=dict(pipeline=PipelineConfig(layout=layout)), steps=1)
    with pytest.raises(RankError, match="pipeline layout"):
        run_ranks_fresh(built, 1, run)


# ---------------------------------------------------------------- C15


class OneSample(Batches):
    """A single validation batch of one sample."""

    def val_dataloader(self) -> Any:
        class Loader(TokenBatches):
            def __iter__(self) -> Iterator[dict[str, Tensor]]:
                for batch in super().__iter__():
                    yield {key: value[:1] for key, value in batch.items()}

        return Loader(self.run, 1, 0, 1)


def sane(rank: int, world_size: int, run: Run) -> dict[str, Any]:
    seen: list[float] = []

    class Values(L.Callback):
        def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
            seen.append(float(trainer.callback_metrics["val_loss"]))

    trainer = quiet_trainer(run, world_size, [Values()])
    trainer.fit(GPTModel(run.config), OneSample(run))
    trainer.validate(trainer.lightning_module, OneSample(run), verbose=False)
    return {"values": seen}


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (2, dict(pipeline_parallel_size=2)),
        pytest.param(4, dict(pipeline_parallel_size=4), marks=pytest.mark.slow),
        (2, dict(pipeline_parallel_size=2, virtual=2)),
    ],
)
def test_c15_fewer_micro_batches_than_stages(size: int, layout: dict[str, Any]) -> None:
    """C15: one validation batch of one micro-batch, with the sanity check."""
    trainer = dict(num_sanity_val_steps=2, val_check_interval=2)
    run = Run(layout=layout, steps=2, trainer=trainer)
    [single] = run_ranks_fresh(sane, 1, Run(steps=2, trainer=trainer))
    assert len(single["values"]) == 3  # sanity check, after training, on its own
    for rank in run_ranks_fresh(sane, size, run, timeout=60):
        assert rank["values"] == pytest.approx(single["values"], rel=1e-5)
