"""Training under Lightning's flags and hooks: every layout against Lightning's own single process.

Which scenario stands for which row of `docs/lightning.md`, and in which layouts it runs, is said in
`tests/lightning_matrix.py`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler
from torch.optim.lr_scheduler import ExponentialLR, LinearLR, OneCycleLR, ReduceLROnPlateau

from tests.harness import RankError, run_ranks_fresh
from tests.lightning_cases import LAYOUTS, SOME, Case, Net, assert_same, cases_of, facts_of, run_all

# ---------------------------------------------------------------------- gradients and steps


def plain_fit(case: Case) -> dict[str, Any]:
    """Two epochs with validation and a logger: what every other scenario varies."""
    return case.fit(max_epochs=2, log_every_n_steps=2)


def clip_by_norm(case: Case) -> dict[str, Any]:
    return case.fit(gradient_clip_val=0.3)


def clip_by_value(case: Case) -> dict[str, Any]:
    return case.fit(gradient_clip_val=0.02, gradient_clip_algorithm="value")


def accumulate(case: Case) -> dict[str, Any]:
    facts = case.fit(accumulate_grad_batches=3, max_epochs=2, log_every_n_steps=1)
    return {key: facts[key] for key in ("losses", "steps", "rates", "weights")}


def accumulation_scheduler(case: Case) -> dict[str, Any]:
    scheduler = GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})
    facts = case.fit(scheduler, max_epochs=3)
    return {key: facts[key] for key in ("losses", "steps", "weights")}


class Hooked(Net):
    """Overrides the hooks around an optimizer step, each with a visible effect."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []
        self.had: list[bool] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.had.append(all(p.grad is not None for p in self.parameters()))
        for parameter in self.parameters():
            parameter.grad.mul_(0.5)  # what a hook does to p.grad reaches the optimizer

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(
            optimizer, gradient_clip_val=0.2, gradient_clip_algorithm=gradient_clip_algorithm
        )

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + batch_idx)  # warm-up as in Lightning's docs
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=True)


def step_hooks(case: Case) -> dict[str, Any]:
    module = Hooked()
    return {**case.fit(module=module), "had": module.had}


class Frozen(Net):
    """The first layer keeps its values."""

    def __init__(self) -> None:
        super().__init__()
        self.network[0].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def frozen(case: Case) -> dict[str, Any]:
    return case.fit(module=Frozen(), gradient_clip_val=0.5)


# ---------------------------------------------------------------------- learning rates


