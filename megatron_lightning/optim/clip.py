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
    known: Mapping[str, Sequence[Tensor]] | None = None,
) -> Tensor:
    """Return the norm of all gradients of the model as a 0-dim tensor, the same on every rank.

    `grads` are this rank's reduced gradients by canonical name; names without a gradient are left
    out. The norm of one tensor is taken in float32 at least, sums over tensors and ranks in
    float64, which is the dtype returned: few numbers, and the result hardly depends on the layout.
    With `sharded` they are disjoint parts, spread over the data shards of the mesh. `known`: what
    `tensor_norms` gave for some of them already.
    Every rank of the mesh must call it. ValueError for `norm_type` <= 0.
    """
    if not norm_type > 0:
        raise ValueError(
            f"norm_type={norm_type}: must be > 0; 2.0 is usual, float('inf') is the largest entry"
        )
    folded = mesh.sizes["ep"] > 1 or mesh.sizes["etp"] != mesh.sizes["tp"]
    dense: dict[str, Tensor] = {}
    experts: dict[str, Tensor] = {}
    for name, grad in grads.items():
        info = table[name]
        if info.tied_copy:
            continue
        if info.expert and folded:
            if info.split.dim is not None or mesh.axis("etp").is_first:
                experts[name] = grad
        elif info.split.dim is not None or mesh.tp.is_first:
            dense[name] = grad
    axes = ("pp_tp", "dp_shard") if sharded else ("pp_tp",)
    known = known or {}
    total = _reduce(_partial(dense, known, norm_type, mesh.device), norm_type, mesh, axes)
    if folded:
        axes = ("ep", "etp", "pp", "edp_shard") if sharded else ("ep", "etp", "pp")
        expert_partial = _partial(experts, known, norm_type, mesh.device)
        expert_total = _reduce(expert_partial, norm_type, mesh, axes)
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


def tensor_norms(grads: Sequence[Tensor], norm_type: float = 2.0) -> list[list[Tensor]]:
    """Return the norms of each tensor, or of pieces of it, as 0-dim tensors, float32 at least; none
    of an empty one.
    """
    pieces = [[grad] if grad.numel() else [] for grad in grads]
    if grads and grads[0].device.type == "cpu":
        # There one float32 sum runs over the whole tensor: 4e-4 too low at 10 million elements.
        pieces = [list(grad.flatten().split(CPU_PIECE_ELEMENTS)) if own else []
                  for grad, own in zip(grads, pieces, strict=True)]  # fmt: skip
    flat = [piece for own in pieces for piece in own]
    if not flat:
        return [[] for _ in grads]
    dtype = torch.promote_types(flat[0].dtype, torch.float32)
    norms = iter(torch._foreach_norm(flat, norm_type, dtype=dtype))
    return [[next(norms) for _ in own] for own in pieces]


def _partial(
    grads: Mapping[str, Tensor],
    known: Mapping[str, Sequence[Tensor]],
    norm_type: float,
    device: torch.device,
) -> Tensor:
    """Sum of |entry|^norm_type, or the largest |entry|, over this rank's tensors that count; a
    float64 0-dim tensor.
    """
    missing = [name for name in grads if name not in known]
    found = tensor_norms([grads[name] for name in missing], norm_type)
    of = {name: known[name] for name in grads if name in known}
    of |= zip(missing, found, strict=True)
    entries = [norm for name in grads for norm in of[name]]
    if not entries:
        return torch.zeros((), device=device, dtype=torch.float64)
    norms = torch.stack(entries).double()
    total = norms.max() if math.isinf(norm_type) else norms.pow(norm_type).sum()
    return total.to(device)


def _reduce(value: Tensor, norm_type: float, mesh: ParallelMesh, axes: Sequence[str]) -> Tensor:
    for name in axes:
        all_reduce_(value, mesh.axis(name), "max" if math.isinf(norm_type) else "sum")
    return value
