"""All weights of a window cast to FP8 by two launches, in place of three for each of them.

At the beginning of a window the device has nothing to do yet, and would wait for the host before
every kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_lightning.precision.formats import FP8_MAX
from megatron_lightning.precision.operands import Operand, Pair
from megatron_lightning.utils.logging import is_installed

_MULTIPLE = 16
_FORMAT = "e4m3"
_HALVES = (torch.bfloat16, torch.float16)


@functools.lru_cache(maxsize=1)
def _has_triton() -> bool:
    return is_installed("triton")


class WeightCasts:
    """Weights and where their casts lie; these are overwritten by every `cast`."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        """`weights`: (out, in) each, as `fit` takes them."""
        from megatron_lightning.precision.kernels import fp8_weights as kernel

        self._weights = list(weights)
        device = weights[0].device
        sizes = [weight.numel() for weight in weights]
        with torch.inference_mode(False), torch.no_grad():
            dtype = torch.float8_e4m3fn
            buffers = [torch.empty(sum(sizes), dtype=dtype, device=device) for _ in range(2)]
            self._found = torch.zeros(len(weights), kernel.STEP, device=device)
            self._parts = list(zip(*(buffer.split(sizes) for buffer in buffers), strict=True))
            places = zip(weights, self._parts, self._found, strict=True)
            self._pairs = [
                Pair(
                    Operand(itself.view(weight.shape), found[8]),
                    Operand(turned.view(weight.shape[::-1]), found[8]),
                )
                for weight, (itself, turned), found in places
            ]
            height, width = kernel.tile()
            tiles = [-(-w.shape[0] // height) * -(-w.shape[1] // width) for w in weights]
            self._table = self._addresses()
            self._chunks = _programs([-(-size // kernel.CHUNK) for size in sizes], device)
            self._tiles = _programs(tiles, device)

    def follow(self, weights: Sequence[Tensor]) -> bool:
        """Cast these from now on, into the memory that those before are cast into, where CUDA
        graphs read it; False, and nothing is changed, where shapes or dtypes are others.
        """
        if list(map(_kind, weights)) != list(map(_kind, self._weights)):
            return False
        moved = _places(weights) != _places(self._weights)
        self._weights = list(weights)
        if moved:
            with torch.inference_mode(False):
                self._table = self._addresses()
        return True

    def _addresses(self) -> Tensor:
        """A row for each weight, see `fp8_weights.COLUMNS`."""
        rows = [
            (weight.data_ptr(), itself.data_ptr(), turned.data_ptr(), *weight.shape)
            for weight, (itself, turned) in zip(self._weights, self._parts, strict=True)
        ]
        return torch.tensor(rows, dtype=torch.int64, device=self._weights[0].device)

    @torch.no_grad()
    def cast(self) -> list[Pair]:
        """Operands of each weight as they are now, with a scale of its own largest value."""
        from megatron_lightning.precision.kernels import fp8_weights as kernel

        dtype, limit = self._weights[0].dtype, FP8_MAX[_FORMAT]
        kernel.cast_many(self._table, self._chunks, self._tiles, self._found, dtype, limit)
        return self._pairs


def fit(weights: Sequence[Tensor]) -> bool:
    """Whether weights can be cast together: on one CUDA device, of one 16-bit dtype."""
    if not weights or not _has_triton():
        return False
    first = weights[0]
    return first.is_cuda and all(
        weight.dim() == 2
        and weight.is_contiguous()
        and (weight.device, weight.dtype) == (first.device, first.dtype)
        and weight.dtype in _HALVES
        and weight.data_ptr() % _MULTIPLE == 0
        and not any(size % _MULTIPLE or not size for size in weight.shape)
        for weight in weights
    )


def _kind(weight: Tensor) -> tuple[object, ...]:
    return weight.shape, weight.dtype, weight.device


def _places(weights: Sequence[Tensor]) -> list[int]:
    return [weight.data_ptr() for weight in weights]


def _programs(counts: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Which weight, and which of its parts, each program works on: int32 (programs,) both."""
    parts = torch.tensor(counts)
    member = torch.arange(len(counts)).repeat_interleave(parts)
    first = parts.cumsum(0) - parts
    part = torch.arange(int(parts.sum())) - first[member]
    return member.int().to(device), part.int().to(device)
