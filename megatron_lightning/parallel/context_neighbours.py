"""By what way context ranks exchange heads: through each other's memory, or by collectives."""

from __future__ import annotations

from typing import Any

from megatron_lightning.config.context import ContextConfig
from megatron_lightning.parallel.context_exchange import Neighbours, announced
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.overlap_choice import _agree, _try, _why_not
from megatron_lightning.parallel.overlap_operations import exchanges
from megatron_lightning.utils.env import provide
from megatron_lightning.utils.logging import warn_once


def neighbours(mesh: ParallelMesh, config: ContextConfig, timeout_seconds: float) -> Neighbours:
    """What the layers hold of the context axis; all ranks of the mesh call it together."""
    axis = mesh.cp
    if mesh.device.type != "cuda" or not config.peer_memory or config.head_groups > 1:
        return announced(axis)
    name = f"{axis.name} {axis.group.group_name} memory"
    memory: Any = exchanges.get(name)
    if memory is not None and memory.axis.group is axis.group:  # that of another chunk of layers
        return announced(axis, memory)
    memory, reasons = None, _agree(axis, _why_not(axis, mesh.device))
    if not reasons:
        provide(override=False, TORCH_SYMM_MEM_DISABLE_MULTICAST="1")  # it is not used
        memory, reason = _try(axis, mesh.device, timeout_seconds)
        reasons = _agree(axis, reason)
    if reasons:
        warn_once(
            "context.form='all_to_all': the GPUs can't write to each other's memory"
            f" ({reasons[0]}), so heads are exchanged by collectives; context.peer_memory=False"
            " doesn't try it"
        )
        return announced(axis)
    exchanges[name] = memory
    return announced(axis, memory)
