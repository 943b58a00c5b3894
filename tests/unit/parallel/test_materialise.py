"""Initial values: bitwise the same global tensors for every tensor size, and no meta left over."""

import pytest
import torch
from torch import Tensor, nn

from megatron_lightning.config.plan import (
    ParallelPlan,
    ParameterInfo,
    column,
    follows,
    replicated,
    row,
    vocabulary,
)
from megatron_lightning.layers.embedding import VocabularyEmbedding, VocabularyHead
from megatron_lightning.layers.given import give_values
from megatron_lightning.layers.linear import Linear
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.materialise import (
    initial_values,
    lost_buffers,
    materialise,
    unknown_values,
)
from megatron_lightning.parallel.random import Constant, Normal
from megatron_lightning.parallel.tensor import apply_tensor_parallel

INITIAL = Normal(0.02)
PLAN = ParallelPlan(
    splits={
        "words.weight": vocabulary(),
        "up.weight": column(1),
        "up.bias": follows(1),
        "down.weight": row(),
        "head.weight": vocabulary(),
        "theirs.weight": column(),
        "theirs.bias": follows(),
        "norm.*": replicated(),
    }
)


class Counter(nn.Module):
    """Has a buffer and says how to compute it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(4), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        self.table.copy_(torch.arange(4.0))


class Network(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.words = VocabularyEmbedding(257, 8, initial=INITIAL, pad_multiple=8)
        self.up = Linear(8, (2, 16), bias=True, initial=INITIAL)
        self.up.initials["bias"] = Normal(0.1)
        self.down = Linear(16, 8, bias=False, initial=INITIAL)
        self.head = VocabularyHead(8, 257, initial=INITIAL, pad_multiple=8)
        self.theirs = nn.Linear(8, 12)
        self.norm = nn.BatchNorm1d(8)
        self.counter = Counter()
        if tied:
            self.head.weight = self.words.weight


def _build(
    rank: int, size: int, *, seed: int = 3, tied: bool = False, dtype: torch.dtype | None = None
) -> tuple[Network, dict[str, ParameterInfo]]:
    with torch.device("meta"):
        network = Network(tied)
    axis = MeshAxis(name="tp", rank=rank, size=size, ranks=tuple(range(size)))
    table = apply_tensor_parallel(network, PLAN, axis, prefix="network.")
    materialise(network, table, seed=seed, device="cpu", dtype=dtype, prefix="network.")
    return network, table


def _assembled(size: int, **options: object) -> dict[str, Tensor]:
    """Global tensors put together from every rank's box."""
    whole: dict[str, Tensor] = {}
    for rank in range(size):
        network, table = _build(rank, size, **options)
        for name, parameter in network.named_parameters():
            info = table["network." + name]
            target = whole.setdefault(name, torch.full(info.global_shape, torch.nan))
            held = parameter.detach()
            for dim, (offset, extent) in enumerate(zip(info.offsets, info.sizes, strict=True)):
                target, held = target.narrow(dim, offset, extent), held.narrow(dim, 0, extent)
            target.copy_(held)
    return whole


def test_initial_values_are_bitwise_the_same_for_every_tensor_size() -> None:
    whole = _assembled(1)
    assert len(whole) == 9
    assert not any(value.isnan().any() for value in whole.values())
    assert whole["words.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert whole["theirs.weight"].abs().max() <= 8**-0.5  # torch's own distribution
    for size in (2, 4):
        other = _assembled(size)
        assert other.keys() == whole.keys()
        for name, value in whole.items():
            assert torch.equal(other[name], value), (size, name)
    assert not torch.equal(_assembled(1, seed=4)["theirs.weight"], whole["theirs.weight"])
    assert not torch.equal(whole["words.weight"], whole["head.weight"])


def test_padding_is_zero() -> None:
    network, table = _build(3, 4)
    held = table["network.words.weight"].sizes[0]
    assert 0 < held < len(network.words.weight)
    assert not network.words.weight[held:].any()


def test_values_are_drawn_in_float32_then_cast() -> None:
    whole, half = _build(0, 2)[0], _build(0, 2, dtype=torch.bfloat16)[0]
    for name, value in half.named_parameters():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, whole.get_parameter(name).to(torch.bfloat16)), name
    assert half.counter.table.dtype == torch.float32


def test_tied_parameters_stay_one_and_take_the_owners_name() -> None:
    network, table = _build(1, 2, tied=True)
    assert network.head.weight is network.words.weight
    assert "network.head.weight" not in table
    assert torch.equal(network.words.weight, _build(1, 2)[0].words.weight)


def test_a_tied_copy_on_another_stage_equals_its_owner() -> None:
    plan = ParallelPlan(splits=PLAN.splits, tied=(("words.weight", "head.weight"),))
    axis = MeshAxis(name="tp", rank=1, size=2, ranks=(0, 1))
    with torch.device("meta"):
        stage = Network()
        stage.words = None
    table = apply_tensor_parallel(stage, plan, axis)
    materialise(stage, table, seed=3, device="cpu")
    assert table["head.weight"].tied_copy
    with torch.device("meta"):
        first = Network(tied=True)
    table = apply_tensor_parallel(first, plan, axis)
    materialise(first, table, seed=3, device="cpu")
    assert torch.equal(stage.head.weight, first.words.weight)


