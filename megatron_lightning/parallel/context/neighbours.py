"""By what way context ranks exchange heads: through each other's memory, or by collectives."""

from __future__ import annotations

from megatron_lightning.config.context import ContextConfig
from megatron_lightning.parallel.context.exchange import Neighbours, announced
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.peers.memory import Refusal, shared_memory
from megatron_lightning.utils.logging import say_once, warn_once


def neighbours(mesh: ParallelMesh, config: ContextConfig, timeout_seconds: float) -> Neighbours:
    """What the layers hold of the context axis; all ranks of the mesh call it together."""
    axis = mesh.cp
    if mesh.device.type != "cuda" or not config.peer_memory:
        return announced(axis)
    found = shared_memory(axis, mesh.device, timeout_seconds, sums=False)
    if not isinstance(found, Refusal):
        if config.head_groups > 1:
            say_once(
                f"context.head_groups={config.head_groups}: layers whose heads make more than one"
                " group exchange them by collectives, not through the GPUs' memory"
            )
        return announced(axis, found)
    warn_once(
        "context.form='all_to_all': the GPUs can't write to each other's memory"
        f" ({found.reason}), so heads are exchanged by collectives; context.peer_memory=False"
        " doesn't try it"
    )
    return announced(axis)
