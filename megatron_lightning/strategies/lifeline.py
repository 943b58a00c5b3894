"""A connection from every rank to rank 0 that tells all ranks when one of them is gone.

A rank that waits in a collective does not notice that a peer has failed: NCCL waits until its
timeout. Here the kernel says it: the connection of a process that is killed closes at once. What a
rank says, and the end of a rank that said nothing, rank 0 passes on. A rank that hears of a failure
and does not come to an end by itself within a few seconds is ended from a thread.

A rank that hangs without failing is not noticed; the timeout of collectives is for that.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import secrets
import selectors
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

GRACE_SECONDS = 5.0
"""Time that a rank has to end by itself when another has failed."""
BUSY_SECONDS = 25.0
"""Further time when it is on its way out already, in hooks on exceptions."""
_CONNECT_SECONDS = 60.0
_HELLO_SECONDS = 5.0
_GONE = "the process ended without a word (killed, out of memory, or crashed)"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a rank said before it ended."""

    rank: int
    reason: str
    """One line, e.g. `ValueError: boom`."""
    kind: str = ""
    """Type of the exception; empty for what only follows from another rank's failure."""
    step: int = -1
    """Optimizer steps that it had done."""


class Lifeline:
    """One rank's end of the connections. Rank 0 serves the others from a thread."""

    def __init__(self, rank: int, peers: dict[int, socket.socket]) -> None:
        self._rank = rank
        self._peers = peers
        self.before_leaving: Callable[[], None] = lambda: None
        """Called in the thread that ends this process for another's failure."""
        self.quiet = False
        """Whether this process says nothing when it ends for another's failure."""
        self._changed = threading.Condition()
        self._reports: dict[int, Report] = {}
        self._alike = False
        self._first: Report | None = None
        self._over = threading.Event()
        self._left: set[int] = set()
        self._world_size = len(peers) + 1
        threading.Thread(target=self._listen, name="lifeline", daemon=True).start()

    @classmethod
    def open(
        cls, rank: int, world_size: int, host: str, broadcast: Callable[[Any], Any]
    ) -> Lifeline:
        """Connect all ranks; each must call it. `broadcast` sends rank 0's object to all ranks.

        `host` is an address of rank 0 that the others reach. No port is left open.
        """
        if rank == 0:
            with _listener(host, world_size) as listener:
                token = secrets.token_hex(16)
                broadcast((listener.getsockname()[1], token))
                return cls(rank, _accept_all(listener, world_size, token))
        port, token = broadcast(None)
        connection = socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
        _keep_alive(connection)
        connection.sendall(f"{token} {rank}\n".encode())
        return cls(rank, {0: connection})

    # ------------------------------------------------------------------ what a rank says and asks

    def report(self, report: Report) -> None:
        """Tell all ranks why this one ends. Only the first word counts."""
        if self._rank == 0:
            self._take(report)
        else:
            with self._changed:
                self._reports.setdefault(self._rank, report)
            self._send(0, report=asdict(report))

    def news(self, seconds: float) -> Report | None:
        """The report that came first, if it is another rank's, waiting up to `seconds` for it."""
        with self._changed:
            self._changed.wait_for(lambda: self._first is not None, seconds)
            first = self._first
        return None if first is None or first.rank == self._rank else first

    def all_alike(self, seconds: float) -> bool:
        """Whether all ranks report the same kind at the same step within `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._alike, seconds)

    def close(self) -> None:
        """Leave in peace: what comes later on this rank concerns nobody."""
        self._over.set()
        for peer in list(self._peers):
            self._send(peer, bye=True)
        for connection in list(self._peers.values()):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    # ------------------------------------------------------------------ the thread

    def _listen(self) -> None:
        buffers = {peer: b"" for peer in self._peers}
        with selectors.DefaultSelector() as selector:
            for peer, connection in self._peers.items():
                with contextlib.suppress(ValueError):  # closed before this thread began
                    selector.register(connection, selectors.EVENT_READ, peer)
            while selector.get_map() and not self._over.is_set():
                for key, _ in selector.select(timeout=1.0):
                    received = _receive(key.fileobj)
                    *lines, buffers[key.data] = (buffers[key.data] + received).split(b"\n")
                    for line in lines:
                        self._hear(key.data, json.loads(line))
                    if not received:
                        selector.unregister(key.fileobj)
                        self._gone(key.data)

    def _hear(self, peer: int, message: dict[str, Any]) -> None:
        if "report" in message:
            self._take(Report(**message["report"]))
        if "first" in message:
            self._set_first(Report(**message["first"]))
        if message.get("alike"):
            self._set_alike()
        if message.get("bye"):
            self._left.add(peer)

    def _gone(self, peer: int) -> None:
        if peer in self._left or peer in self._reports or self._over.is_set():
            return
        report = Report(rank=peer, reason=_GONE)
        self._take(report) if self._rank == 0 else self._set_first(report)

    def _take(self, report: Report) -> None:
        """On rank 0: note a report, and tell all ranks which one came first."""
        with self._changed:
            if report.rank in self._reports:
                return
            self._reports[report.rank] = report
            first = len(self._reports) == 1
            kinds = {(known.kind, known.step) for known in self._reports.values()}
            alike = len(self._reports) == self._world_size and len(kinds) == 1 and report.kind
        for peer in self._peers:
            if first:
                self._send(peer, first=asdict(report))
            if alike:
                self._send(peer, alike=True)
        if first:
            self._set_first(report)  # last: whoever waits here may then leave and close the line
        if alike:
            self._set_alike()

    def _set_first(self, report: Report) -> None:
        with self._changed:
            known, self._first = self._first, self._first or report
            self._changed.notify_all()
        if report.rank != self._rank and (known is None or known.rank == self._rank):
            threading.Thread(target=self._end_soon, args=(report,), daemon=True).start()

    def _set_alike(self) -> None:
        with self._changed:
            self._alike = True
            self._changed.notify_all()

    def _send(self, peer: int, **message: Any) -> None:
        with contextlib.suppress(OSError):  # it is gone; its own connection tells
            self._peers[peer].sendall(json.dumps(message).encode() + b"\n")

    def _end_soon(self, news: Report) -> None:
        """End this process unless its main thread leaves the run in time, or all ranks end alike
        and may take their time, e.g. to save a checkpoint together.
        """
        if self._over.wait(GRACE_SECONDS) or self._alike:
            return
        with self._changed:
            busy = self._rank in self._reports
        if busy and (self._over.wait(BUSY_SECONDS) or self._alike):
            return
        if not self.quiet:
            print(describe_peer(self._rank, news), file=sys.stderr)
        self.before_leaving()
        leave_at_once()


def describe_peer(rank: int, news: Report) -> str:
    """The one line of a rank that ends because another has failed."""
    return f"[rank {rank}] ends because rank {news.rank} failed: {news.reason}"


def leave_at_once(status: int = 1) -> None:
    """End this process now, from any thread, together with its data loader workers."""
    for child in multiprocessing.active_children():
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _listener(host: str, world_size: int) -> socket.socket:
    local = host in ("localhost", "127.0.0.1", "::1")
    family = socket.AF_INET6 if host == "::1" else socket.AF_INET
    return socket.create_server(
        (host if local else "", 0), family=family, backlog=min(world_size, 4096)
    )


def _accept_all(listener: socket.socket, world_size: int, token: str) -> dict[int, socket.socket]:
    """Connections of all other ranks; a stranger, who lacks the token, is turned away."""
    listener.settimeout(_CONNECT_SECONDS)
    peers: dict[int, socket.socket] = {}
    while len(peers) < world_size - 1:
        connection, _ = listener.accept()
        connection.settimeout(_HELLO_SECONDS)
        line = b""
        while not line.endswith(b"\n") and len(line) < 64 and (more := _receive(connection, 1)):
            line += more
        given, _, rank = line.decode(errors="replace").strip().partition(" ")
        if secrets.compare_digest(given.encode(), token.encode()) and rank.isdecimal():
            _keep_alive(connection)
            peers[int(rank)] = connection
        else:
            connection.close()
    return peers


def _keep_alive(connection: socket.socket) -> None:
    """Notice within half a minute when the other host is gone."""
    connection.settimeout(10.0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)


def _receive(connection: Any, size: int = 65536) -> bytes:
    try:
        return connection.recv(size)
    except OSError:
        return b""
