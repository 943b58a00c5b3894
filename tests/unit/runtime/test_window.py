"""An accumulation window adds up weights and logged totals until a step closes it."""

import torch

from megatron_lightning.runtime.metrics import LogKey, value_of
from megatron_lightning.runtime.publish import Published
from megatron_lightning.runtime.window import AccumulationWindow

LOSS, PEAK = LogKey("loss", "mean", ()), LogKey("peak", "max", ())


def batch(loss: float, weight: float, peak: float | None = None) -> Published:
    logs = {LOSS: (torch.tensor(loss * weight), torch.tensor(weight))}
    if peak is not None:
        logs[PEAK] = (torch.tensor(peak), torch.tensor(weight))
    return Published(loss_sum=torch.tensor(loss * weight), weight=torch.tensor(weight), logs=logs)


def test_totals_run_until_the_step() -> None:
    window = AccumulationWindow(torch.device("cpu"))
    assert not window.is_open
    window.open()
    first = window.add(batch(1.0, 1.0, peak=9.0))
    assert float(value_of(LOSS, first[LOSS])) == 1.0
    second = window.add(batch(3.0, 3.0))
    assert second.keys() == {LOSS}  # what this batch logged
    assert float(value_of(LOSS, second[LOSS])) == 2.5
    third = window.add(batch(0.0, 0.0, peak=4.0))
    assert float(third[PEAK][0]) == 9.0
    assert float(window.weight) == 4.0
    window.close()
    assert not window.is_open
    window.open()
    assert float(window.weight) == 0.0
    assert float(value_of(LOSS, window.add(batch(5.0, 2.0))[LOSS])) == 5.0


def test_the_loss_of_nothing_is_zero() -> None:
    assert float(batch(0.0, 0.0).loss) == 0.0
    assert float(batch(3.0, 2.0).loss) == 3.0
