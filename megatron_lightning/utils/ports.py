"""A port on which ranks may meet."""

import random
import socket

_CANDIDATES = range(15_000, 32_000)
"""Below the ports that systems hand out by themselves (32,768 to 60,999 on Linux): one of those,
found free now, is often taken by a connection of another job when rank 0 listens seconds later."""


def free_port() -> int:
    """A TCP port of this machine that nobody listens on at the moment."""
    for port in random.SystemRandom().sample(_CANDIDATES, 64):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
