"""On request: are tensors that should be replicas bitwise equal on all ranks of an axis?

Ranks compare a 64-bit hash of each tensor's bytes, so that little is sent. A mismatch names the
first tensor that differs and the ranks; every rank raises the same error.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_lightning.config.plan import ParameterInfo, Role
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.collectives import all_gather

_PRIME = 0x100000001B3
_SLICE_BYTES = 1 << 24


class ReplicasDifferError(RuntimeError):
    """Tensors that should be the same on all ranks of an axis are not."""

    def __init__(self, message: str, name: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.name = name
        self.ranks = ranks


def check_replicas(
    tensors: Mapping[str, Tensor], axis: MeshAxis, *, what: str = "parameter"
) -> None:
    """Raise `ReplicasDifferError` unless every rank of the axis holds bitwise equal tensors.

    Every rank passes the same names in the same order. `what` is the word for them in the message.
    NaNs are compared by their bits.
    """
    if axis.size == 1 or not tensors:
        return
    own = torch.stack([tensor_hash(tensor) for tensor in tensors.values()])
    hashes = all_gather(own[None], axis, 0)  # (ranks, tensors)
    unequal = (hashes != hashes[0]).any(dim=0).nonzero().flatten().tolist()
    if not unequal:
        return
    name = list(tensors)[unequal[0]]
    values = hashes[:, unequal[0]].tolist()
    common = max(set(values), key=lambda value: (values.count(value), -values.index(value)))
    odd = [i for i, value in enumerate(values) if value != common]
    ranks = tuple(axis.ranks[i] for i in odd)
    rest = [axis.ranks[i] for i in range(axis.size) if i not in odd]
    raise ReplicasDifferError(
        f"{what} {name} differs over the {axis.name} axis: ranks {list(ranks)} hold other values"
        f" than ranks {rest}; {len(unequal)} of {len(tensors)} differ in all",
        name,
        ranks,
    )


def replicated_tensors(
    tensors: Mapping[str, Tensor], table: Mapping[str, ParameterInfo]
) -> dict[str, Tensor]:
    """Those of `tensors` (parameters or gradients by table key) that every tensor rank holds."""
    return {n: t for n, t in tensors.items() if table[n].split.role is Role.REPLICATED}


def tensor_hash(tensor: Tensor) -> Tensor:
    """int64 scalar from a tensor's bytes, on its device: a weighted sum that wraps, so that the
    order of summation doesn't matter.
    """
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    total = torch.full((), data.numel(), dtype=torch.int64, device=tensor.device)
    for start in range(0, data.numel(), _SLICE_BYTES):
        part = data[start : start + _SLICE_BYTES].to(torch.int64)
        index = torch.arange(start, start + part.numel(), device=tensor.device)
        total += ((part + 1) * (index * 2 + 1) * _PRIME).bitwise_xor_(index).sum()
    return total
