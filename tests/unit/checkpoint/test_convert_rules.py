"""The renaming table reads both ways."""

import pytest
import torch
from torch import Tensor

from megatron_lightning.checkpoint.convert import (
    LazyTensor,
    Rows,
    Rule,
    Stacked,
    Unflatten,
    to_ours,
    to_theirs,
)

PER_LAYER = [
    Rule(ours="embedding.weight", theirs="wte.weight", values=Rows(5, padded=8)),
    Rule(ours="layers.{layer}.norm.weight", theirs="h.{layer}.ln.weight"),
    Rule(ours="layers.{layer}.fc1.weight", theirs="h.{layer}.mlp.weight", values=Unflatten(2)),
]
STACKED = [
    Rule(ours="layers.{layer}.norm.weight", theirs="h.ln.weight"),
    Rule(
        ours="layers.{layer}.fc1.weight",
        theirs=("h.gate.weight", "h.up.weight"),
        values=Stacked(2),
    ),
]


def lazy(tensors: dict[str, Tensor]) -> dict[str, LazyTensor]:
    return {name: LazyTensor.held(tensor) for name, tensor in tensors.items()}


def whole(tensors: dict[str, LazyTensor]) -> dict[str, Tensor]:
    found = {name: tensor.whole() for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        assert tuple(found[name].shape) == tensor.shape
        assert found[name].dtype == tensor.dtype
    return found


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def theirs_per_layer() -> dict[str, Tensor]:
    table = torch.zeros(8, 3)
    table[:5] = torch.randn(5, 3)
    layers = {f"h.{i}.ln.weight": torch.randn(3) for i in range(3)}
    return {
        "wte.weight": table,
        **layers,
        **{f"h.{i}.mlp.weight": torch.randn(8, 3) for i in range(3)},
    }


def test_layer_by_layer() -> None:
    theirs = theirs_per_layer()
    renamed = to_ours(PER_LAYER, lazy(theirs))
    assert renamed.left == ()
    ours = whole(renamed.tensors)
    assert torch.equal(ours["embedding.weight"], theirs["wte.weight"][:5])
    assert torch.equal(ours["layers.2.fc1.weight"], theirs["h.2.mlp.weight"].view(2, 4, 3))
    back = to_theirs(PER_LAYER, renamed.tensors)
    assert back.left == ()
    assert_equal(whole(back.tensors), theirs)


def test_layers_in_one_tensor_and_halves_in_two() -> None:
    theirs = {
        "h.ln.weight": torch.randn(12, 3),
        "h.gate.weight": torch.randn(12, 4, 3),
        "h.up.weight": torch.randn(12, 4, 3),
    }
    renamed = to_ours(STACKED, lazy(theirs))
    assert renamed.left == ()
    ours = whole(renamed.tensors)
    assert len(ours) == 24
    halves = [theirs["h.gate.weight"][10], theirs["h.up.weight"][10]]
    assert torch.equal(ours["layers.10.fc1.weight"], torch.stack(halves))
    assert_equal(whole(to_theirs(STACKED, renamed.tensors).tensors), theirs)


def test_of_two_rules_for_a_name_the_one_that_applies_counts() -> None:
    rules = [
        Rule(ours="norm.weight", theirs="norm.weight"),
        Rule(ours="norm.weight", theirs="linear.layer_norm_weight"),
    ]
    value = torch.randn(3)
    for name in ("norm.weight", "linear.layer_norm_weight"):
        assert_equal(whole(to_ours(rules, lazy({name: value})).tensors), {"norm.weight": value})
    assert list(to_theirs(rules, lazy({"norm.weight": value})).tensors) == ["norm.weight"]


def test_what_no_rule_knows_is_named() -> None:
    theirs = theirs_per_layer() | {"h.0.surprise": torch.ones(1), "h.1.x.ln.weight": torch.ones(1)}
    assert to_ours(PER_LAYER, lazy(theirs)).left == ("h.0.surprise", "h.1.x.ln.weight")
    assert to_theirs(PER_LAYER, lazy({"other": torch.ones(1)})).left == ("other",)


def test_two_words_on_one_side_only_are_refused() -> None:
    rule = Rule(ours="a.{layer}.{expert}", theirs="a")
    with pytest.raises(ValueError, match="at most one may"):
        to_ours([rule], lazy({"a": torch.ones(2, 2)}))


def test_only_the_asked_layer_is_read() -> None:
    asked: list[tuple[int, ...]] = []
    tensor = torch.randn(6, 3)

    def part(box: object) -> Tensor:
        asked.append(box.offsets)  # type: ignore[attr-defined]
        return tensor[box.slices()]  # type: ignore[attr-defined]

    stacked = LazyTensor((6, 3), torch.float32, part)
    found = to_ours(STACKED[:1], {"h.ln.weight": stacked}).tensors
    assert torch.equal(found["layers.4.norm.weight"].whole(), tensor[4])
    assert asked == [(4, 0)]
