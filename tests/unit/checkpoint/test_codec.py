"""Objects as tagged JSON: exact round trips, refusals that name the place, nothing executed."""

import json
import math
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag, IntEnum, auto
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from lightning.fabric.utilities.data import AttributeDict

from megatron_lightning.checkpoint import CheckpointError, Codec


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1


class Bits(Flag):
    A = auto()
    B = auto()


@dataclass(frozen=True, kw_only=True)
class Config:
    width: int
    shape: tuple[int, ...] = ()
    inner: "Config | None" = None
    area: int = field(default=0, init=False)


class Pair(NamedTuple):
    a: int
    b: int


class Text(str):
    __slots__ = ()


CODEC = Codec(classes=(Colour, Level, Bits, Config))


def round_trip(tree: Any, codec: Codec = CODEC) -> Any:
    encoded = codec.encode(tree)
    return codec.decode(json.loads(json.dumps(encoded.tree, allow_nan=False)), encoded.tensors)


def same(one: Any, other: Any) -> bool:
    """Equal in type and value, bit by bit, also NaN and the order of dictionaries."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return alike and one.numpy().tobytes() == other.numpy().tobytes()
    if isinstance(one, np.ndarray | np.generic):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
    if isinstance(one, dict):
        extra = (
            one.default_factory is other.default_factory if isinstance(one, defaultdict) else True
        )
        return extra and same([list(i) for i in one.items()], [list(i) for i in other.items()])
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float | complex):
        return repr(one) == repr(other)
    return one == other


VALUES = [
    *(None, True, False, 0, -1, 2**100, 0.1, -0.0, 5e-324, math.inf, -math.inf, math.nan),
    *(
        "",
        "text",
        "\ud800",
        "\x00",
        b"",
        b"\x80\x04",
        bytearray(b"ab"),
        1 + 2j,
        complex("nan-infj"),
    ),
    *((), (1, (2,)), [], [1, [2]], {}, {"a": {"b": 1}}, {1: 2}, {None: 1, (1, 2): 2, True: 3}),
    *(set(), {1, "a"}, frozenset({(1, 2)}), deque([1, 2], maxlen=3), range(1, 9, 2)),
    *(OrderedDict(b=1, a=2), AttributeDict(x=1, y=AttributeDict(z=2)), {"$": "tuple", "v": [1]}),
    *(defaultdict(list, a=[1]), defaultdict(None, {1: 2}), defaultdict(float)),
    *(Path("/a/b"), Path("c"), PurePosixPath("x/y"), PureWindowsPath(r"c:\x")),
    *(Fraction(1, 3), Decimal("1.10"), Decimal("-Infinity")),
    *(date(2024, 2, 29), time(1, 2, 3, 4), timedelta(days=-1, microseconds=3)),
    *(datetime(2024, 1, 1, fold=1), datetime(2024, 1, 1, tzinfo=UTC)),
    datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=-3, minutes=-30))),
    *(torch.bfloat16, torch.float8_e4m3fn, torch.device("cuda", 3), torch.device("cpu")),
    *(torch.Size([2, 3]), torch.Size([])),
    *(np.float32(0.1), np.int8(-3), np.bool_(True), np.float64("nan"), np.str_("é"), np.str_("")),
    *(np.bytes_(b"x"), np.complex64(1j), np.datetime64("2024-01-01", "D")),
    *(np.zeros((0, 3)), np.arange(6, dtype=">i4").reshape(2, 3), np.array("abc"), np.arange(9000)),
    *(torch.tensor(1.5), torch.zeros(0, 3), torch.arange(2000), torch.ones(3, 2).T),
    torch.tensor([0.1, math.nan], dtype=torch.float64).to(torch.bfloat16).view(torch.int16),
    *(Colour.RED, Level.LOW, Bits.B, Config(width=1, shape=(1, 2), inner=Config(width=2))),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: f"{type(v).__name__}-{str(v)[:20]!r}")
def test_each_kind_comes_back_as_it_was(value: Any) -> None:
    assert same(round_trip(value), value)
    assert same(round_trip({"in": [value]}), {"in": [value]})
    assert CODEC.dry_run(value) == []


_keys = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text())
_leaves = st.one_of(
    _keys,
    st.floats(),
    st.binary(max_size=9),
    st.complex_numbers(),
    st.fractions(),
    st.datetimes(timezones=st.none() | st.just(UTC)),
    st.timedeltas(),
    hnp.arrays(hnp.scalar_dtypes(), hnp.array_shapes(min_dims=0, min_side=0, max_side=3)),
    st.sampled_from(VALUES[-12:]),
)
_trees = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text() | st.just("$"), inner, max_size=4),
        st.dictionaries(_keys, inner, max_size=4),
        st.dictionaries(st.text(), inner, max_size=4).map(OrderedDict),
        st.sets(_keys, max_size=4),
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(_trees)
def test_any_tree_comes_back_as_it_was(tree: Any) -> None:
    assert same(round_trip(tree), tree)


def test_large_tensors_and_arrays_are_taken_out_and_not_copied() -> None:
    big, small = torch.randn(2000), torch.randn(10)
    encoded = CODEC.encode({"rng": {"cuda": big, "cpu": small}, "order": np.arange(3000)})
    assert sorted(encoded.tensors) == ["objects/order", "objects/rng/cuda"]
    assert encoded.tensors["objects/rng/cuda"].data_ptr() == big.data_ptr()


def test_places_that_read_alike_get_different_names() -> None:
    tree = {"a": {1: torch.zeros(2000), "1": torch.ones(2000)}}
    assert len(CODEC.encode(tree).tensors) == 2
    assert same(round_trip(tree), tree)


def test_equal_sets_give_equal_files() -> None:
    one, other = {f"k{i}" for i in range(50)}, {f"k{i}" for i in reversed(range(50))}
    assert CODEC.encode(one).tree == CODEC.encode(other).tree


LOOP: list[Any] = []
LOOP.append(LOOP)
DEEP: Any = []
for _ in range(300):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (lambda x: x, "function or class"),
        (Config, "function or class"),
        (object(), "builtins.object"),
        (Text("a"), "Text"),
        (Pair(1, 2), "Pair"),
        (Bits.A | Bits.B, "combination of flags"),
        (defaultdict(lambda: 3), "defaultdict of"),
        (np.array([object()]), "not plain memory"),
        (torch.empty(2, device="meta"), "without values"),
        (torch.zeros(3, 3).to_sparse(), "part of a global tensor"),
        (LOOP, "contains itself"),
        (DEEP, "nested more than"),
    ],
    ids=str,
)
def test_what_cannot_be_written_is_named_with_its_place(value: Any, said: str) -> None:
    tree = {"callbacks": {"Mine": [1, value]}, "fine": 1}
    problems = CODEC.dry_run(tree)
    assert len(problems) == 1
    assert problems[0].startswith("callbacks['Mine']")
    assert said in problems[0]
    with pytest.raises(ValueError, match="cannot be stored"):
        CODEC.encode(tree)


def test_all_problems_are_named_at_once() -> None:
    problems = CODEC.dry_run({"a": object(), "b": {"c": {1, 2}, "d": print}, "e": {object(): 1}})
    assert [p.partition(":")[0] for p in problems[:2]] == ["a", "b['d']"]
    assert problems[2].startswith("e[<object object")


def test_classes_that_were_not_given_are_refused_both_ways() -> None:
    plain = Codec()
    assert "Config; give it to the codec" in plain.dry_run({"x": Config(width=1)})[0]
    assert "Colour; give it to the codec" in plain.dry_run({"x": Colour.RED})[0]
    tree = CODEC.encode({"x": Config(width=1)}).tree
    with pytest.raises(CheckpointError, match="x is not a valid dataclass.*not among the classes"):
        plain.decode(tree)


@pytest.mark.parametrize(
    "node",
    [
        {"$": "os.system", "v": "touch marker"},
        {"$": "dataclass", "class": "os.system", "fields": {}},
        {"$": "enum", "class": "builtins.eval", "v": "1"},
        {"$": "enum", "class": f"{Config.__module__}.Config", "v": "1"},
        {"$": "dataclass", "class": f"{Config.__module__}.Config", "fields": {"wide": 1}},
        {"$": "dataclass", "class": f"{Config.__module__}.Config", "fields": {}},
        {"$": "defaultdict", "factory": "eval", "items": []},
        {"$": "torch.dtype", "v": "nn"},
        {"$": "numpy", "dtype": "O", "v": "AAAAAAAAAAA="},
        {"$": "ndarray", "dtype": "O", "shape": [1], "data": {"$": "tensor", "ref": "x"}},
        {"$": "tensor", "ref": "objects/none"},
        {"$": "tensor", "dtype": "float32", "shape": [3], "v": "AAAA"},
        {"$": "bytes", "v": "?"},
        {"$": "bytes"},
        {"$": "float", "v": "1e5"},
        {"$": "fraction", "v": [1, 0]},
        {"$": "dict", "items": [[[], 1]]},
        {"$": "set", "v": 3},
        {"$": ["tuple"], "v": []},
    ],
    ids=lambda node: str(node["$"]),
)
def test_damaged_or_hostile_input_gives_an_error_with_the_place(node: Any) -> None:
    with pytest.raises(CheckpointError, match=r"objects\.json: a\['b'\]"):
        CODEC.decode({"a": {"b": node}}, where="objects.json")


def test_fields_added_later_take_their_defaults() -> None:
    tree = CODEC.encode(Config(width=3)).tree
    del tree["fields"]["shape"]
    assert CODEC.decode(tree) == Config(width=3)


def test_classes_of_other_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="neither a dataclass nor an enum"):
        Codec(classes=(Path,))
