"""Boxes, the parameter table, borders and explained errors, with no process group."""

import pytest
import torch
from torch import Tensor, nn

from megatron_lightning.config.plan import (
    Gradient,
    ParallelPlan,
    ParameterInfo,
    Role,
    Split,
    column,
    follows,
    replicated,
    row,
    vocabulary,
)
from megatron_lightning.layers.embedding import VocabularyEmbedding, VocabularyHead
from megatron_lightning.layers.linear import Linear
from megatron_lightning.layers.loss import CrossEntropy
from megatron_lightning.layers.norm import RMSNorm
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.plain_layers import SplitLinear
from megatron_lightning.parallel.random import Normal
from megatron_lightning.parallel.tensor import apply_tensor_parallel, padded_size
from megatron_lightning.parallel.tensor_checks import check_tensor_plan

INITIAL = Normal(0.02)
SPLITS = {
    "words.weight": vocabulary(),
    "norm.weight": replicated(Gradient.SEQUENCE),
    "query_norm.weight": replicated(Gradient.PARTIAL),
    "up.weight": column(1),
    "up.bias": follows(1),
    "down.weight": row(),
    "down.bias": replicated(Gradient.SEQUENCE),
    "head.weight": vocabulary(),
}
TIED = (("words.weight", "head.weight"),)


class Network(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.words = VocabularyEmbedding(50257, 4, initial=INITIAL, device="meta")
        self.norm = RMSNorm(4, 1e-5, device="meta")
        self.query_norm = RMSNorm(4, 1e-5, device="meta")
        self.up = Linear(4, (2, 8), bias=True, initial=INITIAL, device="meta")
        self.down = Linear(8, 4, bias=True, initial=INITIAL, device="meta")
        self.head = VocabularyHead(4, 50257, initial=INITIAL, device="meta")
        self.loss = CrossEntropy(50257)
        if tied:
            self.head.weight = self.words.weight


def _axis(rank: int = 0, size: int = 2) -> MeshAxis:
    return MeshAxis(name="tp", rank=rank, size=size, ranks=tuple(range(size)))


def _apply(
    network: nn.Module, rank: int = 1, size: int = 2, sequence_parallel: bool = True, tied=TIED
) -> dict[str, ParameterInfo]:
    plan = ParallelPlan(splits=SPLITS, tied=tied)
    return apply_tensor_parallel(
        network, plan, _axis(rank, size), sequence_parallel=sequence_parallel, prefix="network."
    )


@pytest.mark.parametrize(
    ("size", "multiple", "ranks", "padded"),
    [(50257, 128, 2, 50432), (50257, 128, 1, 50304), (257, 8, 4, 288), (256, 128, 2, 256)],
)
def test_padded_size(size: int, multiple: int, ranks: int, padded: int) -> None:
    assert padded_size(size, multiple, ranks) == padded


def test_table_of_a_split_network() -> None:
    network = Network()
    table = _apply(network)
    assert list(table) == ["network." + name for name, _ in network.named_parameters()]
    boxes = {n: (i.global_shape, i.offsets, i.sizes) for n, i in table.items()}
    assert boxes == {
        "network.words.weight": ((50257, 4), (25216, 0), (25041, 4)),
        "network.norm.weight": ((4,), (0,), (4,)),
        "network.query_norm.weight": ((4,), (0,), (4,)),
        "network.up.weight": ((2, 8, 4), (0, 4, 0), (2, 4, 4)),
        "network.up.bias": ((2, 8), (0, 4), (2, 4)),
        "network.down.weight": ((4, 8), (0, 4), (4, 4)),
        "network.down.bias": ((4,), (0,), (4,)),
    }
    assert network.words.weight.shape == (25216, 4)
    assert network.head.weight is network.words.weight
    assert network.up.weight.shape == (2, 4, 4)
    assert all(parameter.is_meta for parameter in network.parameters())
    assert not any(info.tied_copy for info in table.values())


@pytest.mark.parametrize(
    ("size", "sequence_parallel", "norm", "query_norm"),
    [
        (1, True, Gradient.WHOLE, Gradient.WHOLE),
        (2, False, Gradient.WHOLE, Gradient.PARTIAL),
        (2, True, Gradient.SEQUENCE, Gradient.PARTIAL),
    ],
)
def test_table_says_what_gradients_are_in_this_run(
    size: int, sequence_parallel: bool, norm: Gradient, query_norm: Gradient
) -> None:
    """Case C16: gradients of replicated norms and biases."""
    table = _apply(Network(), 0, size, sequence_parallel)
    assert table["network.norm.weight"].split.gradient is norm
    assert table["network.down.bias"].split.gradient is norm
    assert table["network.query_norm.weight"].split.gradient is query_norm
    assert table["network.up.weight"].split.gradient is Gradient.WHOLE


def test_one_rank_gets_no_borders_but_the_padding() -> None:
    network = Network()
    table = _apply(network, 0, 1)
    assert network.words.weight.shape == (50304, 4)
    assert table["network.words.weight"].sizes == (50257, 4)
    for module in network.modules():
        for border in ("before", "after", "collect", "vocabulary_offset"):
            assert not hasattr(module, border) or getattr(module, border) is None
    assert network.loss.axis.size == 1


def test_the_loss_learns_of_the_axis_when_logits_are_split() -> None:
    network = Network()
    _apply(network)
    assert network.loss.axis == _axis(1)
    assert network.head.collect is not None
    plain = nn.ModuleDict({"head": nn.Linear(4, 8), "loss": CrossEntropy(8)})
    plan = ParallelPlan(splits={"head.weight": column(gather_output=True), "head.bias": follows()})
    apply_tensor_parallel(plain, plan, _axis())
    assert plain["loss"].axis.size == 1


def test_a_stage_without_the_owner_holds_a_tied_copy() -> None:
    network = Network(tied=False)
    network.words = None
    table = _apply(network)
    info = table["network.head.weight"]
    assert info.name == "network.words.weight"
    assert info.tied_copy
    assert info.offsets == (25216, 0)


def test_frozen_parameters_stay_frozen() -> None:
    network = Network()
    network.up.weight.requires_grad_(False)
    _apply(network)
    assert not network.up.weight.requires_grad
    assert network.down.weight.requires_grad


def test_plain_layers_change_class_in_place_and_keep_hooks() -> None:
    network = nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})
    up, calls = network["up"], []
    up.register_forward_hook(lambda *_: calls.append(1))
    names = list(network.state_dict())
    plan = ParallelPlan(
        splits={
            "up.weight": column(),
            "up.bias": follows(),
            "down.weight": row(),
            "down.bias": replicated(),
        }
    )
    weight = up.weight.detach().clone()
    apply_tensor_parallel(network, plan, _axis(1))
    assert network["up"] is up
    assert type(up) is SplitLinear
    assert list(network.state_dict()) == names
    assert torch.equal(up.weight, weight[4:])
    assert up(torch.randn(3, 4)).shape == (3, 4)
    assert calls == [1]


