import math

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.optim.build import build_optimizer
from megatron_lightning.optim.schedules import (
    LearningRateCurve,
    LearningRateSchedule,
    WeightDecayCurve,
    build_schedule,
)

LINEAR = SchedulerConfig(lr_decay_style="linear", lr_warmup_steps=2, min_lr=0.0)


def _optimizer(lr: float = 1.0) -> torch.optim.Optimizer:
    named = {
        "fc.weight": torch.nn.Parameter(torch.ones(2, 2)),
        "fc.bias": torch.nn.Parameter(torch.ones(2)),
    }
    return build_optimizer(named, OptimizerConfig(lr=lr, weight_decay=0.1))


def _run(schedule: LearningRateSchedule, steps: int) -> list[float]:
    values = []
    for _ in range(steps):
        values.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.optimizer.step()
        schedule.step()
    return values


def test_linear_reaches_zero_at_the_end_of_the_run() -> None:
    schedule = build_schedule(_optimizer(), OptimizerConfig(lr=1.0), LINEAR, total_steps=6)
    assert _run(schedule, 8) == pytest.approx([0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0])


def test_samples_count_in_units_of_the_global_batch() -> None:
    config = SchedulerConfig(lr_decay_style="linear", lr_warmup_samples=8, lr_decay_samples=24)
    schedule = build_schedule(
        _optimizer(), OptimizerConfig(lr=1.0), config, total_steps=100, global_batch_size=4
    )
    assert _run(schedule, 8) == pytest.approx([0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0])
    with pytest.raises(ValueError, match="global batch size"):
        build_schedule(_optimizer(), OptimizerConfig(lr=1.0), config, total_steps=100)


def test_mixed_units_are_converted() -> None:
    config = SchedulerConfig(lr_decay_style="linear", lr_warmup_steps=2, lr_decay_samples=24)
    schedule = build_schedule(
        _optimizer(), OptimizerConfig(lr=1.0), config, total_steps=100, global_batch_size=4
    )
    assert _run(schedule, 4) == pytest.approx([0, 0.5, 1.0, 0.75])


def test_weight_decay_goes_to_decaying_groups_only() -> None:
    config = SchedulerConfig(
        lr_decay_style="constant",
        weight_decay_style="linear",
        weight_decay_start=0.0,
        weight_decay_end=0.4,
    )
    schedule = build_schedule(_optimizer(), OptimizerConfig(lr=1.0), config, total_steps=4)
    seen = []
    for _ in range(6):
        seen.append([g["weight_decay"] for g in schedule.optimizer.param_groups])
        schedule.optimizer.step()
        schedule.step()
    assert [pair[0] for pair in seen] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.4])
    assert all(pair[1] == 0.0 for pair in seen)


def test_groups_of_another_learning_rate_keep_their_ratio() -> None:
    a, b = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [a], "lr": 1.0}, {"params": [b], "lr": 0.1}], lr=1.0)
    build_schedule(optimizer, OptimizerConfig(lr=1.0), LINEAR, total_steps=6).step()
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.5, 0.05])


def test_a_resumed_schedule_goes_on_and_takes_the_new_configuration() -> None:
    first = build_schedule(_optimizer(), OptimizerConfig(lr=1.0), LINEAR, total_steps=6)
    _run(first, 3)
    saved, groups = first.state_dict(), first.optimizer.state_dict()
    assert saved == {"last_epoch": 3, "step_count": 4}
    second = build_schedule(_optimizer(), OptimizerConfig(lr=1.0), LINEAR, total_steps=6)
    second.load_state_dict(saved)
    assert second.optimizer.param_groups[0]["lr"] == 0.75
    assert second.get_last_lr() == [0.75, 0.75]
    assert _run(second, 3) == _run(first, 3)
    # Lightning restores the optimizer, then the schedule; the peak is now twice as high.
    third = build_schedule(_optimizer(2.0), OptimizerConfig(lr=2.0), LINEAR, total_steps=6)
    third.optimizer.load_state_dict(groups)
    third.load_state_dict(saved)
    assert _run(third, 3) == pytest.approx([1.5, 1.0, 0.5])


