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
        self._key = _key(weights)
        device = weights[0].device
        sizes = [weight.numel() for weight in weights]
        with torch.inference_mode(False), torch.no_grad():
            dtype = torch.float8_e4m3fn
            buffers = [torch.empty(sum(sizes), dtype=dtype, device=device) for _ in range(2)]
            self._found = torch.zeros(len(weights), kernel.STEP, device=device)
            self._pairs: list[Pair] = []
            rows = []
            parts = zip(*(buffer.split(sizes) for buffer in buffers), strict=True)
            for weight, (itself, turned), found in zip(weights, parts, self._found, strict=True):
                rows.append(
                    (weight.data_ptr(), itself.data_ptr(), turned.data_ptr(), *weight.shape)
                )
                self._pairs.append(
                    Pair(
                        Operand(itself.view(weight.shape), found[8]),
                        Operand(turned.view(weight.shape[::-1]), found[8]),
                    )
                )
            height, width = kernel.tile()
            tiles = [-(-w.shape[0] // height) * -(-w.shape[1] // width) for w in weights]
            self._table = torch.tensor(rows, dtype=torch.int64, device=device)
            self._chunks = _programs([-(-size // kernel.CHUNK) for size in sizes], device)
            self._tiles = _programs(tiles, device)

    def fits(self, weights: Sequence[Tensor]) -> bool:
        """Whether these are the same weights in the same memory."""
        return _key(weights) == self._key

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


def _key(weights: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(weight.data_ptr() for weight in weights)


def _programs(counts: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Which weight, and which of its parts, each program works on: int32 (programs,) both."""
    parts = torch.tensor(counts)
    member = torch.arange(len(counts)).repeat_interleave(parts)
    first = parts.cumsum(0) - parts
    part = torch.arange(int(parts.sum())) - first[member]
    return member.int().to(device), part.int().to(device)
