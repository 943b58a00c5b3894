"""Users' own LightningModules through several calls of the Trainer: validation, prediction, and
fits one after the other.
"""

from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from tests.harness import run_ranks_fresh
from tests.layout_runs import Batches, Recorder, Run, global_batch
from tests.user_modules import OwnTransformer, decoder_plan
from tests.user_runs import LAYOUTS, alone, fit_module, quiet_trainer, user_run

# ---------------------------------------------------------------- evaluation and prediction


def evaluate(rank: int, world_size: int, run: Run) -> dict[str, Any]:
    seen: list[Any] = []

    class Outputs(L.Callback):
        def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            seen.append(outputs)

    trainer = quiet_trainer(run, world_size, [Outputs()])
    module, data = OwnTransformer(), Batches(run)
    metrics = trainer.validate(module, data, verbose=False)
    batches = [global_batch(run, i) for i in range(2)]
    predictions = trainer.predict(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return {"metrics": metrics, "outputs": seen, "predictions": predictions}


def test_validation_outputs_and_predictions_under_pipeline() -> None:
    layout = LAYOUTS["pp2"][1] | dict(plan=decoder_plan())
    [single] = run_ranks_fresh(evaluate, 1, user_run(layout=dict(plan=decoder_plan())))
    ranks = run_ranks_fresh(evaluate, 2, user_run(layout=layout))
    for rank in ranks:
        assert rank["metrics"][0] == pytest.approx(single["metrics"][0], rel=1e-5)
        for got, want in zip(rank["predictions"], single["predictions"], strict=True):
            assert torch.equal(got["best"], want["best"])
            assert got["size"] == [2, 2, 2, 2]  # a list grows by micro-batches
    # only the last stage has outputs: one entry for each micro-batch
    assert ranks[0]["outputs"] == [None, None]
    assert [output["val"].shape for output in ranks[1]["outputs"]] == [(4,), (4,)]
    tokens = torch.stack([output["num_tokens"] for output in ranks[1]["outputs"]]).sum()
    assert tokens == sum(output["num_tokens"] for output in single["outputs"])


# ---------------------------------------------------------------- several fits in one process


def fit_again(rank: int, world_size: int, run: Run) -> list[Any]:
    """bf16 as a whole, then the same module in float32 over two chunks, then as a whole again."""
    module = OwnTransformer()
    losses = []
    for layout, precision in (
        ({}, "bf16-mixed"),
        (dict(virtual=2), "32-true"),
        ({}, "32-true"),
    ):
        part = user_run(
            layout=layout | dict(plan=decoder_plan()), trainer=dict(precision=precision)
        )
        recorder = Recorder(part)
        trainer = quiet_trainer(part, world_size, [recorder])
        try:
            trainer.fit(module, Batches(part))
        except ValueError as error:
            return [*losses, str(error)]
        losses.append((recorder.losses, next(module.parameters()).dtype))
    return losses


def test_fit_again_in_another_layout_and_precision() -> None:
    [(first, half), (second, whole), message] = run_ranks_fresh(fit_again, 1, user_run())[0]
    assert (half, whole) == (torch.bfloat16, torch.float32)
    assert len(first) == len(second) == 5
    assert second[0] < first[0]  # the weights were kept, not drawn again
    assert "was cut for" in message  # the chunks are not put together again


def fit_layouts(rank: int, world_size: int) -> list[list[float]]:
    """New modules in three layouts over the same two processes."""
    losses = []
    for layout in ("tp2_sp", "pp2", "dp2"):
        run = user_run(layout=LAYOUTS.get(layout, (2, {}))[1] | dict(plan=decoder_plan()))
        losses.append(fit_module(rank, world_size, OwnTransformer, run)["losses"])
    return losses


@pytest.mark.slow
def test_other_layouts_in_the_same_processes() -> None:
    want = alone(OwnTransformer)["losses"]
    for rank in run_ranks_fresh(fit_layouts, 2):
        for losses in rank:
            assert losses == pytest.approx(want, rel=1e-5)
