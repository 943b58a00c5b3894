"""Several validation sets: names in the logs, each example once over uneven ranks; growing batches
are refused where they don't divide.
"""

from typing import Any

import lightning as L
import pytest

from megatron_lightning.data import PretrainingDataModule
from megatron_lightning.models.gpt import GPTModel
from megatron_lightning.strategies.module_checks import module_problems
from tests.data_runs import SEQUENCE, write_corpus
from tests.harness import run_ranks_fresh
from tests.layout_runs import make_strategy, tiny_config


def validate(rank: int, world_size: int, layout: dict[str, Any], data: dict[str, Any]) -> Any:
    trainer = L.Trainer(
        strategy=make_strategy(layout),
        accelerator="cpu",
        devices=world_size,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.validate(
        GPTModel(tiny_config(num_layers=2, hidden_size=32)),
        datamodule=PretrainingDataModule(**data),
        verbose=False,
    )
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("corpora")
    return write_corpus(folder / "a", 11, 1), write_corpus(folder / "b", 7, 2)


def sizes(micro: int, batch: int) -> dict[str, Any]:
    return dict(seq_length=SEQUENCE, micro_batch_size=micro, global_batch_size=batch)


def test_named_sets_over_uneven_ranks(corpora: tuple[str, str]) -> None:
    a, b = corpora
    data = {"paths": a, "valid_paths": {"wiki": a, "code": {a: 0.5, b: 0.5}}, "tokenizer": "bytes"}
    whole = run_ranks_fresh(validate, 1, {}, {**data, **sizes(1, 1)})[0]
    assert sorted(whole) == ["val_loss/code", "val_loss/wiki"]
    for world_size, layout, micro, batch in (
        (2, {}, 2, 4),
        (3, {}, 1, 9),
        (2, {"pipeline_parallel_size": 2}, 1, 4),
    ):
        ranks = run_ranks_fresh(validate, world_size, layout, {**data, **sizes(micro, batch)})
        assert all(rank == ranks[0] for rank in ranks)
        assert ranks[0] == pytest.approx(whole, rel=1e-6)


def test_unnamed_sets(corpora: tuple[str, str]) -> None:
    data = dict(paths=[*corpora], split="1,1", multiple_validation_sets=True, tokenizer="bytes")
    found = run_ranks_fresh(validate, 1, {}, {**data, **sizes(1, 2)})[0]
    assert sorted(found) == ["val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"]


def test_a_ramp_that_does_not_divide_is_refused(corpora: tuple[str, str]) -> None:
    data = PretrainingDataModule(
        corpora[0], SEQUENCE, 1, 16, rampup_batch_size=[4, 6, 40], tokenizer="bytes"
    )
    problems = module_problems(make_strategy({}), GPTModel(tiny_config()), data, 8)
    assert [problem.split(":")[:2] for problem in problems] == [
        ["rampup_batch_size", " global_batch_size=4"],
        ["rampup_batch_size", " global_batch_size=10"],
    ]
