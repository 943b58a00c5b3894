"""A rank's tensors as boxes of the global ones, however they are sharded."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_lightning.checkpoint import BoxedTensor
from megatron_lightning.config.plan import ParameterInfo
from megatron_lightning.parallel.fsdp import shard_info, shard_of


def box_of(value: Tensor, info: ParameterInfo) -> Tensor:
    """Return a parameter, or a tensor of its local shape, as boxes; 0-dim values as they are.

    A DTensor stands for the local tensor that is sharded over the data axis.
    """
    if value.dim() == 0:
        return value
    if isinstance(value, DTensor):
        return box_of_shard(*shard_of(value), info)
    return BoxedTensor.from_local(value, info.global_shape, info.offsets, info.sizes)


def box_of_shard(part: Tensor, begins: tuple[int, ...], info: ParameterInfo) -> Tensor:
    """Return a box of a local tensor, which begins at index `begins` of it, as a global box."""
    if part.dim() == 0:
        return part.detach()
    held = shard_info(info, begins, part.shape)
    return BoxedTensor.from_local(part, info.global_shape, held.offsets, held.sizes)


def box_of_part(
    part: Tensor, local_shape: tuple[int, ...], start: int, info: ParameterInfo
) -> Tensor:
    """Return a part of a flattened local tensor, which begins at element `start`, as boxes."""
    if part.dim() == 0 or not info.global_shape:
        return part.detach().reshape(())
    return BoxedTensor.from_flat(
        part.detach().view(-1), local_shape, info.offsets, info.global_shape, start, info.sizes
    )