def test_a_module_of_ones_own_gets_borders_by_role() -> None:
    class Fused(nn.Module):
        before = after = None

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Parameter(torch.zeros(8, 4))
            self.outer = nn.Parameter(torch.zeros(4, 8))

    class SplitNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.axis = MeshAxis(name="tp")
            self.scale = nn.Parameter(torch.zeros(8))

    network = nn.ModuleDict({"mlp": Fused(), "norm": SplitNorm()})
    plan = ParallelPlan(splits={"mlp.inner": column(), "mlp.outer": row(), "norm.scale": follows()})
    apply_tensor_parallel(network, plan, _axis())
    assert network["mlp"].before is not None
    assert network["mlp"].after is not None
    assert network["norm"].axis == _axis()
    assert network["norm"].scale.shape == (4,)


def _problems(network: nn.Module, size: int = 2, sequence_parallel: bool = False, **splits) -> str:
    plan = ParallelPlan(splits=splits)
    return "\n".join(check_tensor_plan(network, plan, size, sequence_parallel=sequence_parallel))


def test_all_violations_are_found_at_once() -> None:
    plan = ParallelPlan(splits=SPLITS | {"up.*": column(1)})
    problems = check_tensor_plan(Network(tied=False), plan, 3)
    assert any("'up.weight' matches" in problem for problem in problems)
    plan = ParallelPlan(splits={k: v for k, v in SPLITS.items() if k != "norm.weight"}, tied=TIED)
    problems = check_tensor_plan(Network(tied=False), plan, 3)
    assert len(problems) == 2
    assert "no row matches parameter 'norm.weight'" in problems[0]
    assert "words.weight and head.weight should be one parameter" in problems[1]
    problems = check_tensor_plan(Network(), ParallelPlan(splits=SPLITS), 3)
    assert [problem.split(": ")[1].split(" ")[0] for problem in problems] == [
        "up.weight",
        "up.bias",
        "down.weight",
    ]
    assert "tensor_parallel_size=3" in problems[0]
    assert "sizes that fit: 1, 2, 4, 8" in problems[0]
    assert check_tensor_plan(Network(), ParallelPlan(splits=SPLITS), 4) == []


@pytest.mark.parametrize(("size", "fits"), [(1, True), (2, True), (4, True), (8, False)])
def test_a_split_goes_between_heads(size: int, fits: bool) -> None:
    """96 rows can be cut in eight, 4 heads of 24 rows can't."""
    network = nn.ModuleDict({"qkv": nn.Linear(32, 96), "out": nn.Linear(32, 32)})
    splits = {"qkv.weight": column(parts=4), "qkv.bias": follows(), "out.weight": row()}
    plan = ParallelPlan(splits=splits | {"out.bias": replicated()})
    problems = check_tensor_plan(network, plan, size)
    assert problems == (
        []
        if fits
        else [
            "tensor_parallel_size=8: qkv.weight of shape (96, 32) is split along dim 0 between 4"
            " parts, and 4 isn't a multiple of it; sizes that fit: 1, 2, 4"
        ]
    )


