"""The true global gradient norm of a cut model, and clipping by it.

Every parameter counts once: parts of a split parameter are summed over the tensor axis, a
replicated one is counted on tensor rank 0, a tied copy on the last stage not at all, and all stages
are summed. Expert parameters are summed over the expert view of the mesh. Data-parallel replicas
hold equal gradients and need no communication. Nothing here waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from megatron_lightning.config.plan import ParameterInfo
from megatron_lightning.parallel.collectives import all_reduce_
from megatron_lightning.parallel.mesh import ParallelMesh

CPU_PIECE_ELEMENTS = 4096


def global_grad_norm(
    grads: Mapping[str, Tensor],
    table: Mapping[str, ParameterInfo],
    mesh: ParallelMesh,
    *,
    norm_type: float = 2.0,
    sharded: bool = False,
) -> Tensor:
    """Return the norm of all gradients of the model as a 0-dim tensor, the same on every rank.

    `grads` are this rank's reduced gradients by canonical name; names without a gradient are left
    out. The norm of one tensor is taken in float32 at least, sums over tensors and ranks in
    float64, which is the dtype returned: few numbers, and the result hardly depends on the layout.
    With `sharded` they are disjoint parts, spread over the data shards of the mesh.
    Every rank of the mesh must call it. ValueError for `norm_type` <= 0.
    """
    if not norm_type > 0:
        raise ValueError(
            f"norm_type={norm_type}: must be > 0; 2.0 is usual, float('inf') is the largest entry"
        )
    folded = mesh.sizes["ep"] > 1 or mesh.sizes["etp"] != mesh.sizes["tp"]
    dense: list[Tensor] = []
    experts: list[Tensor] = []
    for name, grad in grads.items():
        info = table[name]
        if info.tied_copy:
            continue
        if info.expert and folded:
            if info.split.dim is not None or mesh.axis("etp").is_first:
                experts.append(grad)
        elif info.split.dim is not None or mesh.tp.is_first:
            dense.append(grad)
    axes = ("pp_tp", "dp_shard") if sharded else ("pp_tp",)
    total = _reduce(_partial(dense, norm_type, mesh.device), norm_type, mesh, axes)
    if folded:
        axes = ("ep", "etp", "pp", "edp_shard") if sharded else ("ep", "etp", "pp")
        expert_total = _reduce(_partial(experts, norm_type, mesh.device), norm_type, mesh, axes)
        total = (
            torch.maximum(total, expert_total) if math.isinf(norm_type) else total + expert_total
        )
    return total if math.isinf(norm_type) else total.pow(1.0 / norm_type)


def clip_by_value(grads: Iterable[Tensor], max_value: float) -> None:
    """Limit every entry of `grads` to [-max_value, max_value], in place."""
    tensors = list(grads)
    if tensors:
        torch._foreach_clamp_min_(tensors, -max_value)
        torch._foreach_clamp_max_(tensors, max_value)


def _partial(grads: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Sum of |entry|^norm_type, or the largest |entry|, over this rank's tensors that count; a
    float64 0-dim tensor.
    """
    grads = [grad for grad in grads if grad.numel()]
    if not grads:
        return torch.zeros((), device=device, dtype=torch.float64)
    if grads[0].device.type == "cpu":
        # There one float32 sum runs over the whole tensor: 4e-4 too low at 10 million elements.
        grads = [piece for grad in grads for piece in grad.flatten().split(CPU_PIECE_ELEMENTS)]
    dtype = torch.promote_types(grads[0].dtype, torch.float32)
    norms = torch.stack(torch._foreach_norm(grads, norm_type, dtype=dtype)).double()
    total = norms.max() if math.isinf(norm_type) else norms.pow(norm_type).sum()
    return total.to(device)


def _reduce(value: Tensor, norm_type: float, mesh: ParallelMesh, axes: Sequence[str]) -> Tensor:
    for name in axes:
        all_reduce_(value, mesh.axis(name), "max" if math.isinf(norm_type) else "sum")
    return value