class Scheduled(Net):
    """A module whose optimizer has the schedulers that `make` builds."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make
        self.scheduler_steps: list[str] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        return [optimizer], self.make(self, optimizer)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.scheduler_steps.append(type(scheduler).__name__)
        super().lr_scheduler_step(scheduler, metric)


def plateau(case: Case) -> dict[str, Any]:
    def make(module: Any, optimizer: Any) -> Any:
        scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)  # hardly ever better
        return [{"scheduler": scheduler, "monitor": "val_loss", "interval": "epoch"}]

    module = Scheduled(make)
    return {**case.fit(module=module, max_epochs=4), "steps_taken": module.scheduler_steps}


def several_schedulers(case: Case) -> dict[str, Any]:
    def make(module: Any, optimizer: Any) -> Any:
        warm_up = LinearLR(optimizer, start_factor=0.1, total_iters=4)
        decay = ExponentialLR(optimizer, gamma=0.5)
        return [
            {"scheduler": warm_up, "interval": "step", "frequency": 2},
            {"scheduler": decay, "interval": "epoch", "name": "decay"},
        ]

    module = Scheduled(make)
    facts = case.fit(module=module, max_epochs=2, accumulate_grad_batches=2)
    del facts["metrics"], facts["rank0"]  # with accumulation they are the window's, see below
    return {**facts, "steps_taken": module.scheduler_steps}


def one_cycle(case: Case) -> dict[str, Any]:
    expected = []

    def make(module: Any, optimizer: Any) -> Any:
        expected.append(module.trainer.estimated_stepping_batches)
        scheduler = OneCycleLR(optimizer, max_lr=0.2, total_steps=expected[0])
        return [{"scheduler": scheduler, "interval": "step"}]

    facts = case.fit(module=Scheduled(make), max_epochs=2, accumulate_grad_batches=2)
    del facts["metrics"], facts["rank0"]
    return {**facts, "expected": expected}


# ---------------------------------------------------------------------- how long, how much


def limits(case: Case) -> dict[str, Any]:
    """Also whether predictions come back, and `test` and `predict` after `fit`."""
    module = Net()
    trainer = case.trainer(
        limit_train_batches=3,
        limit_val_batches=1,
        limit_test_batches=0.5,
        limit_predict_batches=2,
        max_epochs=2,
    )
    trainer.fit(module, case.train_loader(), case.loader(2, seed=6))
    tested = trainer.test(module, case.loader(4, seed=7))
    predicted = trainer.predict(module, case.loader(4, seed=7))
    return {
        "step": trainer.global_step,
        "batches": [trainer.num_training_batches, trainer.num_val_batches],
        "tested": tested,
        "predicted": case.own_part(torch.cat(predicted)),
        "nothing": trainer.predict(module, case.loader(1), return_predictions=False),
        "weights": case.weights(trainer),
    }


def overfit(case: Case) -> dict[str, Any]:
    return case.fit(overfit_batches=2, max_epochs=2)


def fast_dev_run(case: Case) -> dict[str, Any]:
    facts = case.fit(fast_dev_run=2)
    del facts["rank0"]  # Lightning takes the logger away
    return facts


def end_of_training(case: Case) -> dict[str, Any]:
    """max_steps, min_steps and min_epochs against early stopping, max_time."""
    worse = EarlyStopping("val_loss", mode="max", patience=0)
    found = {
        "max_steps": case.fit(max_steps=4, max_epochs=-1),
        "min_epochs": case.fit(worse, max_epochs=5, min_epochs=3),
        "min_steps": case.fit(
            EarlyStopping("val_loss", mode="max", patience=0), max_epochs=5, min_steps=8
        ),
        "max_time": case.fit(max_time={"seconds": 0}, max_epochs=5),
    }
    return {
        name: {key: facts[key] for key in ("losses", "steps", "epoch")}
        for name, facts in found.items()
    }


def when_to_validate(case: Case) -> dict[str, Any]:
    found = [
        case.fit(val_check_interval=2, num_sanity_val_steps=2),
        case.fit(val_check_interval=0.5),
        case.fit(check_val_every_n_epoch=2, max_epochs=4),
        case.fit(val_check_interval=4, check_val_every_n_epoch=None, max_epochs=2),
    ]
    return {"validations": [facts["validations"] for facts in found]}


# ---------------------------------------------------------------------- modes


class Modes(Net):
    """Looks at torch's switches, before the network is called: every stage gets there."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def look(self) -> None:
        self.seen.append(
            (
                self.training,
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                torch.is_anomaly_enabled(),
                torch.are_deterministic_algorithms_enabled(),
                torch.backends.cudnn.benchmark,
            )
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.look()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.look()
        super().validation_step(batch, batch_idx)


def modes(case: Case) -> dict[str, Any]:
    seen = []
    for options in (
        {},
        {"inference_mode": False, "detect_anomaly": True},
        {"deterministic": True, "benchmark": True},
        {"deterministic": False, "benchmark": False},
    ):
        module = Modes()
        case.fit(module=module, limit_train_batches=1, limit_val_batches=1, **options)
        seen.append(list(dict.fromkeys(module.seen)))  # a pipeline calls once per micro-batch
    return {"seen": seen}


def barebones(case: Case) -> dict[str, Any]:
    facts = case.fit(
        barebones=True,
        logger=None,
        enable_checkpointing=None,
        num_sanity_val_steps=None,
        enable_progress_bar=None,
        enable_model_summary=None,
    )
    del facts["rank0"]
    return facts


def profiled(case: Case) -> dict[str, Any]:
    trainer = case.trainer(profiler="simple")
    trainer.fit(Net(), case.train_loader(), case.loader(2, seed=6))
    recorded = trainer.profiler.recorded_durations
    ours, theirs = type(trainer.strategy).__name__, "[Strategy]Strategy"
    return {
        "calls": {
            name.replace(f"[Strategy]{ours}", theirs): len(times)
            for name, times in recorded.items()
            if ("training_step" in name or "optimizer_step" in name or "backward" in name)
            and "RunGuard" not in name  # the strategy's own callbacks
            and "Preemption" not in name
        }
    }


def double_precision(case: Case) -> dict[str, Any]:
    return case.fit(precision="64-true", max_epochs=2)


def fit_again(case: Case) -> dict[str, Any]:
    """One module and one Trainer: validate, fit, validate, fit on, test."""
    module = Net()
    trainer = case.trainer()
    before = trainer.validate(module, case.loader(2, seed=6))
    trainer.fit(module, case.train_loader())
    between = trainer.validate(module, case.loader(2, seed=6))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, case.train_loader())
    after = trainer.test(module, case.loader(2, seed=6))
    return {
        "before": before,
        "between": between,
        "after": after,
        "epoch": trainer.current_epoch,
        "weights": case.weights(trainer),
    }


