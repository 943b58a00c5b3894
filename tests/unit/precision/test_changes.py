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


@pytest.mark.parametrize("at_once", [1 << 24, 5])
def test_a_changed_bit_or_place_is_seen(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "_AT_ONCE", at_once)
    held = weights()
    seen = WeightChanges(held)
    assert not seen.names(alone)
    held["wide"][6, 8] = torch.nextafter(held["wide"][6, 8], torch.tensor(9.0).bfloat16())
    held["turned"][:, [1, 2]] = held["turned"][:, [2, 1]]  # the same values elsewhere
    held["double"].mul_(1.0)
    assert seen.names(alone) == {"wide", "turned"}
    held["scalar"].fill_(3.0)
    assert seen.names(alone) == {"wide", "turned", "scalar"}


def test_ranks_agree() -> None:
    seen = WeightChanges(weights())

    def other(verdicts: Tensor) -> None:
        assert verdicts.tolist() == [1] * 5
        verdicts[2] = 0

    assert seen.names(other) == {"scalar"}
    assert not WeightChanges({}).names(alone)
