"""Learning rates by samples, where batches grow or have another size after a resume."""

import pytest
import torch

from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.data.ramp import BatchSizeSchedule
from megatron_lightning.optim.schedules import LearningRateSchedule, build_schedule

SIZES = BatchSizeSchedule.parse([2, 2, 30], 8)


def schedule(size: int | None = None) -> LearningRateSchedule:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return build_schedule(
        optimizer,
        OptimizerConfig(lr=1.0),
        SchedulerConfig(lr_decay_style="linear", lr_warmup_samples=40, lr_decay_samples=200),
        total_steps=100,
        global_batch_size=size,
        samples_after=SIZES.samples_after if size is None else None,
    )


def rate(samples: int) -> float:
    return samples / 40 if samples <= 40 else max(0.0, 1 - (samples - 40) / 160)


def walk(made: LearningRateSchedule, samples: int, sizes: list[int]) -> None:
    for size in sizes:
        assert made.get_last_lr()[0] == pytest.approx(rate(samples), abs=1e-12)
        made.optimizer.step()
        made.step()
        samples += size


def grown(count: int, samples: int = 0) -> list[int]:
    sizes = []
    for _ in range(count):
        sizes.append(SIZES.at(samples))
        samples += sizes[-1]
    return sizes


def test_growing_batches() -> None:
    walk(schedule(), 0, grown(30))


def test_resume_while_batches_grow() -> None:
    made = schedule()
    walk(made, 0, grown(6))
    again = schedule()
    again.load_state_dict(made.state_dict())
    walk(again, sum(grown(6)), grown(30)[6:])


def test_resume_with_another_batch_size() -> None:
    made = schedule(size=8)
    walk(made, 0, [8] * 10)
    again = schedule(size=4)
    again.load_state_dict(made.state_dict())
    walk(again, 80, [4] * 20)


def test_state_in_steps_is_read_as_before() -> None:
    again = schedule(size=8)
    again.load_state_dict({"last_epoch": 3, "step_count": 4})
    assert again.get_last_lr()[0] == pytest.approx(rate(24))
