"""Arguments of the strategy of another type than the config classes are named at construction."""

from typing import Any

import pytest
import torch
from torch import nn

from megatron_lightning import CheckpointConfig, LocalCheckpointConfig, MegatronStrategy
from megatron_lightning.config import ParallelPlan, column, replicated
from megatron_lightning.config.validate import ConfigurationError


@pytest.mark.parametrize(
    ("argument", "value", "wanted"),
    [
        ("data_parallel", "zero1", "DataParallelConfig"),
        ("pipeline", 2, "PipelineConfig"),
        ("runtime", {"launcher": "fork"}, "RuntimeConfig"),
        ("checkpoint", {"asynchronous": True}, "CheckpointConfig"),
    ],
)
def test_config_of_another_type(argument: str, value: Any, wanted: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{argument}=.*give a {wanted}"):
        MegatronStrategy(**{argument: value})


@pytest.mark.parametrize(
    ("local", "said"),
    [
        ({"folder": "/tmp"}, "give a LocalCheckpointConfig"),
        (LocalCheckpointConfig(folder="copies"), "give an absolute path"),
        (LocalCheckpointConfig(folder="/tmp/copies", keep=0), "checkpoint.local.keep=0"),
    ],
)
def test_local_copies(local: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        MegatronStrategy(checkpoint=CheckpointConfig(local=local))


def test_rows_of_a_plan_that_match_nothing() -> None:
    network = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    plan = ParallelPlan(splits={"0.misspelt": column(), "*": replicated()})
    names = [name for name, _ in network.named_parameters()]
    assert torch.is_tensor(network[0].weight)
    assert plan.unused_rows(names) == ["0.misspelt"]
