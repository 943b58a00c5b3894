import copy

import pytest
import torch
from torch import nn

from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.optim.schedules import build_schedule
from megatron_lightning.precision.state import (
    ELEMENTWISE_OPTIMIZERS,
    check_elementwise,
    discard_state,
    is_elementwise,
    materialise_state,
    optimizer_state_tensors,
)


def _named() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {"w": nn.Parameter(torch.randn(3, 2)), "b": nn.Parameter(torch.randn(3))}


def _step(optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in named.values():
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()


@pytest.mark.parametrize("kind", ELEMENTWISE_OPTIMIZERS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("momentum", [False, True])
def test_state_loaded_in_place_continues_bitwise(kind: type, momentum: bool) -> None:
    options = {"momentum": 0.9, "weight_decay": 0.1} if kind is torch.optim.SGD and momentum else {}
    named = _named()
    optimizer = kind(named.values(), lr=1e-2, **options)
    for seed in range(3):
        _step(optimizer, named, seed)
    saved = {
        name: {key: value.clone() for key, value in state.items()}
        for name, state in optimizer_state_tensors(optimizer, named).items()
    }
    again = {name: nn.Parameter(p.detach().clone()) for name, p in named.items()}
    resumed = kind(again.values(), lr=1e-2, **options)
    fresh = optimizer_state_tensors(resumed, again, materialise=True)
    if not (kind is torch.optim.SGD and not momentum):
        assert saved["w"].keys() == fresh["w"].keys()
        assert saved
    for name, state in saved.items():
        for key, value in state.items():
            fresh[name][key].copy_(value)
    for seed in (7, 8):
        _step(optimizer, named, seed)
        _step(resumed, again, seed)
    for name, p in named.items():
        assert torch.equal(p, again[name]), name


def test_materialising_touches_nothing_else() -> None:
    named = _named()
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = torch.optim.AdamW([*named.values(), frozen], lr=1e-2, weight_decay=0.5)
    schedule = build_schedule(
        optimizer, OptimizerConfig(lr=1e-2), SchedulerConfig(), total_steps=10
    )
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    named["w"].grad = torch.ones(3, 2)
    before = {name: p.detach().clone() for name, p in named.items()}
    groups = copy.deepcopy([{**g, "params": None} for g in optimizer.param_groups])
    made = materialise_state(optimizer)
    assert [p is q for p, q in zip(made, named.values(), strict=True)] == [True, True]
    assert not calls
    assert torch.equal(named["w"].grad, torch.ones(3, 2))
    assert all(torch.equal(p, before[name]) for name, p in named.items())
    assert [{**g, "params": None} for g in optimizer.param_groups] == groups
    assert schedule.last_epoch == 0
    assert frozen not in optimizer.state
    assert not optimizer.state[named["w"]]["exp_avg"].any()
    assert materialise_state(optimizer) == []


def test_discarded_state_makes_the_next_step_a_first_one() -> None:
    named, other = _named(), _named()
    optimizer = torch.optim.AdamW(named.values(), lr=1e-2)
    materialise_state(optimizer)
    discard_state(optimizer, [named["b"], named["w"]])
    reference = torch.optim.AdamW(other.values(), lr=1e-2)
    _step(optimizer, named, 0)
    _step(reference, other, 0)
    assert all(torch.equal(p, other[name]) for name, p in named.items())


def test_parameters_never_stepped_are_not_listed() -> None:
    named = _named()
    optimizer = torch.optim.AdamW(named.values(), lr=1e-2)
    assert optimizer_state_tensors(optimizer, named) == {}
    named["w"].grad = torch.ones(3, 2)
    optimizer.step()
    tensors = optimizer_state_tensors(optimizer, named)
    assert tensors.keys() == {"w"}
    assert tensors["w"]["exp_avg"] is optimizer.state[named["w"]]["exp_avg"]


class Whole(torch.optim.Optimizer):
    """Normalises whole tensors."""

    def __init__(self, params) -> None:
        super().__init__(params, {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


class Signs(Whole):
    elementwise = True

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["count"] = torch.ones(()) * self.scale
                p.sub_(p.grad.sign(), alpha=group["lr"])

    @property
    def scale(self) -> float:
        return self._scale

    def __init__(self, params) -> None:
        super().__init__(params)
        self._scale = 3.0


def test_unknown_optimizers_are_refused_only_where_parameters_are_split() -> None:
    named = _named()
    check_elementwise(Whole(named.values()), [])
    check_elementwise(Signs(named.values()), ["w"])
    check_elementwise(torch.optim.AdamW(named.values()), ["w"])
    with pytest.raises(ValueError, match=r"optimizer=Whole: .*first: 'b'"):
        check_elementwise(Whole(named.values()), ["w", "b"])
    with pytest.raises(ValueError, match="optimizer=LBFGS"):
        check_elementwise(torch.optim.LBFGS(named.values()), ["w"])
    with pytest.raises(ValueError, match="optimizer=Adafactor"):
        check_elementwise(torch.optim.Adafactor(named.values()), ["w"])
    assert not is_elementwise(torch.optim.LBFGS(named.values()))


def test_attributes_of_own_optimizers_reach_the_stand_in() -> None:
    named = _named()
    tensors = optimizer_state_tensors(Signs(named.values()), named, materialise=True)
    assert tensors["w"]["count"].item() == 3.0
    with pytest.raises(ValueError, match="Whole"):
        materialise_state(Whole(named.values()))
