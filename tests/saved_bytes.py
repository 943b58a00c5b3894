"""How many bytes autograd really keeps for the backward pass of a function."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


def saved_bytes(function: Callable[[], Any]) -> int:
    """Bytes of the distinct storages that the graph of `function()` keeps, weights left out."""
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        if not weight:
            kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address returns
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    assert isinstance(result, torch.Tensor)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