def test_a_group_added_later_gets_its_share() -> None:
    schedule = build_schedule(_optimizer(), OptimizerConfig(lr=1.0), LINEAR, total_steps=6)
    added = {"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.1, "weight_decay": 0.0}
    schedule.optimizer.add_param_group(added)
    schedule.optimizer.step()
    schedule.step()
    assert [g["lr"] for g in schedule.optimizer.param_groups] == pytest.approx([0.5, 0.5, 0.05])


def test_unknown_length_of_the_run_is_an_error_where_it_is_needed() -> None:
    with pytest.raises(ValueError, match="lr_decay_steps=None.*max_steps"):
        build_schedule(_optimizer(), OptimizerConfig(lr=1.0), LINEAR, total_steps=math.inf)
    constant = SchedulerConfig(lr_decay_style="constant", lr_warmup_steps=2)
    schedule = build_schedule(_optimizer(), OptimizerConfig(lr=1.0), constant, total_steps=math.inf)
    assert _run(schedule, 4) == [0.0, 0.5, 1.0, 1.0]


def test_a_run_shorter_than_the_warm_up_is_allowed() -> None:
    schedule = build_schedule(_optimizer(), OptimizerConfig(lr=1.0), LINEAR, total_steps=1)
    assert _run(schedule, 4) == [0.0, 0.5, 1.0, 0.0]


@pytest.mark.parametrize("style", ["linear", "cosine", "exponential", "minus_sqrt"])
def test_wsd_is_stable_and_then_falls_to_the_minimum(style: str) -> None:
    curve = LearningRateCurve(
        max_lr=1.0, min_lr=0.1, warmup=5, decay=40, style="wsd", wsd_decay=10, wsd_style=style
    )
    assert [curve(p) for p in range(5, 31)] == [1.0] * 26
    fall = [curve(p) for p in range(30, 41)]
    assert fall == sorted(fall, reverse=True)
    assert fall[-1] == pytest.approx(0.1)
    assert curve(100) == 0.1


def test_weight_decay_curve_ends_at_its_end() -> None:
    curve = WeightDecayCurve(start=0.0, end=0.2, length=10, style="cosine")
    assert [curve(0), curve(5), curve(10), curve(11)] == pytest.approx([0.0, 0.1, 0.2, 0.2])


def test_explained_errors() -> None:
    optimizer = OptimizerConfig(lr=1e-3)
    assert not SchedulerConfig().check(optimizer)
    bad = {
        "lr_warmup_steps=10": SchedulerConfig(lr_warmup_steps=10, lr_decay_steps=10),
        "give one of the two": SchedulerConfig(lr_decay_steps=5, lr_decay_samples=5),
        "lr_wsd_decay_steps=None": SchedulerConfig(lr_decay_style="wsd"),
        "has no meaning": SchedulerConfig(lr_wsd_decay_steps=3),
        "min_lr=0.1": SchedulerConfig(min_lr=0.1),
        "must be >= 1": SchedulerConfig(lr_decay_steps=0),
        "weight_decay_style='constant'": SchedulerConfig(weight_decay_end=0.5),
        "lr_warmup_init=-1": SchedulerConfig(lr_warmup_init=-1.0),
    }
    for text, config in bad.items():
        assert any(text in error for error in config.check(optimizer)), text


class _Scheduled(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def configure_optimizers(self):
        config = OptimizerConfig(lr=1.0)
        optimizer = build_optimizer(self.named_parameters(), config)
        total = self.trainer.estimated_stepping_batches
        schedule = build_schedule(optimizer, config, LINEAR, total_steps=total)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_train_batch_start(self, *_: object) -> None:
        self.seen.append(self.optimizers().param_groups[0]["lr"])


def test_under_lightning_with_accumulation(tmp_path) -> None:
    model = _Scheduled()
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=6,
        accumulate_grad_batches=2,
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        limit_val_batches=0,
    )
    trainer.fit(model)
    assert model.seen[::2] == pytest.approx([0, 0.5, 1.0, 0.75, 0.5, 0.25])
