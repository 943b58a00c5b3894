"""Copies of a tied parameter on two pipeline stages are treated alike, or the run ends with a
message that says how they are not.
"""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_lightning.config import DataParallelConfig
from megatron_lightning.models.gpt import GPTModel
from tests import layout_runs
from tests.harness import RankError, run_ranks_fresh
from tests.layout_runs import Run, tiny_config, train

RUN = Run(
    config=tiny_config(num_layers=2, tie_word_embeddings=True),
    layout=dict(pipeline_parallel_size=2, micro_batch_size=4),
    trainer=dict(limit_val_batches=0, num_sanity_val_steps=0),
    steps=2,
    keep_gradients=(),
)


class Frozen(GPTModel):
    """Freezes by a name that the first stage alone knows."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for name, parameter in self.named_parameters():
            if batch_idx == 1 and name.endswith("word_embeddings.weight"):
                parameter.requires_grad_(False)


class Written(GPTModel):
    """Writes by such a name."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for name, parameter in self.named_parameters():
            if batch_idx == 1 and name.endswith("word_embeddings.weight"):
                torch.nn.init.normal_(parameter)


class Grouped(GPTModel):
    """Gives embeddings a rate of their own, by such a name."""

    def named(self) -> dict[str, torch.nn.Parameter]:
        return dict(self.named_parameters())

    def configure_optimizers(self) -> Any:
        named = self.named()
        words = [p for name, p in named.items() if "word_embeddings" in name]
        others = [p for name, p in named.items() if "word_embeddings" not in name]
        groups = [dict(params=words, lr=0.002), dict(params=others)]
        return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.001)


class GroupedAlike(Grouped):
    """By names that all stages know."""

    def named(self) -> dict[str, torch.nn.Parameter]:
        strategy: Any = self.trainer.strategy
        return dict(strategy.parallel_model.parameters)


def train_with(rank: int, world_size: int, run: Run, model: type[GPTModel]) -> dict[str, Any]:
    with patch.object(layout_runs, "GPTModel", model):
        return train(rank, world_size, run)


@pytest.mark.parametrize(
    ("model", "said"),
    [(Frozen, "requires_grad="), (Written, "written to"), (Grouped, "lr=0.00")],
)
def test_copies_that_are_treated_differently(model: type[GPTModel], said: str) -> None:
    with pytest.raises(RankError) as failure:
        run_ranks_fresh(train_with, 2, RUN, model)
    parts = (
        "treated differently",
        "word_embeddings.weight",
        said,
        "freeze them in configure_model",
    )
    for part in parts:
        assert part in str(failure.value)


def test_groups_by_names_that_all_stages_know() -> None:
    for size, sharding in ((2, "none"), (4, "optimizer")):
        data_parallel = DataParallelConfig(sharding=sharding)  # type: ignore[arg-type]
        run = replace(RUN, layout=RUN.layout | dict(data_parallel=data_parallel))
        ranks = run_ranks_fresh(train_with, size, run, GroupedAlike)
        layout_runs.assemble([rank["final"] for rank in ranks])  # asserts that copies agree
