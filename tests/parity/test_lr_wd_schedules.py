"""Learning rate and weight decay of every step against values recorded from Megatron-Core."""

import json
from pathlib import Path

import pytest
import torch

from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.optim.schedules import build_schedule

STYLES = {"inverse-square-root": "inverse_square_root", "WSD": "wsd"}


def _configs(args: dict, unit: str) -> tuple[OptimizerConfig, SchedulerConfig]:
    optimizer = OptimizerConfig(lr=args["max_lr"], weight_decay=args["end_wd"])
    given = {
        "lr_warmup": args["lr_warmup_steps"],
        "lr_decay": args["lr_decay_steps"],
        "weight_decay_incr": args["wd_incr_steps"],
    }
    if args["lr_decay_style"] == "WSD":
        given["lr_wsd_decay"] = args["wsd_decay_steps"]
    scheduler = SchedulerConfig(
        lr_decay_style=STYLES.get(args["lr_decay_style"], args["lr_decay_style"]),
        lr_warmup_init=args["init_lr"],
        min_lr=args["min_lr"],
        lr_wsd_decay_style=args.get("lr_wsd_decay_style", "exponential"),
        weight_decay_style=args["wd_incr_style"],
        weight_decay_start=args["start_wd"],
        weight_decay_end=args["end_wd"],
        **{f"{name}_{unit}": value for name, value in given.items()},
    )
    return optimizer, scheduler


@pytest.mark.parametrize("index", range(11))
def test_recorded_schedule(golden: Path, index: int) -> None:
    cases = json.loads((golden / "data" / "schedules" / "lr_wd.json").read_text())
    assert len(cases) == 11
    case = cases[index]
    samples_per_step = case["increment"]
    unit = "steps" if samples_per_step == 1 else "samples"
    optimizer_config, config = _configs(case["args"], unit)
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = torch.optim.AdamW([parameter], lr=optimizer_config.lr)
    schedule = build_schedule(
        optimizer, optimizer_config, config, total_steps=70, global_batch_size=samples_per_step
    )
    for lr, weight_decay in zip(case["lr"], case["weight_decay"], strict=True):
        group = optimizer.param_groups[0]
        assert group["lr"] == pytest.approx(lr, rel=1e-14, abs=1e-18)
        assert group["weight_decay"] == pytest.approx(weight_decay, rel=1e-14, abs=1e-18)
        optimizer.step()
        schedule.step()
