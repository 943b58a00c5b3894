"""What of weights has changed before training, and what was written between steps."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_lightning.precision import changes
from megatron_lightning.precision.changes import MasterCopy, WeightChanges, WeightWrites


def alone(verdicts: Tensor) -> None:
    """No other rank."""


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "wide": torch.randn(7, 9, generator=generator).bfloat16(),
        "turned": torch.randn(5, 3, generator=generator).t(),
        "scalar": torch.tensor(2.0),
        "none": torch.empty(0, 4),
        "double": torch.randn(4, generator=generator, dtype=torch.float64),
    }


def test_a_changed_bit_or_place_is_seen() -> None:
    held = weights()
    seen = WeightChanges(held)
    assert not seen.names(alone)
    change(held)
    assert seen.names(alone) == {"wide", "turned"}
    held["scalar"].fill_(3.0)
    assert seen.names(alone) == {"wide", "turned", "scalar"}


def change(held: dict[str, Tensor]) -> None:
    held["wide"][6, 8] = torch.nextafter(held["wide"][6, 8], torch.tensor(9.0).bfloat16())
    held["turned"][:, [1, 2]] = held["turned"][:, [2, 1]]  # the same values elsewhere
    held["double"].mul_(1.0)


@pytest.mark.parametrize("at_once", [1 << 24, 5])
def test_devices_sum_what_changes(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "_AT_ONCE", at_once)

    def sums() -> dict[str, int]:
        integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
        bits = {name: x.reshape(-1).view(integers[x.element_size()]) for name, x in held.items()}
        return {name: int(changes._sum_of(x)) for name, x in bits.items()}

    held = weights()
    before = sums()
    change(held)
    assert {name for name, after in sums().items() if after != before[name]} == {"wide", "turned"}


def test_devices_see_all_elements_scaled_by_a_power_of_two() -> None:
    """As hooks do that scale residual projections by 1/sqrt(2 * layers)."""
    bits = torch.randn(512, 4096).view(-1).view(torch.int32)
    before = int(changes._sum_of(bits))
    bits.view(torch.float32).mul_(0.125)
    assert int(changes._sum_of(bits)) != before


def test_ranks_agree() -> None:
    seen = WeightChanges(weights())

    def other(verdicts: Tensor) -> None:
        assert verdicts.tolist() == [1] * 5
        verdicts[2] = 0

    assert seen.names(other) == {"scalar"}
    assert not WeightChanges({}).names(alone)


def renew(p: Parameter) -> None:
    p.data = p.data * 2


def unmake(p: Parameter) -> None:
    with torch.inference_mode():
        p.view(-1)[:2].zero_()


SEEN: dict[str, Callable[[Parameter], object]] = {
    "clamp": lambda p: p.clamp_(-0.1, 0.1),
    "item": lambda p: p.__setitem__(0, 1.0),
    "detach": lambda p: p.detach().mul_(2.0),
    "view": lambda p: p.view(-1)[:2].zero_(),
    "foreach": lambda p: torch._foreach_mul_([p], 2.0),
    "out": lambda p: torch.mul(p.detach(), 2.0, out=p),
    "init": torch.nn.init.normal_,
    "inference": unmake,
    "memory": renew,
}
UNSEEN: dict[str, Callable[[Parameter], object]] = {
    "data": lambda p: p.data.clamp_(-0.1, 0.1),
    "numpy": lambda p: p.detach().numpy().fill(1.0),
}


@pytest.mark.parametrize("flat", [False, True], ids=["own_memory", "view_of_a_bucket"])
@pytest.mark.parametrize("write", [*SEEN, *UNSEEN])
def test_which_writes_are_counted(write: str, flat: bool) -> None:
    held = {name: Parameter(torch.ones(3, 4)) for name in ("one", "other")}
    bucket = torch.ones(24)
    if flat:
        for number, parameter in enumerate(held.values()):
            parameter.data = bucket[12 * number :][:12].view(3, 4)
    writes = WeightWrites(held)
    with torch.no_grad():
        bucket.mul_(2.0)  # as parameters are gathered
        assert writes.names() == []
        (SEEN | UNSEEN)[write](held["other"])
    assert writes.names() == (["other"] if write in SEEN else [])
    assert writes.names() == []


def test_loading_is_counted_and_own_writes_can_be_left_out() -> None:
    module = torch.nn.Linear(3, 4)
    held = dict(module.named_parameters())
    writes = WeightWrites(held)
    module.load_state_dict(torch.nn.Linear(3, 4).state_dict())
    assert writes.names() == ["weight", "bias"]
    module.load_state_dict(torch.nn.Linear(3, 4).state_dict())
    writes.note()
    assert writes.names() == []
    held["later"] = Parameter(torch.zeros(2))
    writes.follow()
    torch.nn.init.ones_(held["later"])
    assert writes.names() == ["later"]


@pytest.mark.parametrize("at_once", [1 << 24, 5])
def test_masters_take_what_was_written_alone(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "_AT_ONCE", at_once)
    for shape in ((7, 5), (35,), ()):
        master = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        weight = master.bfloat16()
        before, copy = master.clone(), MasterCopy(master, weight)
        assert not copy.differs()
        copy.take_written()
        assert torch.equal(master, before)
        written = torch.ones(shape, dtype=torch.bool)
        if shape:
            written = before.abs() > 0.5
        weight[written] = 0.25
        assert copy.differs()
        copy.take_written()
        assert torch.equal(master, torch.where(written, 0.25, before))
        assert not copy.differs()


def test_what_ranks_are_given_may_be_rounded_further() -> None:
    master = torch.randn(9, generator=torch.Generator().manual_seed(2))
    before = master.clone()
    weight = master.bfloat16().mul(8).round().div(8)
    copy = MasterCopy(master, weight, lambda rounded: rounded.mul(8).round().div(8))
    assert not copy.differs()
    weight[3] = 5.0
    copy.take_written()
    assert master[3] == 5.0
    assert torch.equal(master[4:], before[4:])
    weight[3] = 5.03125  # not what a rounded master is given as
    copy.take_written()
    assert master[3] == 5.03125
    assert not copy.differs()
