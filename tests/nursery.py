"""The forked side of the test harness: a nursery process, and the ranks that it forks on request.

A pytest process cannot fork ranks at any time: once a test has used autograd on a GPU build,
started threads or touched CUDA, its children are broken. So one process, the nursery, is forked
when collection has finished and before the first test runs. It has every test module imported and
does nothing but fork ranks, so each rank starts from the same clean state in milliseconds. Nothing
outlives the pytest process: nursery and ranks ask the kernel to be killed with their parent, and
both leave when their connection closes.
"""

import contextlib
import ctypes
import faulthandler
import gc
import io
import os
import pickle
import random
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist

STACK_SIGNAL = signal.SIGUSR2  # Lightning uses SIGTERM and SIGUSR1
_OTHER_LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "PL_", "GROUP_", "ROLE_")
SEED = 1234
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """What one rank is to be. An empty `store` means that no process group is initialised."""

    rank: int
    world_size: int
    backend: str
    store: str
    stack_file: str
    environment: dict[str, str]


class Nursery:
    """Handle of the nursery, held by the pytest process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.owner = parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        with (
            warnings.catch_warnings()
        ):  # Python 3.12 warns of any thread, those of native libraries included
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            _guarded(lambda: _nursery_main(theirs, parent))
        theirs.close()
        self._socket = ours
        self._control = Connection(os.dup(ours.fileno()))

    def spawn(self, specs: list[RankSpec]) -> list[tuple[int, Connection]]:
        """Fork one rank per spec; returns process id and connection of each."""
        pairs = [socket.socketpair() for _ in specs]
        self._control.send_bytes(pickle.dumps(("spawn", specs)))
        socket.send_fds(self._socket, [b"f"], [theirs.fileno() for _, theirs in pairs])
        for _, theirs in pairs:
            theirs.close()
        pids = pickle.loads(self._control.recv_bytes())
        return [
            (pid, Connection(ours.detach())) for pid, (ours, _) in zip(pids, pairs, strict=True)
        ]

    def reap(self, pid: int) -> str:
        """Wait for a rank that is ending, and say how it ended."""
        self._control.send_bytes(pickle.dumps(("reap", pid)))
        code = os.waitstatus_to_exitcode(pickle.loads(self._control.recv_bytes()))
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def stop(self) -> None:
        """End the nursery and with it all ranks."""
        # In words: processes that pytest has forked may hold the connection open, too.
        with contextlib.suppress(OSError):
            self._control.send_bytes(pickle.dumps(("stop", None)))
        self._control.close()
        self._socket.close()
        os.waitpid(self.pid, 0)


def _nursery_main(control_socket: socket.socket, parent: int) -> None:
    os.setsid()
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.freeze()  # a collection in a rank would otherwise copy every page
    control = Connection(os.dup(control_socket.fileno()))
    children: set[int] = set()
    while True:
        try:
            command, argument = pickle.loads(control.recv_bytes())
        except (EOFError, ConnectionResetError):
            break
        if command == "stop":
            break
        if command == "spawn":
            _, fds, _, _ = socket.recv_fds(control_socket, 1, len(argument))
            pids = [
                _fork_rank(spec, fd, fds, control_socket, control)
                for spec, fd in zip(argument, fds, strict=True)
            ]
            for fd in fds:
                os.close(fd)
            children.update(pids)
            control.send_bytes(pickle.dumps(pids))
        else:
            children.discard(argument)
            control.send_bytes(pickle.dumps(os.waitpid(argument, 0)[1]))
    for pid in children:
        kill_group(pid)


def _fork_rank(
    spec: RankSpec, fd: int, fds: list[int], control_socket: socket.socket, control: Connection
) -> int:
    nursery = os.getpid()
    pid = os.fork()
    if pid == 0:
        control_socket.close()
        control.close()
        for other in fds:
            if other != fd:
                os.close(other)
        _guarded(lambda: _rank_main(spec, Connection(fd), nursery))
    with contextlib.suppress(OSError):  # also done by the rank itself; whoever comes first
        os.setpgid(pid, pid)
    return pid


def _guarded(main: Callable[[], None]) -> NoReturn:
    """Run the life of a forked process, which must never return into its copy of pytest."""
    code = 1
    try:
        main()
        code = 0
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def kill_group(pid: int) -> None:
    """Kill a rank together with the processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class _PrefixedStream(io.TextIOBase):
    """Writes whole lines, each with the rank before it, straight to a file descriptor."""

    encoding = "utf-8"  # progress bars look at it

    def __init__(self, fd: int, prefix: str) -> None:
        self._fd, self._prefix, self._partial = fd, prefix, ""

    def write(self, text: str) -> int:
        *lines, self._partial = (self._partial + text).split("\n")
        if lines:
            os.write(
                self._fd,
                "".join(f"{self._prefix}{line}\n" for line in lines).encode(errors="replace"),
            )
        return len(text)

    def flush(self) -> None:
        if self._partial:
            self.write("\n")

    def fileno(self) -> int:
        return self._fd


