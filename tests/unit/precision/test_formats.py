"""Every value of each format, ties, saturation, zeros and what isn't finite, against tables written
out from the formats' definitions.
"""

import itertools
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from megatron_lightning.precision import formats


def minifloat(exponent_bits: int, mantissa_bits: int, bias: int, codes: int) -> list[Fraction]:
    """Non-negative values of the first `codes` codes of a format, by its definition."""
    values = []
    for code in range(codes):
        exponent, mantissa = divmod(code, 1 << mantissa_bits)
        fraction = Fraction(mantissa, 1 << mantissa_bits)
        if exponent == 0:
            values.append(fraction * Fraction(2) ** (1 - bias))
        else:
            values.append((1 + fraction) * Fraction(2) ** (exponent - bias))
    assert exponent_bits + mantissa_bits <= 7
    return values


TABLES = {
    "e4m3": minifloat(4, 3, 7, 0x7F),  # 0x7F is NaN
    "e5m2": minifloat(5, 2, 15, 0x7C),  # from 0x7C on infinity and NaN
    "e2m1": minifloat(2, 1, 1, 8),
}


def nearest(table: list[Fraction], x: Fraction) -> Fraction:
    """Nearest value of the table, ties to the even code, saturating."""
    size = abs(x)
    if size >= table[-1]:
        best = table[-1]
    else:
        code = max(i for i, value in enumerate(table) if value <= size)
        low, high = table[code], table[code + 1]
        if size - low != high - size:
            best = low if size - low < high - size else high
        else:
            best = low if code % 2 == 0 else high
    return -best if x < 0 else best


def rounded(name: str, x: Tensor) -> Tensor:
    return formats.round_e2m1(x) if name == "e2m1" else formats.round_fp8(x, name)


def test_tables_are_the_formats() -> None:
    assert [float(v) for v in TABLES["e2m1"]] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert float(TABLES["e4m3"][-1]) == formats.E4M3_MAX
    assert float(TABLES["e5m2"][-1]) == formats.E5M2_MAX
    assert float(TABLES["e4m3"][1]) == 2**-9
    assert float(TABLES["e5m2"][1]) == 2**-16


@pytest.mark.parametrize("name", TABLES)
def test_every_value_tie_and_neighbour(name: str) -> None:
    table = TABLES[name]
    points = [float(value) for value in table]
    points += [float((a + b) / 2) for a, b in itertools.pairwise(table)]
    exact = torch.tensor(points)
    around = [exact, torch.nextafter(exact, exact + 1), torch.nextafter(exact, exact - 1)]
    beyond = torch.tensor([float(table[-1]) * f for f in (1.01, 1.04, 1.06, 1.25, 2.0, 1e6)])
    x = torch.cat([*around, beyond])
    x = torch.cat([x, -x])
    wanted = [float(nearest(table, Fraction(value))) for value in x.tolist()]
    assert torch.equal(rounded(name, x), torch.tensor(wanted))


@pytest.mark.parametrize("name", TABLES)
def test_random_values(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    size = torch.randn(2000, generator=generator).mul(6).exp2() * float(TABLES[name][-1]) / 50
    x = size * torch.randn(2000, generator=generator).sign()
    wanted = [float(nearest(TABLES[name], Fraction(value))) for value in x.tolist()]
    assert torch.equal(rounded(name, x), torch.tensor(wanted))
    assert torch.equal(rounded(name, x.bfloat16()), rounded(name, x.bfloat16().float()))


@pytest.mark.parametrize("name", TABLES)
def test_what_is_not_finite_stays_so(name: str) -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0, -0.0])
    got = rounded(name, x)
    assert not got[:3].isfinite().any()
    assert got[3] == 1.0
    assert torch.signbit(got[4])


def test_stochastic_rounding_keeps_the_mean() -> None:
    x = torch.linspace(-6, 6, 241)
    noise = torch.arange(0, 1, 1 / 4096)
    values = formats.round_e2m1(x[:, None].expand(-1, len(noise)), noise.expand(len(x), -1))
    table = {float(v) for v in TABLES["e2m1"]} | {-float(v) for v in TABLES["e2m1"]}
    assert set(values.unique().tolist()) == table
    assert torch.allclose(values.double().mean(dim=1), x.double(), atol=2 / 4096)
    exact = torch.tensor(sorted(table))
    assert torch.equal(formats.round_e2m1(exact, torch.full_like(exact, 0.999)), exact)


def test_every_e8m0_value() -> None:
    powers = torch.tensor([2.0**k for k in range(-127, 128)], dtype=torch.float64).float()
    assert torch.equal(formats.round_up_e8m0(powers), powers)
    inner = powers[1:-1]
    below = torch.nextafter(inner, torch.zeros_like(inner))
    above = torch.nextafter(inner, torch.full_like(inner, torch.inf))
    assert torch.equal(formats.round_up_e8m0(below), inner)
    assert torch.equal(formats.round_up_e8m0(above), powers[2:])
    edge = torch.tensor([0.0, 1e-45, 2.0**-127, 1.9 * 2.0**127, torch.inf, torch.nan])
    got = formats.round_up_e8m0(edge)
    assert got[:4].tolist() == [2.0**-127, 2.0**-127, 2.0**-127, 2.0**127]
    assert got[4:].isnan().all()


@pytest.mark.parametrize("largest", [448.0, 57344.0])
def test_scales_are_the_largest_powers_of_two_that_fit(largest: float) -> None:
    generator = torch.Generator().manual_seed(2)
    amax = torch.randn(1000, generator=generator).mul(20).exp2()
    amax = torch.cat([amax, torch.tensor([448.0, 449.0, 447.0, 57344.0, 57345.0, 1.0, 1e-38])])
    scale = formats.power_of_two_scale(amax, largest)
    mantissa, _ = torch.frexp(scale)
    assert (mantissa == 0.5).all()
    assert (scale.double() * amax.double() <= largest * (1 + 1e-7)).all()
    capped = scale == 2.0**126
    assert (2 * scale.double() * amax.double() > largest)[~capped].all()
    edge = formats.power_of_two_scale(torch.tensor([0.0, 1e-45, torch.inf, torch.nan]), largest)
    assert edge[:2].tolist() == [1.0, 2.0**126]
    assert edge[2:].isnan().all()
