"""The default process group of a rank: joined at the start, left in order, or given up after a
failure.
"""

from __future__ import annotations

import atexit
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.peers.exchange import abandon_exchanges, release_exchanges
from megatron_lightning.utils.env import provide
from megatron_lightning.utils.logging import warn_once

if TYPE_CHECKING:
    from megatron_lightning.strategies.mesh_strategy import MeshStrategy


def init_process_group(strategy: MeshStrategy, timeout: timedelta) -> None:
    """Join the default process group, over the cluster environment's address or, in a forked rank,
    a file.
    """
    environment = strategy.cluster_environment
    assert environment is not None
    backend = strategy.config.runtime.backend
    if backend is None:
        backend = "nccl" if strategy.root_device.type == "cuda" else "gloo"
    options: dict[str, Any] = {"device_id": strategy.root_device} if backend == "nccl" else {}
    if strategy.config.runtime.cuda_graphs != "none":
        # Else NCCL lets ranks map each other's memory while they record, for which all must be
        # there, and which segments that expand don't allow.
        provide(override=False, NCCL_GRAPH_REGISTER="0")
    if strategy.store_file:
        options["store"] = dist.FileStore(strategy.store_file, strategy.world_size)
        options["store"].set_timeout(timeout)
    else:
        options["init_method"] = f"tcp://{environment.main_address}:{environment.main_port}"
    dist.init_process_group(
        backend,
        rank=strategy.global_rank,
        world_size=strategy.world_size,
        timeout=timeout,
        **options,
    )
    atexit.register(end_process_group)


def end_process_group() -> None:
    """Leave the process group in order, when Python ends."""
    if dist.is_initialized():
        release_exchanges()
        dist.destroy_process_group()


def abort_groups(mesh: ParallelMesh) -> None:
    """Give up everything that runs in the groups of NCCL, or waits for the peers' memory; they are
    of no use afterwards.

    Streams may wait for both in any order, so signals are given while groups are aborted.
    """
    atexit.unregister(end_process_group)
    if mesh.device.type != "cuda":
        return
    aborted = threading.Event()
    signals = threading.Thread(target=_abandon_exchanges, args=(aborted, mesh.device), daemon=True)
    signals.start()
    try:
        for group in mesh.groups:
            group._get_backend(mesh.device).abort()
    finally:
        aborted.set()
        signals.join()


def _abandon_exchanges(aborted: threading.Event, device: torch.device) -> None:
    try:
        with torch.cuda.device(device):  # a thread's own, else signals make a context on GPU 0
            abandon_exchanges(aborted.is_set)
    except RuntimeError as error:  # of the device, whose kernels then wait for nothing any more
        message = f"waits for the peers' memory couldn't be ended: {error}"
        warn_once(message, every_rank=True)
