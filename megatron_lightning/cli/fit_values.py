"""Values of `fit` and its sisters that can be judged before any class is built.

`place` says where a path of options was given: an option, or a place in a file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.accelerators import CUDAAccelerator

from megatron_lightning.cli.parser_words import precision_problem

MAX_SEED = 2**32 - 1
"""Of NumPy's generators, which `seed_everything` seeds too."""


def seed_problems(seed: Any, place: Callable[[str], str]) -> list[str]:
    """What is wrong with `seed_everything`: a number, true or false."""
    if seed is None or isinstance(seed, bool) or 0 <= seed <= MAX_SEED:
        return []
    return [f"{place('seed_everything')}={seed}: must be from 0 to {MAX_SEED}"]


def graph_problems(trainer: Any, place: Callable[[str], str]) -> list[str]:
    """What keeps a training run from CUDA graphs: the Trainer's options name no GPU, or `auto`
    finds none. (`plan` and `verify` take the layout of a GPU run on a CPU.)
    """
    if isinstance(trainer.strategy, str):
        return []
    runtime = (trainer.strategy.get("init_args") or {}).get("runtime") or {}
    wanted = runtime.get("cuda_graphs", "none")
    if wanted == "none" or not _on_cpu(trainer):
        return []
    return [
        f"{place('trainer.strategy.runtime.cuda_graphs')}={wanted!r} on the CPU, which has no such"
        " graphs: set it to none, or trainer.accelerator to gpu"
    ]


def precision_problems(trainer: Any, place: Callable[[str], str]) -> list[str]:
    """What is wrong with `trainer.precision` under MegatronStrategy; for the accelerator too, since
    the Trainer itself first says that it takes another one.
    """
    if trainer.precision is None:
        return []
    given = place("trainer.precision")
    problem = precision_problem(trainer.precision, given)
    if problem is not None:
        return [problem]
    if str(trainer.precision) in ("16", "16-mixed") and _on_cpu(trainer):
        return [
            f"{given}={str(trainer.precision)!r} on the CPU, which has no float16 training: use"
            " bf16-mixed or 32-true, or set trainer.accelerator to gpu"
        ]
    return []


def _on_cpu(trainer: Any) -> bool:
    """Whether the Trainer's options name no GPU, or `auto` finds none."""
    return trainer.accelerator == "cpu" or (
        trainer.accelerator == "auto" and not CUDAAccelerator.is_available()
    )
