"""Counter-based numbers: known answers, statistics, and any box equal to that part of the whole."""

import itertools
import math
import random

import pytest
import torch

from megatron_lightning.parallel import philox
from megatron_lightning.parallel.random import Constant, Initial, Normal, Uniform

# Random123's known-answer tests for philox4x32-10: counter, key, words.
KNOWN = [
    ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
SHAPES = [(37,), (5, 7), (6, 16), (3, 5, 9), (2, 3, 4, 6), (4, 1)]
DISTRIBUTIONS = [Normal(0.02, mean=0.5), Uniform(-1.0, 3.0), Constant(0.25)]


def _reference(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox4x32-10 as in the paper, in Python's integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (p1 >> 32) ^ c1 ^ k0,
            p1 & 0xFFFFFFFF,
            (p0 >> 32) ^ c3 ^ k1,
            p0 & 0xFFFFFFFF,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def _words(counters: list[tuple[int, ...]], key: tuple[int, int]) -> list[tuple[int, ...]]:
    columns = [torch.tensor(column) for column in zip(*counters, strict=True)]
    return list(zip(*(w.tolist() for w in philox.philox(columns, key)), strict=True))


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], words: tuple) -> None:
    assert _words([counter], key) == [words]
    assert _reference(counter, key) == words


def test_many_counters_equal_the_reference() -> None:
    draw = random.Random(0)
    counters = [tuple(draw.getrandbits(32) for _ in range(4)) for _ in range(200)]
    key = (draw.getrandbits(32), draw.getrandbits(32))
    assert _words(counters, key) == [_reference(counter, key) for counter in counters]


def _whole(initial: Initial, shape: tuple[int, ...], name: str = "w", seed: int = 1234):
    zeros = (0,) * len(shape)
    return initial.draw(seed=seed, name=name, global_shape=shape, offsets=zeros, sizes=shape)


@pytest.mark.parametrize("initial", DISTRIBUTIONS, ids=lambda d: type(d).__name__)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_box_equals_that_part_of_the_whole(initial: Initial, shape: tuple[int, ...]) -> None:
    whole = _whole(initial, shape)
    draw = random.Random(1)
    for _ in range(60):
        ends = [sorted(draw.sample(range(size + 1), 2)) for size in shape]
        offsets, sizes = [a for a, _ in ends], [b - a for a, b in ends]
        box = initial.draw(seed=1234, name="w", global_shape=shape, offsets=offsets, sizes=sizes)
        want = whole[tuple(slice(a, b) for a, b in ends)]
        assert torch.equal(box, want), (offsets, sizes)


def test_box_equals_the_whole_across_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors larger than a tile, in rows or in a single row, and with another tile size."""
    initial = Normal(1.0)
    for shape in ((3, 40_003), (9_001, 12)):
        whole = _whole(initial, shape)
        box = initial.draw(
            seed=1234,
            name="w",
            global_shape=shape,
            offsets=(1, 3),
            sizes=(shape[0] - 2, shape[1] - 5),
        )
        assert torch.equal(box, whole[1:-1, 3:-2])
        monkeypatch.setitem(philox._GROUPS_PER_TILE, "cpu", 100)
        assert torch.equal(_whole(initial, shape), whole)
        monkeypatch.undo()


def test_scalars_and_empty_boxes() -> None:
    assert _whole(Normal(1.0), ()).shape == ()
    empty = Normal(1.0).draw(seed=0, name="w", global_shape=(4, 6), offsets=(4, 0), sizes=(0, 6))
    assert empty.shape == (0, 6)


def test_rows_beyond_32_bits_are_drawn_with_their_high_word() -> None:
    """A box far inside a tensor of 2^40 elements: the element's own counter and no other."""
    shape = (2**20, 2**16, 8)
    box = Uniform(0.0, 1.0).draw(
        seed=3, name="w", global_shape=shape, offsets=(2**19, 5, 4), sizes=(1, 1, 4)
    )
    row = 2**19 * 2**16 + 5
    key = philox.make_key("initial", 3, "w")
    words = _reference((1, row & 0xFFFFFFFF, row >> 32, 0), key)
    want = torch.tensor([(word + 0.5) * 2.0**-32 for word in words], dtype=torch.float32)
    assert row >> 32 > 0
    assert torch.equal(box.flatten(), want)


