"""Optimizer state kept in bfloat16 between steps."""

import math

import torch
from torch.nn import Parameter

from megatron_lightning.precision.state import narrow_state, round_stochastically, widen_state


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_rounds_to_a_neighbour_and_keeps_the_mean() -> None:
    # Neighbours in bfloat16 around 1 are 1 and 1 + 2^-7; around -3, -3 and -3 - 2^-6.
    for base, unit in ((1.0, 2.0**-7), (-3.0, -(2.0**-6)), (2.0**-100, 2.0**-107)):
        x = torch.full((200_000,), base + 0.3 * unit)
        rounded = round_stochastically(x, torch.bfloat16, generator())
        assert rounded.dtype is torch.bfloat16
        values, counts = rounded.float().unique(return_counts=True)
        assert set(values.tolist()) == {base, base + unit}
        up = counts[values == base + unit].item() / len(x)
        assert abs(up - 0.3) < 4 * math.sqrt(0.3 * 0.7 / len(x))


def test_what_bfloat16_holds_stays() -> None:
    x = torch.tensor([0.0, -0.0, 1.0, -2.5, math.inf, -math.inf, math.nan, 2.0**-126])
    rounded = round_stochastically(x, torch.bfloat16, generator()).float()
    assert torch.equal(rounded.nan_to_num(7.0), x.nan_to_num(7.0))
    assert rounded.isnan().equal(x.isnan())


def test_other_dtypes_are_rounded_to_the_nearest() -> None:
    x = torch.randn(10, generator=generator())
    assert torch.equal(round_stochastically(x, torch.float16, generator()), x.half())
    wide = x.double()
    assert torch.equal(round_stochastically(wide, torch.bfloat16, generator()), wide.bfloat16())


def _stepped(count: int) -> tuple[torch.optim.Optimizer, dict[str, Parameter]]:
    named = {name: Parameter(torch.zeros(count)) for name in ("a", "b")}
    optimizer = torch.optim.AdamW(named.values(), betas=(0.9, 0.999))
    for parameter in named.values():
        parameter.grad = torch.randn(count, generator=generator(3))
    optimizer.step()
    return optimizer, named


def test_draws_depend_on_seed_and_name_only() -> None:
    found = []
    for seed, order in (("1", ("a", "b")), ("1", ("b", "a")), ("2", ("a", "b"))):
        optimizer, named = _stepped(500)
        narrow_state(optimizer, {n: named[n] for n in order}, torch.bfloat16, seed=seed)
        found.append({n: optimizer.state[p]["exp_avg_sq"] for n, p in named.items()})
    assert torch.equal(found[0]["a"], found[1]["a"])
    assert not torch.equal(found[0]["a"], found[2]["a"])
    assert not torch.equal(found[0]["a"], found[0]["b"])


def test_counts_stay_and_state_is_widened_again() -> None:
    optimizer, named = _stepped(5)
    narrow_state(optimizer, named, torch.bfloat16, seed="")
    state = optimizer.state[named["a"]]
    assert state["step"].dtype is torch.float32
    assert state["exp_avg"].dtype is state["exp_avg_sq"].dtype is torch.bfloat16
    widen_state(optimizer, named.values(), torch.bfloat16)
    assert state["exp_avg"].dtype is torch.float32
    optimizer.step()


def test_a_slow_second_moment_decays() -> None:
    """Rounding to the nearest leaves v where it is: 0.999 v is less than half a unit below."""
    v = torch.full((4096,), 1.0)
    assert torch.equal((v * 0.999).bfloat16().float(), v)
    for step in range(500):
        v = round_stochastically(v * 0.999, torch.bfloat16, generator(step)).float()
    assert abs(v.mean().item() / 0.999**500 - 1) < 0.01
