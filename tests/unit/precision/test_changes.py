"""What of weights has changed before training."""

import pytest
import torch
from torch import Tensor

from megatron_lightning.precision import changes
from megatron_lightning.precision.changes import WeightChanges


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
