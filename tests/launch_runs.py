"""Starting `launch_script.py` in every way, from a warm process where that is possible."""

import contextlib
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from megatron_lightning.strategies import guard
from megatron_lightning.utils.ports import free_port
from tests import launch_script

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = str(ROOT / "tests" / "launch_script.py")
LAUNCHER_VARIABLES = (
    "LOCAL_RANK",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "MASTER_PORT",
    "MASTER_ADDR",
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a job ended."""

    statuses: tuple[int, ...]
    """Exit statuses of the ranks, negative for a signal."""
    output: str
    """What all ranks wrote."""
    seconds: float = -1.0
    """From the failure to the end of the last rank; -1 where nothing noted a failure."""
    left: tuple[str, ...] = ()
    """Processes that were still there."""


def forget_launcher() -> None:
    """Make this process one that was started by hand."""
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)


def start_ranks(
    world_size: int,
    arguments: Sequence[str],
    folder: str,
    during: Callable[..., None] | None = None,
) -> Outcome:
    """Start ranks as a launcher that does nothing else: nobody ends them when one fails.

    `during` is called with their process ids while they run.
    """
    port = free_port()
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_rank, args=(rank, world_size, port, arguments, folder))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    if during is not None:
        during([process.pid for process in ranks])
    for process in ranks:
        process.join(60)
    seconds = since_failure(folder)
    left = tuple(str(process) for process in ranks if process.is_alive())
    for process in ranks:
        process.kill()
        process.join()
    output = "".join((Path(folder) / f"output-{rank}").read_text() for rank in range(world_size))
    return Outcome(
        statuses=tuple(process.exitcode or 0 for process in ranks),
        output=output,
        seconds=seconds,
        left=left,
    )


def _rank(rank: int, world_size: int, port: int, arguments: Sequence[str], folder: str) -> None:
    variables = (rank, rank, world_size, world_size, 0, port, "127.0.0.1")
    os.environ.update(zip(LAUNCHER_VARIABLES, map(str, variables), strict=True))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    guard.ALIKE_SECONDS = 1.0
    run_as_script([*arguments, "--folder", folder], Path(folder) / f"output-{rank}")


def run_as_script(arguments: Sequence[str], output: Path) -> None:
    """Run the script in this process and end it as Python would."""
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    with open(output, "w", buffering=1) as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
        sys.stdout = sys.stderr = stream
        sys.excepthook = sys.__excepthook__
        status: Any = 0
        try:
            launch_script.run(launch_script.arguments_of(list(arguments)))
        except SystemExit as error:
            status = error.code or 0
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
            status = 1
        stream.flush()
        os._exit(status)


def run_forked(arguments: Sequence[str], folder: str) -> Outcome:
    """Run the script in this process with the fork launcher."""
    forget_launcher()
    guard.ALIKE_SECONDS = 1.0
    stream = io.StringIO()
    status = 0
    with contextlib.redirect_stderr(stream), contextlib.redirect_stdout(stream):
        try:
            launch_script.run(
                launch_script.arguments_of([*arguments, "--launcher", "fork", "--folder", folder])
            )
        except SystemExit as error:
            status = int(error.code or 0)
        except BaseException:
            traceback.print_exc()
            status = 1
    return Outcome(
        statuses=(status,),
        output=stream.getvalue(),
        seconds=since_failure(folder),
        left=tuple(str(process) for process in psutil.Process().children(recursive=True)),
    )


def since_failure(folder: str) -> float:
    """Seconds since the script noted that it would fail; -1 if it did not."""
    noted = Path(folder) / "failed"
    return time.time() - float(noted.read_text()) if noted.exists() else -1.0


def run_command(
    command: Sequence[str], environment: dict[str, str] | None = None, timeout: float = 150
) -> tuple[int, str]:
    """Status and output of a fresh process, whose process group is killed at the limit."""
    clean = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
    clean |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(
        list(command),
        env=clean | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output


def processes_with(text: str) -> list[psutil.Process]:
    """Processes of this machine whose command line has `text`."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(text in part for part in process.cmdline()):
                found.append(process)
    return found