def test_parts_divide_the_dim() -> None:
    plan = ParallelPlan(splits={"weight": column(parts=5), "bias": follows()})
    [problem] = check_tensor_plan(nn.Linear(32, 96), plan, 2)
    assert "weight of shape (96, 32) can't have parts=5 along dim 0" in problem


def test_what_every_layer_has_is_said_once_with_sizes_that_fit_all() -> None:
    layers = nn.Sequential(*(nn.Linear(8, 12, device="meta") for _ in range(80)))
    last = nn.Linear(12, 20, device="meta")
    network = nn.ModuleDict({"layers": layers, "last": last})
    splits = {"layers.*.weight": column(), "layers.*.bias": follows(), "last.weight": row()}
    plan = ParallelPlan(splits=splits | {"last.bias": replicated()})
    problems = check_tensor_plan(network, plan, 5)
    assert [text.split(": ")[1].split(" is ")[0] for text in problems] == [
        "layers.*.weight of shape (12, 8)",
        "layers.*.bias of shape (12,)",
        "last.weight of shape (20, 12)",
    ]
    assert problems[0].endswith("sizes that fit: 1, 2, 3, 4, 6, 12 (80 alike)")
    assert problems[2].endswith("sizes that fit: 1, 2, 3, 4, 6, 12")
    problems = check_tensor_plan(network, plan, 5, allows=lambda size: 6 % size == 0)
    assert problems[2].endswith("sizes that fit: 1, 2, 3, 6")
    rows = check_tensor_plan(network, ParallelPlan(splits={"last.*": replicated()}), 5)
    assert len(rows) == 2
    assert all("(80 alike)" in text for text in rows)


def test_applying_a_plan_that_does_not_fit_lists_everything() -> None:
    network = Network()
    with pytest.raises(ValueError, match="can't be applied:\n- .*up.weight(.|\n)*down.weight"):
        _apply(network, 0, 3)
    assert network.up.weight.shape == (2, 8, 4)  # nothing was changed


def test_tied_rows_must_agree() -> None:
    text = "\n".join(
        check_tensor_plan(Network(), ParallelPlan(splits=SPLITS | {"head.weight": column()}), 2)
    )
    assert "words.weight and head.weight are one parameter but their rows differ" in text


def test_what_a_module_can_not_do_is_explained() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x

    linear = nn.ModuleDict({"l": nn.Linear(4, 4, bias=False)})
    assert "belongs to a Odd, which has no `before` border" in _problems(
        nn.ModuleDict({"l": Odd()}), **{"l.weight": column()}
    )
    assert _problems(nn.ModuleDict({"l": Odd()}), **{"l.weight": follows()}) == ""
    assert "has no dim 2" in _problems(linear, **{"l.weight": column(2)})
    assert "the last dim, are row()" in _problems(linear, **{"l.weight": row(0)})
    assert "the last dim, are row()" in _problems(linear, **{"l.weight": column(1)})
    table = nn.ModuleDict({"l": nn.Embedding(8, 4)})
    assert "split it by vocabulary()" in _problems(table, **{"l.weight": row()})
    table = nn.ModuleDict({"l": nn.Embedding(8, 4, max_norm=1.0)})
    assert "max_norm=1.0" in _problems(table, **{"l.weight": vocabulary()})


def test_a_bias_behind_a_split_sequence_must_say_so() -> None:
    network = nn.ModuleDict({"l": nn.Linear(4, 4)})
    rows = {"l.weight": row(), "l.bias": replicated()}
    assert _problems(network, **rows) == ""
    text = _problems(network, sequence_parallel=True, **rows)
    assert "l.bias is added to a part of the sequence" in text
    rows["l.bias"] = replicated(Gradient.SEQUENCE)
    assert _problems(network, sequence_parallel=True, **rows) == ""


def test_a_network_that_is_padded_already_keeps_its_true_vocabulary() -> None:
    network = Network()
    first = _apply(network, 0, 1)
    again = _apply(network, 0, 1)
    assert again == first
    assert again["network.words.weight"].global_shape == (50257, 4)
    assert network.head.weight is network.words.weight
    assert _apply(network, 1, 2)["network.words.weight"].sizes == (25041, 4)


@pytest.mark.parametrize(("role", "dim", "parts"), [("row", 1, 4), ("column", 0, -1)])
def test_parts_are_those_of_a_column(role: str, dim: int, parts: int) -> None:
    with pytest.raises(ValueError, match="is for column"):
        Split(role=Role(role), dim=dim, parts=parts)
