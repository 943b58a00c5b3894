import pytest
import torch

from megatron_lightning.config import LossScaleConfig
from megatron_lightning.precision import LossScaler


def run(scaler: LossScaler, steps: str) -> list[float]:
    """Scale after each step: "." finite, "x" not."""
    scales = []
    for step in steps:
        scaler.update(finite=step == ".")
        scales.append(scaler.scale)
    return scales


def test_halves_at_once_and_doubles_after_good_steps() -> None:
    scaler = LossScaler(LossScaleConfig(initial=16.0, growth_interval=3))
    assert run(scaler, "..x...x.....") == [16, 16, 8, 8, 8, 16, 8, 8, 8, 16, 16, 16]
    assert scaler.skipped_steps == 2


def test_agrees_with_torchs_scaler() -> None:
    """The state machine of `torch.amp.GradScaler`, for the same order of overflows."""
    steps = "....xx......x.......x..........." * 3
    ours = run(LossScaler(LossScaleConfig(initial=1024.0, growth_interval=4)), steps)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    weight = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    theirs = []
    for step in steps:
        optimizer.zero_grad()
        scaler.scale(weight * (1.0 if step == "." else float("inf"))).backward()
        scaler.step(optimizer)
        scaler.update()
        theirs.append(scaler.get_scale())
    assert ours == theirs


def test_hysteresis_tolerates_overflows() -> None:
    scaler = LossScaler(LossScaleConfig(initial=16.0, growth_interval=2, hysteresis=2))
    assert run(scaler, ".xx.x..xx") == [16, 16, 8, 8, 4, 4, 8, 8, 4]


def test_falls_faster_before_the_first_step() -> None:
    scaler = LossScaler(LossScaleConfig(initial=65536.0))
    assert run(scaler, "xxx.x") == [4096, 256, 16, 16, 8]


def test_minimum_static_and_the_end() -> None:
    assert run(LossScaler(LossScaleConfig(initial=4.0, minimum=2.0)), "xxx") == [2, 2, 2]
    static = LossScaler(LossScaleConfig(initial=4.0, static=True, growth_interval=1))
    assert run(static, "x..x") == [4, 4, 4, 4]
    scaler = LossScaler(LossScaleConfig(max_skipped_steps=3))
    run(scaler, "xx.xx")
    with pytest.raises(FloatingPointError, match="3 steps in a row"):
        run(scaler, "x")


def test_state_goes_on() -> None:
    config = LossScaleConfig(initial=64.0, growth_interval=3, hysteresis=2)
    steps = "x..x.x...x...xx..."
    whole = run(LossScaler(config), steps)
    first = LossScaler(config)
    begun = run(first, steps[:7])
    second = LossScaler(config)
    second.load_state_dict(first.state_dict())
    assert begun + run(second, steps[7:]) == whole
    assert second.skipped_steps == steps.count("x")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"initial": 0.0}, "loss_scale.initial=0.0"),
        ({"initial": float("inf")}, "loss_scale.initial=inf"),
        ({"minimum": 1e9}, "is above loss_scale.initial"),
        ({"growth_interval": 0}, "loss_scale.growth_interval=0"),
        ({"hysteresis": 0}, "loss_scale.hysteresis=0"),
        ({"max_skipped_steps": 0}, "loss_scale.max_skipped_steps=0"),
    ],
)
def test_bad_values_are_explained(fields: dict[str, float], words: str) -> None:
    assert words in " ".join(LossScaleConfig(**fields).check())  # type: ignore[arg-type]
