"""Rounding to eight and four bit number formats, on any device.

E4M3 and E5M2 as in arXiv 2209.05433 (E4M3 has no infinities), E2M1 and E8M0 as in the OCP
Microscaling specification. Values are returned in float32, where all of them are exact. Rounding is
to the nearest, ties to even, and finite values beyond the largest become the largest. What isn't a
finite number stays one that isn't: an overflow of a backward pass must be seen by whoever looks for
it.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
E5M2_MAX = 57344.0
E2M1_MAX = 6.0

FP8_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FP8_MAX = {"e4m3": E4M3_MAX, "e5m2": E5M2_MAX}
FP8_MULTIPLE = 16
"""What each dim of a matrix in FP8 must be a multiple of, for torch._scaled_mm and cuBLAS."""


def padded(count: int) -> int:
    """Up to a multiple of 16, which the summed dim of a product in FP8 must be."""
    return count + -count % FP8_MULTIPLE


def cast_fp8(x: Tensor, name: str) -> Tensor:
    """Round to E4M3 or E5M2: a tensor of torch's dtype for it.

    Infinities become NaN in E4M3 and stay in E5M2; NaN stays.
    """
    largest = FP8_MAX[name]
    x = x.float()
    limited = x.clamp(-largest, largest)
    return torch.where(x.isinf(), x * x.new_full((), 0.0 if name == "e4m3" else 1.0), limited).to(
        FP8_DTYPES[name]
    )


def round_fp8(x: Tensor, name: str) -> Tensor:
    """Round to E4M3 or E5M2 and back."""
    return cast_fp8(x, name).float()


def round_e2m1(x: Tensor, noise: Tensor | None = None) -> Tensor:
    """Round to E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.

    With `noise`, uniform in [0, 1) and of the shape of `x`, rounding is stochastic: up or down with
    the probability that keeps the mean (saturation excepted).
    """
    x = x.float()
    size = x.abs().clamp(max=E2M1_MAX)
    step = torch.where(size < 2.0, 0.5, torch.where(size < 4.0, 1.0, 2.0))
    whole = size / step
    whole = whole.round() if noise is None else (whole + noise).floor()
    rounded = torch.copysign((whole * step).clamp(max=E2M1_MAX), x)
    return torch.where(x.isfinite(), rounded, torch.nan)


def round_up_e8m0(x: Tensor) -> Tensor:
    """The smallest power of two from 2^-127 to 2^127 that is at least `x` >= 0, as E8M0 holds it.

    2^127 for larger ones, NaN for what isn't finite.
    """
    x = x.float()
    mantissa, exponent = torch.frexp(x)  # x = mantissa * 2^exponent, mantissa in [0.5, 1)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    exponent = torch.where(x == 0, -127, exponent).clamp(-127, 127)
    power = torch.ldexp(torch.ones_like(x), exponent)
    return torch.where(x.isfinite(), power, torch.nan)


def power_of_two_scale(amax: Tensor, largest: float) -> Tensor:
    """The largest power of two that keeps `amax` times it within `largest`; 1 for an `amax` of 0.

    Scales that are powers of two are exact, and a value is rounded alike under any of them unless
    it falls below the format's range: that is why results hardly depend on what else shares the
    scale. NaN where `amax` isn't finite.
    """
    amax = amax.float()
    # A number over a tensor would be the number times a rounded reciprocal.
    quotient = torch.full_like(amax, largest) / amax
    mantissa, exponent = torch.frexp(quotient)  # >= 2^(exponent - 1)
    power = torch.ldexp(torch.ones_like(mantissa), (exponent - 1).clamp(-126, 126))
    # A quotient beyond float32's range, of a subnormal amax, takes the largest scale.
    power = torch.where(amax * 2.0**126 <= largest, 2.0**126, power)
    power = torch.where(amax == 0, 1.0, power)
    return torch.where(amax.isfinite(), power, torch.nan)