SCENARIOS = [
    plain_fit,
    clip_by_norm,
    clip_by_value,
    accumulate,
    accumulation_scheduler,
    step_hooks,
    frozen,
    plateau,
    several_schedulers,
    one_cycle,
    limits,
    overfit,
    fast_dev_run,
    end_of_training,
    when_to_validate,
    modes,
    barebones,
    profiled,
    double_precision,
    fit_again,
]


GROUPS = [(("dp", "tp", "pp"), SCENARIOS)]


@pytest.mark.parametrize(("scenario", "layout", "group"), cases_of(GROUPS))
def test_same_meaning(scenario: Any, layout: str, group: Any) -> None:
    assert_same(scenario, layout, group)


@pytest.mark.parametrize(
    ("scenario", "plain"), [(clip_by_norm, "one"), (clip_by_value, "one"), (overfit, "one")]
)
def test_the_feature_changes_the_training(scenario: Any, plain: str) -> None:
    """What is compared above would tell whether the flag had been ignored."""
    facts = facts_of(plain, tuple(SCENARIOS))[0]
    other, usual = facts[scenario.__name__]["losses"], facts["plain_fit"]["losses"]
    assert any(abs(a - b) > 1e-3 for a, b in zip(other[1:], usual[1:], strict=False))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("layout", ["dp", "tp", "pp"])
def test_low_precision_trains_alike(layout: str, precision: str, tmp_path: Path) -> None:
    """Losses as Lightning's in one process, to what bfloat16 resolves."""
    if precision == "bf16-true" and layout != "dp" and not mean_squares_take_two_dtypes():
        pytest.skip("mse_loss of this torch has no gradient where its arguments' dtypes differ")
    scenario = {"bf16-mixed": mixed, "bf16-true": low}[precision]
    want = facts_of("one", (scenario,))[0][scenario.__name__]["losses"]
    for rank in facts_of(layout, (scenario,)):
        assert rank[scenario.__name__]["losses"] == pytest.approx(want, rel=0.05, abs=0.02)


def mean_squares_take_two_dtypes() -> bool:
    """Not so in torch 2.11: docs/own_modules.md says what to write there."""
    try:
        F.mse_loss(
            torch.ones(1, dtype=torch.bfloat16, requires_grad=True), torch.ones(1)
        ).backward()
    except RuntimeError:
        return False
    return True


def mixed(case: Case) -> dict[str, Any]:
    return {"losses": case.fit(precision="bf16-mixed")["losses"]}


def low(case: Case) -> dict[str, Any]:
    return {"losses": case.fit(precision="bf16-true")["losses"]}


def anomaly(case: Case) -> dict[str, Any]:
    class Module(Net):
        def loss(self, batch: Any) -> Any:
            x, y = batch
            return ((self(x) - y) * 0).abs().sqrt().mean()  # the gradient of a root at 0, times 0

    return case.fit(module=Module(), detect_anomaly=True)


@pytest.mark.parametrize("layout", SOME)
def test_an_anomaly_is_detected(layout: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="returned nan values in its 0th output"):
        run_ranks_fresh(run_all, LAYOUTS[layout][0], layout, [anomaly], str(tmp_path), timeout=60)
