"""Counter-based random numbers: Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random
numbers: as easy as 1, 2, 3", SC 2011), written in torch's int64 arithmetic.

A value depends on a key and a counter only, never on what was drawn before. So any box of a global
tensor can be drawn alone, and equals that part of the whole. Normals use the Box-Muller transform
with logarithm, sine and cosine written as polynomials: additions, multiplications, divisions and
square roots are rounded alike everywhere (IEEE 754), library functions are not, so the values are
bitwise the same on CPU and CUDA and for every box.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

Key = tuple[int, int]

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORDS = 4
_GROUPS_PER_TILE = {"cpu": 1 << 13, "cuda": 1 << 20}
"""Groups of four values drawn at once: temporaries stay in the CPU's cache, and small on a GPU."""


def make_key(purpose: str, seed: int, name: str) -> Key:
    """Hash (purpose, seed, name) to Philox' 64-bit key; the same on every platform."""
    text = f"{purpose}\0{seed}\0{name}".encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def philox(counter: Sequence[Tensor], key: Key) -> list[Tensor]:
    """Four words of 32 random bits for each counter.

    `counter`: four int64 tensors of values in [0, 2^32), of shapes that broadcast. Returns four
    int64 tensors of the broadcast shape, with values in [0, 2^32).
    """
    shape = torch.broadcast_shapes(*(word.shape for word in counter))
    c0, c1, c2, c3 = (word.expand(shape).contiguous() for word in counter)
    k0, k1 = key
    for _ in range(_ROUNDS):
        # int64 products wrap, which keeps their low 64 bits; the high word is masked after the
        # arithmetic shift. Low words keep their upper bits until masked in the next round.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = (p1 >> 32).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_MASK)
        c2 = (p0 >> 32).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_MASK)
        c1, c3 = p1, p0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return [c0, c1.bitwise_and_(_MASK), c2, c3.bitwise_and_(_MASK)]


def uniform(words: Sequence[Tensor]) -> Tensor:
    """Four words -> float64 in the open interval (0, 1), shape (..., 4); exact on every device."""
    return torch.stack(list(words), dim=-1).to(torch.float64).add_(0.5).mul_(2.0**-32)


def normal(words: Sequence[Tensor]) -> Tensor:
    """Four words -> standard normals as float64, shape (..., 4), by Box-Muller; bitwise equal on
    every device.
    """
    out = torch.empty(*words[0].shape, _WORDS, dtype=torch.float64, device=words[0].device)
    for i in (0, 2):
        radius = _log((words[i].to(torch.float64).add_(0.5)).mul_(2.0**-32)).mul_(-2.0).sqrt_()
        sine, cosine = _turn(words[i + 1])
        torch.mul(radius, cosine, out=out[..., i])
        torch.mul(radius, sine, out=out[..., i + 1])
    return out


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Horner's scheme, highest power first, in separate operations so that nothing can be
    contracted to an FMA.
    """
    y = x * coefficients[0]
    for c in coefficients[1:-1]:
        y.add_(c).mul_(x)
    return y.add_(coefficients[-1])


def _log(u: Tensor) -> Tensor:
    """Natural logarithm of u in (0, 1), about 1e-14 relative: log(m 2^e) = e log 2 + 2 artanh((m -
    1) / (m + 1)).
    """
    mantissa, exponent = torch.frexp(u)  # [0.5, 1)
    small = mantissa < math.sqrt(0.5)
    mantissa = torch.where(small, mantissa * 2.0, mantissa)
    exponent = exponent.to(torch.float64) - small.to(torch.float64)
    s = (mantissa - 1.0).div_(mantissa + 1.0)
    series = _polynomial(s * s, [2.0 / k for k in (17, 15, 13, 11, 9, 7, 5, 3, 1)])
    return exponent.mul_(math.log(2.0)).add_(s.mul_(series))


_SINE = [(-1) ** k / math.factorial(2 * k + 1) for k in range(7, -1, -1)]
_COSINE = [(-1) ** k / math.factorial(2 * k) for k in range(7, -1, -1)]


def _turn(word: Tensor) -> tuple[Tensor, Tensor]:
    """Sine and cosine of 2 pi word / 2^32 - pi / 4; the quadrant comes from the two top bits,
    exactly.
    """
    angle = (
        (word & 0x3FFFFFFF).to(torch.float64).sub_(0x20000000).mul_(math.pi / 2.0**31)
    )  # [-pi/4, pi/4)
    square = angle * angle
    sine, cosine = _polynomial(square, _SINE).mul_(angle), _polynomial(square, _COSINE)
    quadrant = word >> 30
    odd, upper = (quadrant & 1).bool(), (quadrant & 2).to(torch.float64).neg_().add_(1.0)
    swapped = torch.where(odd, cosine, sine).mul_(upper)
    flipped = torch.where(odd, -sine, cosine).mul_(upper)
    return swapped, flipped


def tiles(rows: int, groups: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Cut a grid of rows x groups into tiles of a bounded number of groups; yields (rows, groups)
    slices.
    """
    limit = _GROUPS_PER_TILE["cuda" if device.type == "cuda" else "cpu"]
    wide = min(groups, limit)
    high = max(1, limit // max(1, wide))
    for top in range(0, rows, high):
        for left in range(0, groups, wide):
            yield slice(top, min(rows, top + high)), slice(left, min(groups, left + wide))
