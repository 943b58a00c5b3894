"""Checks of what a model is constructed with, before anything is built from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from megatron_lightning.config.field_types import type_problems, wrong_kind
from megatron_lightning.config.lora import LoraConfig
from megatron_lightning.config.model import GPTConfig
from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig


def config_problems(config: Any, optimizer: Any, scheduler: Any, lora: Any) -> list[str]:
    """Configs of another type, or else everything that they find wrong with themselves. All but the
    first may be None.
    """
    given: Iterable[tuple[str, Any, type]] = (
        ("config", config, GPTConfig),
        ("optimizer", optimizer, OptimizerConfig),
        ("scheduler", scheduler, SchedulerConfig),
        ("lora", lora, LoraConfig),
    )
    wrong = [
        name + wrong_kind(value, kind, or_none=name != "config")
        for name, value, kind in given
        if not isinstance(value, kind) and (value is not None or name == "config")
    ]
    if wrong:
        return wrong
    optimizer = OptimizerConfig() if optimizer is None else optimizer
    problems = [f"config.{problem}" for problem in config.check()] + optimizer.check()
    if scheduler is not None:
        problems += scheduler.check(None if type_problems(optimizer) else optimizer)
    return problems + (lora.check() if lora is not None else [])


def choice_problems(given: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Values that are none of the names of their Literal, by the argument's name."""
    return [
        f"{name}={value!r}: choose one of {get_args(choices)}"
        for name, (value, choices) in given.items()
        if value not in get_args(choices)
    ]
