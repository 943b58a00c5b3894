"""The user's step under the autocast of `precision="bf16-mixed"` and "16-mixed", and the network of
the plan without.
"""

import functools
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from typing_extensions import override

from megatron_lightning.config import (
    DataParallelConfig,
    GPTConfig,
    LossScaleConfig,
    MultiTokenPredictionConfig,
    RecomputeConfig,
    RuntimeConfig,
)
from megatron_lightning.precision import MegatronPrecision
from tests.distributed.test_moe_compiled import counted
from tests.harness import run_ranks_fresh
from tests.layout_runs import Batches, Run, assert_same_training, tiny_config, train
from tests.user_modules import Block, Decoder, OwnTransformer, decoder_plan
from tests.user_runs import LAYOUTS, fit_module, quiet_trainer, user_run

SLOW = pytest.mark.slow
DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class Without(MegatronPrecision):
    """As if there were no autocast."""

    @override
    @contextmanager
    def forward_context(self) -> Any:
        yield


def plugins(precision: str, kind: type[MegatronPrecision] = MegatronPrecision) -> dict[str, Any]:
    """Options of a Trainer."""
    return {"plugins": [kind(MixedPrecision(precision, "cpu"))]}  # type: ignore[arg-type]


# ---------------------------------------------------------------- what the code of a step sees


