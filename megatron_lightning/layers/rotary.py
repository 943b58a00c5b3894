"""Rotary position embedding (RoPE, arXiv 2104.09864) and its context extensions.

A head's leading part of size R is rotated in R/2 pairs: element i with element i + R/2 ("halves",
as in the checkpoints of Llama, Qwen, Phi), or, interleaved, element 2i with element 2i + 1 (as in
DeepSeek's; what comes out is in the order of halves, which scores don't see). Pair i turns by
position * frequency_i, with frequency_i = base^(-2i/R), stretched by position interpolation (arXiv
2306.15595), Llama 3.1's scheme or YaRN (arXiv 2309.00071).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lightning.config.rotary import RotaryConfig


def inverse_frequencies(dim: int, rotary: RotaryConfig) -> Tensor:
    """Radians per token of each pair, float32 on the CPU: (dim / 2,)."""
    exponents = torch.arange(0, dim, 2, dtype=torch.int64, device="cpu").float() / dim
    plain = 1.0 / (rotary.base**exponents)
    if rotary.scaling == "linear":
        return plain / rotary.factor
    if rotary.scaling == "llama3":
        return _llama3(plain, rotary)
    if rotary.scaling == "yarn":
        return _yarn(plain, dim, rotary)
    return plain


def _llama3(plain: Tensor, rotary: RotaryConfig) -> Tensor:
    """Keep short waves, divide long ones by the factor, and blend linearly (in turns per context)
    between.
    """
    turns = rotary.original_max_position_embeddings * plain / (2 * math.pi)
    smooth = (turns - rotary.low_freq_factor) / (rotary.high_freq_factor - rotary.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return smooth * plain + (1 - smooth) * plain / rotary.factor


def _yarn(plain: Tensor, dim: int, rotary: RotaryConfig) -> Tensor:
    """Keep fast pairs, divide slow ones by the factor, and blend linearly in the pair index
    between.
    """

    def pair_that_turns(turns: float) -> float:
        context = rotary.original_max_position_embeddings
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rotary.base))

    low, high = pair_that_turns(rotary.beta_fast), pair_that_turns(rotary.beta_slow)
    if rotary.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / max(high - low, 1e-3)
    ramp = ramp.clamp(0.0, 1.0)
    return plain * (1 - ramp) + plain / rotary.factor * ramp


def attention_factor(rotary: RotaryConfig) -> float:
    """Factor on cosines and sines: 1 but for yarn, where it is a ratio of two 0.1 * mscale *
    ln(factor) + 1.
    """
    if rotary.scaling != "yarn":
        return 1.0
    if rotary.attention_factor is not None:
        return rotary.attention_factor
    log = 0.1 * math.log(rotary.factor)
    return (log * rotary.mscale + 1.0) / (log * rotary.mscale_all_dim + 1.0)


@dataclass(frozen=True)
class RotaryTables:
    """Cosines and sines of the positions of one micro-batch, float32, made once and shared by all
    layers.
    """

    cos: Tensor
    """(S, 1 or B, R/2)."""
    sin: Tensor
    """(S, 1 or B, R/2)."""
    interleaved: bool = False
    """Pairs are neighbours in what is rotated."""

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate the leading R elements of each head: (S, B, *heads, D) -> the same, contiguous.

        Products and sums are float32 whatever the dtype of `x`.
        """
        heads = (1,) * (x.dim() - 3)
        cos = self.cos.unflatten(1, (-1, *heads))  # (S, 1 or B, 1, R/2)
        sin = self.sin.unflatten(1, (-1, *heads))
        half = cos.shape[-1]
        if self.interleaved:
            pairs, rest = x.split((2 * half, x.shape[-1] - 2 * half), dim=-1)
            first, second = pairs[..., 0::2], pairs[..., 1::2]
        else:
            first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat((*(part.to(x.dtype) for part in turned), rest), dim=-1)


class RotaryEmbedding:
    """Makes `RotaryTables` and remembers the last ones, for the layers that follow in a forward.

    Holds no buffer, so that it works on every pipeline stage and stays float32 and right when the
    network is materialised, moved or cast.
    """

    def __init__(self, dim: int, rotary: RotaryConfig) -> None:
        self.dim = dim
        self.rotary = rotary
        self._frequencies: dict[torch.device, Tensor] = {}
        self._key: tuple[object, ...] | None = None
        self._position_ids: Tensor | None = None
        self._tables: RotaryTables | None = None

    def __call__(
        self, seq_length: int, position_ids: Tensor | None, device: torch.device
    ) -> RotaryTables:
        """Tables of `position_ids` (B, S), or of 0 .. seq_length - 1 when None."""
        key = (seq_length, device, None if position_ids is None else tensor_version(position_ids))
        same = key == self._key and position_ids is self._position_ids
        if self._tables is None or not same:
            # Made under inference_mode (a validation), they could not be used by a later backward.
            with torch.inference_mode(False), torch.no_grad():
                self._tables = self._make(seq_length, position_ids, device)
            self._key, self._position_ids = key, position_ids
        elif device.type == "cuda":  # of no effect on the stream on which they were made
            for table in (self._tables.cos, self._tables.sin):
                table.record_stream(torch.cuda.current_stream(device))
        return self._tables

    def _make(
        self, seq_length: int, position_ids: Tensor | None, device: torch.device
    ) -> RotaryTables:
        if device not in self._frequencies:  # a copy from the host waits for the device
            self._frequencies[device] = inverse_frequencies(self.dim, self.rotary).to(device)
        if position_ids is None:
            positions = torch.arange(seq_length, device=device).unsqueeze(1)  # (S, 1)
        else:
            positions = position_ids.to(device).t()  # (S, B)
        angles = positions.float().unsqueeze(-1) * self._frequencies[device]  # (S, 1 or B, R/2)
        factor = attention_factor(self.rotary)
        return RotaryTables(
            cos=angles.cos() * factor,
            sin=angles.sin() * factor,
            interleaved=self.rotary.interleaved,
        )


def tensor_version(tensor: Tensor) -> object:
    """Something that changes when `tensor` is written in place; inference tensors do not count."""
    return object() if tensor.is_inference() else tensor._version