def test_normal_statistics() -> None:
    x = _whole(Normal(0.5, mean=-2.0), (1000, 1000)).double()
    z = (x + 2.0) / 0.5
    assert abs(z.mean().item()) < 4e-3  # 4 standard errors
    assert z.var().item() == pytest.approx(1.0, abs=6e-3)
    assert abs((z**3).mean().item()) < 0.02
    assert (z**4).mean().item() == pytest.approx(3.0, abs=0.04)
    ordered = z.flatten().sort().values
    exact = torch.special.ndtr(ordered)
    empirical = (torch.arange(len(ordered)) + 0.5) / len(ordered)
    assert (exact - empirical).abs().max() < 1.95e-3  # Kolmogorov-Smirnov, p = 0.001
    for shift in (1, 2, 3, 4, 1000):  # neighbours, members of a group, rows
        flat = z.flatten()
        assert abs((flat[shift:] * flat[:-shift]).mean().item()) < 5e-3, shift


def test_uniform_statistics() -> None:
    x = _whole(Uniform(2.0, 6.0), (1000, 1000)).double()
    assert x.min() >= 2.0
    assert x.max() <= 6.0
    assert x.mean().item() == pytest.approx(4.0, abs=5e-3)
    assert x.var().item() == pytest.approx(16 / 12, abs=8e-3)


def test_box_muller_equals_library_functions() -> None:
    words = philox.philox([torch.arange(5000)] + [torch.zeros(1, dtype=torch.int64)] * 3, (7, 8))
    got = philox.normal(words)
    for i, j in ((0, 1), (2, 3)):
        radius = (-2.0 * ((words[i].double() + 0.5) / 2**32).log()).sqrt()
        angle = words[j].double() * (2 * math.pi / 2**32) - math.pi / 4
        torch.testing.assert_close(got[:, i], radius * angle.cos(), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(got[:, j], radius * angle.sin(), rtol=1e-13, atol=1e-13)


def test_extreme_words_stay_finite() -> None:
    extremes = torch.tensor([0, 1, 2**30, 2**31, 2**32 - 1])
    values = philox.normal([extremes] * 4)
    assert values.isfinite().all()
    assert values.abs().max() < 6.8


def test_names_seeds_and_purposes_give_other_numbers() -> None:
    keys = {
        philox.make_key(purpose, seed, name)
        for purpose, seed, name in itertools.product(("initial", "dropout"), (0, 1), ("a", "b"))
    }
    assert len(keys) == 8
    initial = Normal(1.0)
    assert not torch.equal(_whole(initial, (8,), "a"), _whole(initial, (8,), "b"))
    assert not torch.equal(_whole(initial, (8,), seed=1), _whole(initial, (8,), seed=2))


def test_stored_values_never_change() -> None:
    """Checkpoint-free reproducibility: a seed means these weights, in every version."""
    got = _whole(Normal(1.0), (2, 3), "decoder.layers.0.mlp.linear_fc1.weight")
    want = torch.tensor(STORED)
    assert torch.equal(got, want), got.tolist()


STORED = [
    [2.083484649658203, -1.9636733531951904, -2.0290350914001465],
    [-1.2758238315582275, 0.19051069021224976, -1.2567142248153687],
]


def test_fill_casts_and_zeroes_the_padding() -> None:
    tensor = torch.full((6, 5), 9.0, dtype=torch.bfloat16)
    box = {"seed": 1, "name": "w", "global_shape": (7, 5), "offsets": (3, 0), "sizes": (4, 5)}
    Normal(1.0).fill(tensor, **box)
    assert torch.equal(tensor[:4], Normal(1.0).draw(**box).to(torch.bfloat16))
    assert not tensor[4:].any()