def seen_here() -> tuple[bool, torch.dtype]:
    """(whether autocast is on, dtype of a product of float32 matrices)."""
    return torch.is_autocast_enabled("cpu"), (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


class WatchedBlock(Block):
    """Notes what it sees in forward passes and recomputations; fails when it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(seen_here())
        if self.fails:
            raise ArithmeticError("a layer fails")
        return super().forward(x)


class WatchedDecoder(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(WatchedBlock() for _ in range(4))


class Watched(OwnTransformer):
    """Notes what each of its steps sees before and behind the call of the network."""

    def __init__(self) -> None:
        super().__init__(WatchedDecoder)
        self.seen: dict[str, list[Any]] = {}
        self.failures = 0

    def _watched(self, name: str, step: Any, batch: Any, batch_idx: int) -> Any:
        places = self.seen.setdefault(name, [])
        places.append(("before", *seen_here()))
        self._fail(batch, batch_idx)
        result = step(batch, batch_idx)
        places.append(("behind", *seen_here()))
        return result

    def _fail(self, batch: Any, batch_idx: int) -> None:
        """A step that goes on after an error within the network."""
        if batch_idx >= self.failures:
            return
        for block in self.net.blocks:
            block.fails = True
        with pytest.raises(ArithmeticError):
            self.net(batch["tokens"])
        for block in self.net.blocks:
            block.fails = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self._watched("training", super().training_step, batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self._watched("validation", super().validation_step, batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self._watched("test", super().validation_step, batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self._watched("predict", super().predict_step, batch, batch_idx)


class WatchedBatches(Batches):
    def test_dataloader(self) -> Any:
        return self._loader(2)

    def predict_dataloader(self) -> Any:
        return self._loader(2)


def watch(rank: int, world_size: int, run: Run, failures: int = 0) -> dict[str, Any]:
    """Everything that a Trainer does; a set of what was seen where."""
    module, trainer = Watched(), quiet_trainer(run, world_size, [])
    module.failures = failures
    data = WatchedBatches(run)
    trainer.fit(module, data)
    trainer.test(module, data)
    trainer.predict(module, data)
    blocks = [m for m in module.modules() if isinstance(m, WatchedBlock)]
    return {
        "around": {name: set(places) for name, places in module.seen.items()},
        "inside": {place for block in blocks for place in block.seen},
        "calls": {len(block.seen) for block in blocks},
        "at_last": seen_here(),
    }


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        ("one", "bf16-mixed"),
        ("one", "16-mixed"),
        ("pp2", "bf16-mixed"),
        pytest.param("tp2_sp_pp2", "bf16-mixed", marks=SLOW),
        pytest.param("fsdp", "bf16-mixed", marks=SLOW),
    ],
)
def test_on_around_the_network_and_off_inside(layout: str, precision: str) -> None:
    """Also in recomputations, evaluations, and where a stage ends the step in the middle."""
    more = {
        "one": (1, {}),
        "fsdp": (2, dict(data_parallel=DataParallelConfig(sharding="fsdp"))),
    }
    size, options = (LAYOUTS | more)[layout]
    recompute = RecomputeConfig(mode="full", method="uniform")
    run = user_run(
        steps=2,
        layout=options | dict(plan=decoder_plan(), recompute=recompute),
        trainer=plugins(precision),
    )
    ranks = run_ranks_fresh(watch, size, run)
    on, off = (True, DTYPES[precision]), (False, torch.float32)
    for number, rank in enumerate(ranks):
        assert rank["around"].keys() == {"training", "validation", "test", "predict"}
        last = number >= size // 2 or "pp2" not in layout
        for places in rank["around"].values():
            assert places == {(place, *on) for place in ("before", "behind")[: 1 + last]}
        assert rank["inside"] == {off}
        assert rank["at_last"] == off
    micro_batches = 4 if "pp2" in layout else 1
    forwards = 2 * 2 + 4 * 2  # two steps, each recomputed; sanity, validation, test, predict
    assert ranks[0]["calls"] == {forwards * micro_batches}


def test_after_an_error_inside() -> None:
    run = user_run(steps=2, layout=dict(plan=decoder_plan()), trainer=plugins("bf16-mixed"))
    seen = run_ranks_fresh(watch, 1, run, 1)[0]
    on = (True, torch.bfloat16)
    for places in seen["around"].values():
        assert places == {("before", *on), ("behind", *on)}
    assert seen["inside"] == {seen["at_last"]} == {(False, torch.float32)}


# ---------------------------------------------------------------- losses against float32 targets


class Regression(OwnTransformer):
    """Logits against float32 targets, as the network gives them."""

    def prepared(self, scores: Tensor) -> Tensor:
        """What a loss gets."""
        return scores

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        scores = self.net(batch["tokens"])
        target = 4 * F.one_hot(batch["labels"], scores.shape[-1]).float()
        squares = F.mse_loss(self.prepared(scores), target)
        edges = F.huber_loss(self.prepared(scores), target, delta=0.1)
        return squares + edges, torch.tensor(float(batch["labels"].numel()))


class Cast(Regression):
    """What has to be written where nothing is autocast."""

    def prepared(self, scores: Tensor) -> Tensor:
        return scores.float()


@functools.cache
def regression_alone() -> dict[str, Any]:
    run = user_run(layout=dict(plan=decoder_plan()), trainer=plugins("bf16-mixed", Without))
    return run_ranks_fresh(fit_module, 1, Cast, run)[0]


def assert_bitwise(got: Any, want: Any, where: str = "run") -> None:
    """Equal plain objects."""
    if isinstance(want, Tensor):
        assert torch.equal(got, want), where
    elif isinstance(want, dict):
        assert got.keys() == want.keys(), where
        for key, value in want.items():
            assert_bitwise(got[key], value, f"{where}.{key}")
    elif isinstance(want, list | tuple):
        assert len(got) == len(want), where
        for number, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_bitwise(a, b, f"{where}[{number}]")
    else:
        assert got == want, where


def test_losses_against_float32_targets_are_those_of_a_cast() -> None:
    run = user_run(layout=dict(plan=decoder_plan()), trainer=plugins("bf16-mixed"))
    got = run_ranks_fresh(fit_module, 1, Regression, run)[0]
    assert_bitwise(got, regression_alone())
    assert got["losses"][-1] < got["losses"][0]


@pytest.mark.parametrize(
    "layout",
    [
        "pp2",
        pytest.param("dp2", marks=SLOW),
        pytest.param("tp2_sp", marks=SLOW),
        pytest.param("tp2_sp_pp2", marks=SLOW),
    ],
)
def test_losses_against_float32_targets_in_layouts(layout: str) -> None:
    size, options = (LAYOUTS | {"dp2": (2, {})})[layout]
    run = user_run(layout=options | dict(plan=decoder_plan()), trainer=plugins("bf16-mixed"))
    ranks = run_ranks_fresh(fit_module, size, Regression, run)
    assert_same_training(ranks, regression_alone(), torch.bfloat16)


# ---------------------------------------------------------------- modules of this package


def zoo_runs(precision: str, config: GPTConfig, options: dict[str, Any], **more: Any) -> list[Run]:
    """The same run with autocast and without."""
    layout = options | dict(loss_scale=LossScaleConfig(initial=1024.0))
    return [
        Run(config=config, layout=layout, trainer=plugins(precision, kind) | more, steps=3)
        for kind in (MegatronPrecision, Without)
    ]


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        ("one", "bf16-mixed"),
        pytest.param("one", "16-mixed", marks=SLOW),
        pytest.param("tp2_sp_pp2", "bf16-mixed", marks=SLOW),
    ],
)
def test_the_zoo_trains_bitwise_as_without(layout: str, precision: str) -> None:
    """Losses of several depths, gradients, norms, weights, validation."""
    size, options = (LAYOUTS | {"one": (1, {})})[layout]
    config = tiny_config(multi_token_prediction=MultiTokenPredictionConfig(), num_layers=2)
    got, want = (run_ranks_fresh(train, size, run) for run in zoo_runs(precision, config, options))
    assert_bitwise(got, want)


@pytest.mark.slow
def test_compiled_layers_see_no_difference() -> None:
    """Not even as much as would compile them anew."""
    options = dict(runtime=RuntimeConfig(compile_layers=True))
    runs = zoo_runs("bf16-mixed", tiny_config(num_layers=1), options, limit_val_batches=0)
    got, want = (run_ranks_fresh(counted, 1, run, timeout=280)[0] for run in runs)
    assert_bitwise(got, want)
    assert got["graphs"][-1] == got["graphs"][0] > 0


# ---------------------------------------------------------------- manual optimization


class Manual(Regression):
    """Drives its optimizer itself, and notes where backward passes run."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.seen: set[Any] = set()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss, _ = self.losses(batch)
        hidden = loss * 1
        hidden.register_hook(lambda _: self.seen.add(("backward", *seen_here())))
        self.manual_backward(hidden)
        self.seen.add(("step", *seen_here()))
        optimizer.step()
        return {"loss": loss.detach()}


class ManualCast(Cast, Manual):
    pass


def fit_manually(rank: int, world_size: int, make: Any, run: Run) -> dict[str, Any]:
    module, trainer = make(), quiet_trainer(run, world_size, [])
    trainer.fit(module, Batches(run))
    return {"seen": module.seen, "final": {k: v.clone() for k, v in module.state_dict().items()}}


def test_manual_optimization() -> None:
    layout = dict(plan=decoder_plan())
    run = user_run(layout=layout, trainer=plugins("bf16-mixed"), steps=3)
    got = run_ranks_fresh(fit_manually, 1, Manual, run)[0]
    assert got["seen"] == {
        ("step", True, torch.bfloat16),
        ("backward", False, torch.float32),
    }
    run = user_run(layout=layout, trainer=plugins("bf16-mixed", Without), steps=3)
    want = run_ranks_fresh(fit_manually, 1, ManualCast, run)[0]
    assert_bitwise(got["final"], want["final"])
