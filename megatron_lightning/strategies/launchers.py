"""Who starts the ranks: the script run again for each (plain `python`), forks (notebooks), or
something outside.
"""

from __future__ import annotations

import atexit
import subprocess
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from typing_extensions import override

from megatron_lightning.config.validate import raise_if_any
from megatron_lightning.strategies import _compat
from megatron_lightning.strategies.failure import how_it_ended, say
from megatron_lightning.strategies.fork_launcher import ForkLauncher
from megatron_lightning.strategies.lifeline import leave_at_once
from megatron_lightning.strategies.run_checks import check_run
from megatron_lightning.utils.env import provide
from megatron_lightning.utils.ports import free_port

if TYPE_CHECKING:
    from megatron_lightning.strategies.model_strategy import ModelStrategy

_POLL_SECONDS = 0.2
_EXIT_SECONDS = 60.0


def choose_launcher(strategy: ModelStrategy) -> _Launcher:
    """The launcher for this process."""
    environment = strategy.cluster_environment
    assert environment is not None
    kind = strategy.config.runtime.launcher
    if environment.creates_processes_externally or strategy.num_processes * strategy.num_nodes == 1:
        return NoLauncher(strategy)
    if kind == "auto":
        kind = "fork" if _is_interactive() else "script"
    if kind == "script":
        return ScriptLauncher(strategy)
    if strategy.num_nodes > 1:
        raise_if_any(
            [
                f"num_nodes={strategy.num_nodes} with forked ranks (runtime.launcher='fork', or a "
                f"notebook): forks stay on one machine; use torchrun or srun, or num_nodes=1"
            ]
        )
    return ForkLauncher(strategy)


def _is_interactive() -> bool:
    """True in a notebook kernel or an interactive shell."""
    return bool(_IS_INTERACTIVE)


class NoLauncher(_Launcher):
    """This process is the only rank, or was started as one from outside."""

    def __init__(self, strategy: ModelStrategy) -> None:
        self._strategy = strategy

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @override
    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        """Check, run `function`."""
        check_run(self._strategy, trainer, _compat.run_arguments(function, args, kwargs))
        return function(*args, **kwargs)

    @override
    def kill(self, signum: int) -> None:
        """Nothing: other ranks are not ours to end."""


class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs the script once more for every further rank of this node."""

    def __init__(self, strategy: ModelStrategy) -> None:
        assert strategy.cluster_environment is not None
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self._strategy = strategy
        self._joined = threading.Event()

    @override
    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        """Check, start the other ranks, run `function`."""
        check_run(self._strategy, trainer, _compat.run_arguments(function, args, kwargs))
        self.cluster_environment.validate_settings(
            num_devices=self.num_processes, num_nodes=self.num_nodes
        )
        _compat.set_num_threads(self.num_processes)  # first: the ranks started here inherit it
        if not self.procs:
            if self.num_nodes == 1:  # several nodes have agreed on one already
                provide(override=False, MASTER_PORT=str(free_port()))
            self._call_children_scripts()
            atexit.register(self._wait_for_ranks)
            threading.Thread(target=self._watch_start, name="launch", daemon=True).start()
        return function(*args, **kwargs)

    def joined(self) -> None:
        """All ranks have met: from now on they watch each other."""
        self._joined.set()

    @override
    def kill(self, signum: int) -> None:
        """End the other ranks, which have a few seconds to end by themselves."""
        self._wait(self.procs, 3.0)
        for process in self.procs:
            process.send_signal(signum)

    def _watch_start(self) -> None:
        """Until the ranks have met: a rank that ends would leave the others waiting for it."""
        while not self._joined.wait(_POLL_SECONDS):
            failed = self._failed()
            if failed and not self._joined.is_set():
                say(f"{failed}; the job ends")
                for process in self.procs:
                    process.kill()
                leave_at_once()

    def _failed(self) -> str:
        """What ended badly, in words; empty if nothing did."""
        statuses = {rank: process.poll() for rank, process in enumerate(self.procs, start=1)}
        ended = [f"[rank {r}] ended: {how_it_ended(s)}" for r, s in statuses.items() if s]
        return ", ".join(ended)

    def _wait(self, processes: list[subprocess.Popen[bytes]], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while any(process.poll() is None for process in processes):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def _wait_for_ranks(self) -> None:
        """The job ends when all of its ranks have, and has failed if one of them has."""
        if not self._wait(self.procs, _EXIT_SECONDS):
            late = [r for r, process in enumerate(self.procs, start=1) if process.poll() is None]
            say(f"ranks {late} still run {_EXIT_SECONDS:g} s after rank 0 has ended; killed")
            for process in self.procs:
                process.kill()
        if self._failed() and not self._strategy.has_failed:
            atexit.unregister(self._wait_for_ranks)
            atexit._run_exitfuncs()
            leave_at_once()