def test_the_owners_distribution_counts_whichever_module_stands_first() -> None:
    with torch.device("meta"):
        network = nn.ModuleDict(
            {
                "head": VocabularyHead(4, 16, initial=Constant(0.0)),
                "words": VocabularyEmbedding(16, 4, initial=Constant(2.0)),
            }
        )
        network["head"].weight = network["words"].weight
    plan = ParallelPlan(splits={"*.weight": vocabulary()}, tied=(("words.weight", "head.weight"),))
    table = apply_tensor_parallel(network, plan, MeshAxis(name="tp"))
    assert list(table) == ["head.weight"]
    assert table["head.weight"].name == "words.weight"
    materialise(network, table, seed=0, device="cpu")
    assert (network["words"].weight[:16] == 2.0).all()
    assert network["head"].weight is network["words"].weight


def test_buffers_are_recomputed() -> None:
    network, _ = _build(0, 2)
    assert torch.equal(network.counter.table, torch.arange(4.0))
    assert torch.equal(network.norm.running_var, torch.ones(8))
    assert network.norm.num_batches_tracked.item() == 0
    assert not any(t.is_meta for t in (*network.parameters(), *network.buffers()))


def test_the_default_generator_is_left_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    _build(0, 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_frozen_parameters_stay_frozen_and_real_ones_keep_their_values() -> None:
    network = nn.ModuleDict({"real": nn.Linear(4, 4), "meta": nn.Linear(4, 4, device="meta")})
    network["meta"].weight.requires_grad_(False)
    value = network["real"].weight.detach().clone()
    plan = ParallelPlan(splits={"*": replicated()})
    table = apply_tensor_parallel(network, plan, MeshAxis(name="tp"))
    materialise(network, table, seed=0, device="cpu", dtype=torch.float64)
    assert torch.equal(network["real"].weight, value.double())
    assert not network["meta"].weight.requires_grad
    assert network["meta"].bias.requires_grad


def test_what_nothing_defines_is_explained() -> None:
    class NoValues(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(3, device="meta"))
            self.register_buffer("table", torch.empty(3, device="meta"))

    class HalfDefined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(3, device="meta"))
            self.initials = {"other": Constant(0.0)}

    network = nn.ModuleDict({"a": NoValues(), "b": HalfDefined(), "c": Network()})
    problems = unknown_values(network)
    assert len(problems) == 3
    assert "a (NoValues): defines neither `initials` nor reset_parameters()" in problems[0]
    assert "a (NoValues): nothing recomputes its buffers ['table']" in problems[1]
    assert "b (HalfDefined): `initials` lacks ['scale']" in problems[2]
    assert lost_buffers(network["a"]) == ["table"]
    with pytest.raises(ValueError, match="can't materialise the network:\n- a "):
        materialise(network, {}, seed=0, device="cpu")


class Halves:
    """Source of a number that bfloat16 can't hold."""

    def __init__(self) -> None:
        self.reads: list[str] = []

    def gives(self, name: str) -> bool:
        return True

    def fill(self, target: Tensor, name: str, offsets: object, sizes: object) -> None:
        self.reads.append(name)
        target.fill_(1.001)


@pytest.mark.parametrize("rank", [0, 1])
def test_initial_values_are_drawn_again_unrounded(rank: int) -> None:
    exact, _ = _build(rank, 2)
    network, table = _build(rank, 2, dtype=torch.bfloat16)
    drawn = initial_values(network, table, seed=3, prefix="network.")
    for name, wanted in exact.named_parameters():
        parameter = network.get_parameter(name)
        if name.startswith(("theirs", "norm")):  # nothing draws them but reset_parameters
            assert parameter not in drawn
            continue
        assert torch.equal(drawn[parameter](), wanted), name
        assert torch.equal(parameter, wanted.bfloat16()), name


@pytest.mark.parametrize("drawn_dtype", [None, torch.float32])
def test_given_values_are_read_once_and_rounded(drawn_dtype: torch.dtype | None) -> None:
    with torch.device("meta"):
        network = Network()
    source = Halves()
    give_values(network, source, "", lambda path: path == "down")
    table = apply_tensor_parallel(network, PLAN, MeshAxis(name="tp"), sequence_parallel=False)
    materialise(network, table, seed=3, device="cpu", dtype=torch.bfloat16, drawn_dtype=drawn_dtype)
    assert network.down.weight not in initial_values(network, table, seed=3)
    assert source.reads == ["down.weight"]
    assert network.down.weight.dtype is torch.bfloat16
    assert network.up.weight.dtype is (drawn_dtype or torch.bfloat16)
    assert network.theirs.weight.dtype is torch.bfloat16
