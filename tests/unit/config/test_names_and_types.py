"""Values of another type and names that don't exist are explained where configs are made."""

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from megatron_lightning import GPTModel, MegatronStrategy
from megatron_lightning.config import (
    ContextConfig,
    DataParallelConfig,
    GPTConfig,
    LoraConfig,
    LossScaleConfig,
    MoEConfig,
    PipelineConfig,
    RecomputeConfig,
    RuntimeConfig,
)
from megatron_lightning.config.field_types import type_problems
from megatron_lightning.config.names import ELSEWHERE, known_paths
from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.config.validate import ConfigurationError

SIZES: dict[str, Any] = dict(vocab_size=8, num_layers=2, hidden_size=8, num_attention_heads=2)


def model(config: dict[str, Any] | None = None, *arguments: Any, **named: Any) -> GPTModel:
    return GPTModel(GPTConfig(**SIZES | (config or {})), *arguments, **named)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: model({"num_layers": "4"}), "config.num_layers='4' must be a whole number"),
        (lambda: model({"hidden_dropout": True}), "config.hidden_dropout=True must be a number"),
        (lambda: model({"activation": "swiglu"}), r"config.activation='swiglu'.*\('silu', 'gelu'"),
        (lambda: model({"moe": {}}), r"config.moe={}: give a MoEConfig\(...\) or None, not dict"),
        (lambda: GPTModel(dict(SIZES)), r"config={.*give a GPTConfig\(...\), not dict"),  # type: ignore[arg-type]
        (lambda: model(None, OptimizerConfig(lr="3e-4")), "optimizer.lr='3e-4' must be a number"),  # type: ignore[arg-type]
        (
            lambda: model(None, OptimizerConfig(lr=float("nan"))),
            "optimizer.lr=nan must be a fin",
        ),
        (lambda: model(None, OptimizerConfig(name="lion")), r"optimizer.name='lion': choose one"),  # type: ignore[arg-type]
        (lambda: model(None, 1e-3), r"optimizer=0.001: give an OptimizerConfig\(...\) or None"),
        (
            lambda: model(None, None, SchedulerConfig(lr_warmup_steps="2")),  # type: ignore[arg-type]
            "scheduler.lr_warmup_steps='2' must be a whole number",
        ),
        (
            lambda: model(None, None, SchedulerConfig(lr_decay_style="step")),  # type: ignore[arg-type]
            "scheduler.lr_decay_style='step': choose one of",
        ),
        (lambda: model(lora=LoraConfig(rank=0)), "lora.rank=0"),
        (lambda: model(attention="flash"), "attention='flash': choose one of"),
        (lambda: MegatronStrategy("2"), "tensor_parallel_size='2' must be a whole number"),  # type: ignore[arg-type]
        (lambda: MegatronStrategy(sequence_parallel="yes"), "sequence_parallel='yes' must be True"),  # type: ignore[arg-type]
        (
            lambda: MegatronStrategy(runtime=RuntimeConfig(timeout_seconds="600")),  # type: ignore[arg-type]
            "runtime.timeout_seconds='600' must be a number",
        ),
        (
            lambda: MegatronStrategy(pipeline=PipelineConfig(head_cost="2")),  # type: ignore[arg-type]
            "pipeline.head_cost='2' must be a number",
        ),
        (
            lambda: MegatronStrategy(data_parallel=DataParallelConfig(overlap_grad_reduce="no")),  # type: ignore[arg-type]
            "data_parallel.overlap_grad_reduce='no' must be True or False",
        ),
        (
            lambda: MegatronStrategy(recompute=RecomputeConfig(num_layers="2", mode="full")),  # type: ignore[arg-type]
            "recompute.num_layers='2' must be a whole number",
        ),
        (
            lambda: MegatronStrategy(context=ContextConfig(head_groups="2")),  # type: ignore[arg-type]
            "context.head_groups='2' must be a whole number",
        ),
        (
            lambda: MegatronStrategy(loss_scale=LossScaleConfig(initial="2")),  # type: ignore[arg-type]
            "loss_scale.initial='2' must be a number",
        ),
        (lambda: MegatronStrategy(plan={}), r"plan={}: give a ParallelPlan\(...\) or None"),  # type: ignore[arg-type]
    ],
)
def test_wrong_types_and_values_at_construction(make: Callable[[], Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        make()


def test_a_whole_number_is_a_number() -> None:
    assert model(None, OptimizerConfig(lr=1, weight_decay=0)).optimizer_config.lr == 1
    assert MegatronStrategy(runtime=RuntimeConfig(timeout_seconds=60)).config.runtime.seed is None


@pytest.mark.parametrize(
    ("kind", "name", "told"),
    [
        (MegatronStrategy, "tensor_model_parallel_size", "do you mean tensor_parallel_size?"),
        (MegatronStrategy, "pipeline_model_parallel_size", "do you mean pipeline_parallel_size?"),
        (MegatronStrategy, "expert_model_parallel_size", "do you mean expert_parallel_size?"),
        (
            MegatronStrategy,
            "virtual_pipeline_model_parallel_size",
            "pipeline=PipelineConfig(virtual_pipeline_size=...)?",
        ),
        (MegatronStrategy, "ckpt_async_save", "checkpoint=CheckpointConfig(asynchronous=...)?"),
        (MegatronStrategy, "global_batch_size", "that is the data module's global_batch_size"),
        (MegatronStrategy, "tensor_paralel_size", "do you mean tensor_parallel_size?"),
        (MegatronStrategy, "sharding", "data_parallel=DataParallelConfig(sharding=...)?"),
        (MegatronStrategy, "colour", "it has tensor_parallel_size, pipeline_parallel_size"),
        (GPTModel, "optimiser", "do you mean optimizer?"),
        (GPTConfig, "num_layer", "do you mean num_layers?"),
        (GPTConfig, "num_hidden_layers", "do you mean num_layers?"),
        (GPTConfig, "moe_router_topk", "moe=MoEConfig(router_topk=...)?"),
        (MoEConfig, "num_expert", "do you mean num_experts?"),
        (OptimizerConfig, "learning_rate", "do you mean lr?"),
        (PipelineConfig, "shedule_", "do you mean schedule?"),
    ],
)
def test_unknown_argument_names_the_one_that_is_meant(kind: Any, name: str, told: str) -> None:
    with pytest.raises(TypeError) as error:
        kind(**{name: 2})
    assert str(error.value).startswith(f"{kind.__name__}: {name} is no argument: ")
    assert told in str(error.value)


def test_all_unknown_arguments_at_once() -> None:
    with pytest.raises(TypeError, match="shedule_ is .* head_costs is no argument"):
        PipelineConfig(shedule_="gpipe", head_costs=2)  # type: ignore[call-arg]


def test_names_of_other_programs_stand_for_names_that_there_are() -> None:
    known = {
        path
        for kind in (MegatronStrategy, GPTConfig, OptimizerConfig, SchedulerConfig)
        for path in known_paths(kind)
    }
    assert {own for own in ELSEWHERE.values() if " " not in own} <= known
    for kind in (MegatronStrategy, GPTConfig, OptimizerConfig, SchedulerConfig):
        assert not set(ELSEWHERE) & set(known_paths(kind))


def test_fields_of_changes() -> None:
    config = GPTConfig(**SIZES, moe=MoEConfig(num_experts=2))
    with pytest.raises(ValueError, match="hidden_sise is no field: do you mean hidden_size"):
        config.with_changes(hidden_sise=3)
    message = r"moe.router_top is no field: do you mean moe.router_topk"
    with pytest.raises(ValueError, match=message):
        config.with_changes(**{"moe.router_top": 3})


def test_configs_are_still_plain_objects() -> None:
    config = GPTConfig(**SIZES)
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    assert dataclasses.replace(config, num_layers=3).num_layers == 3


def test_a_subclass_has_its_own_arguments() -> None:
    class Own(MegatronStrategy):
        def __init__(self, colour: str, **others: Any) -> None:
            super().__init__(**others)
            self.colour = colour

    assert Own(colour="red", micro_batch_size=2).config.micro_batch_size == 2
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        Own(colour="red", colours=2)


def test_annotations_that_cannot_be_found_are_left_out() -> None:
    class Unknown(OptimizerConfig):
        other: "Nowhere" = 1  # type: ignore[name-defined]  # noqa: F821

    assert type_problems(Unknown(lr="1")) == ["lr='1' must be a number"]  # type: ignore[arg-type]