def _rank_main(spec: RankSpec, connection: Connection, nursery: int) -> None:
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    _die_with(nursery)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in [name for name in os.environ if name.startswith(_OTHER_LAUNCHERS)]:
        del os.environ[name]
    os.environ.update(spec.environment)
    prefix = f"[rank {spec.rank}/{spec.world_size}] "
    sys.stdout, sys.stderr = _PrefixedStream(1, prefix), _PrefixedStream(2, prefix)
    stack_file = open(spec.stack_file, "w")  # noqa: SIM115 (faulthandler keeps it for life)
    faulthandler.register(STACK_SIGNAL, file=stack_file, all_threads=True)
    torch.set_num_threads(1)
    if spec.store:
        _initialise_world(spec)
    requests = socket.socket(fileno=os.dup(connection.fileno()))
    while True:
        # With each call come the caller's outputs: pytest shows what ranks print with their test.
        _, outputs, _, _ = socket.recv_fds(requests, 1, 2)
        if not outputs:
            return
        for fd, output in enumerate(outputs, start=1):
            os.dup2(output, fd)
            os.close(output)
        connection.send_bytes(_answer(spec, connection.recv_bytes()))


def call(connection: Connection, request: bytes) -> None:
    """Send a pickled (function, arguments) to a rank."""
    with socket.socket(fileno=os.dup(connection.fileno())) as requests:
        socket.send_fds(requests, [b"o"], [1, 2])
    connection.send_bytes(request)


def _initialise_world(spec: RankSpec) -> None:
    if spec.backend == "nccl":
        torch.cuda.set_device(spec.rank)
    dist.init_process_group(
        spec.backend,
        store=dist.FileStore(spec.store, spec.world_size),
        rank=spec.rank,
        world_size=spec.world_size,
        timeout=timedelta(minutes=10),  # the harness has its own, shorter limit
        device_id=torch.device("cuda", spec.rank) if spec.backend == "nccl" else None,
    )


def _answer(spec: RankSpec, request: bytes) -> bytes:
    """Run one function; the answer is (True, value, groups made) or (False, type, traceback)."""
    _reset_state()
    environment, directory = dict(os.environ), os.getcwd()
    try:
        function, args = pickle.loads(request)
        value = function(spec.rank, spec.world_size, *args)
        return pickle.dumps((True, value, _groups_made()))
    except BaseException as error:
        trace = error.__traceback__
        error.__traceback__ = trace and trace.tb_next  # without the frame of this function
        text = "".join(traceback.format_exception(error))
        print(text, file=sys.stderr, end="", flush=True)
        return pickle.dumps((False, type(error).__name__, text))
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)
        sys.stdout.flush()
        sys.stderr.flush()


def _groups_made() -> int:
    """Process groups made so far; -1 if a name of one of them may come again.

    Groups are named by a counter, except those made with `use_local_synchronization`, whose name
    is a hash of their ranks: a second one would find the first one's addresses in the store.
    """
    world = dist.distributed_c10d._world
    if not all(name.isdigit() or name == "default_pg" for name in world.pg_names.values()):
        return -1
    return world.group_count


def _reset_state() -> None:
    """Undo what the last call left: seeds, defaults, process groups other than the world."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    if dist.is_available() and dist.is_initialized():
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
