"""Who starts the ranks: the script run again for each (plain `python`), forks (notebooks), or
something outside.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.strategies.launchers import (
    _MultiProcessingLauncher,
    _SubprocessScriptLauncher,
)
from lightning.pytorch.strategies.launchers.launcher import _Launcher

from megatron_lightning.config.validate import raise_if_any
from megatron_lightning.strategies import startup

if TYPE_CHECKING:
    from megatron_lightning.strategies.megatron import MegatronStrategy


def choose_launcher(strategy: MegatronStrategy) -> _Launcher | None:
    """The launcher for this process, or None where ranks are started from outside or there is only
    one.
    """
    environment = strategy.cluster_environment
    assert environment is not None
    if environment.creates_processes_externally:
        return None
    kind = strategy.config.runtime.launcher
    if strategy.num_processes * strategy.num_nodes == 1:
        return None
    if kind == "auto":
        kind = "fork" if startup.is_interactive() else "script"
    if kind == "fork":
        return ForkLauncher(strategy)
    return ScriptLauncher(strategy)


def check_before_start(
    strategy: MegatronStrategy,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """All checks that need no process, on what `Trainer.fit` (or validate, ...) was given; it is
    about to call `function` with that.
    """
    given = [*args, *kwargs.values()]
    datamodule = next((value for value in given if isinstance(value, LightningDataModule)), None)
    module = next(
        (value for value in given if isinstance(value, LightningModule)), strategy.lightning_module
    )
    by_name = inspect.signature(function).bind(*args, **kwargs).arguments
    problems = startup.check_checkpoint_path(by_name.get("ckpt_path"))
    if module is not None:
        world_size = strategy.num_processes * strategy.num_nodes
        problems += startup.run_problems(strategy, module, datamodule, world_size)
    raise_if_any(problems)


class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs the script once more for every further rank of this node."""

    def __init__(self, strategy: MegatronStrategy) -> None:
        assert strategy.cluster_environment is not None
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self._strategy = strategy

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        """Check, start the other ranks, run `function`."""
        check_before_start(self._strategy, function, args, kwargs)
        return super().launch(function, *args, trainer=trainer, **kwargs)


class ForkLauncher(_MultiProcessingLauncher):
    """Forks all ranks from this process, which only waits for them."""

    def __init__(self, strategy: MegatronStrategy) -> None:
        super().__init__(strategy, start_method="fork")

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        """Check, fork, wait."""
        check_before_start(self._strategy, function, args, kwargs)  # type: ignore[arg-type]
        return super().launch(function, *args, trainer=trainer, **kwargs)

    def _wrapping_function(self, process_idx: int, *args: Any, **kwargs: Any) -> None:
        """Runs in a forked rank, which first of all has to learn which one it is."""
        os.environ["LOCAL_RANK"] = str(process_idx)
        self._strategy.set_world_ranks()
        super()._wrapping_function(process_idx, *args, **kwargs)
