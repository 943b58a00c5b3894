"""What the tests of Lightning's meaning share: one user module for all layouts, its data, a probe
that keeps what can be compared, and the comparison with Lightning's own single process.

A scenario is a function of a `Case`: it makes Trainers through the case, uses one or more features,
and returns facts. It runs once under Lightning's own strategy in one process ("one") and once on
every rank of a layout; the facts must be equal.
"""

import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from megatron_lightning.config.plan import ParallelPlan, column, follows, replicated, row
from megatron_lightning.strategies import MegatronStrategy
from tests.harness import RankError, run_ranks_fresh
from tests.layout_runs import assemble, boxes

FEATURES, GLOBAL_BATCH, BATCHES = 6, 8, 6
RELATIVE, ABSOLUTE = 2e-5, 2e-6

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp": (2, {}),
    "tp": (2, {"tensor_parallel_size": 2}),
    "pp": (2, {"pipeline_parallel_size": 2}),
    "tp_pp": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "pp_dp": (4, {"pipeline_parallel_size": 2}),
    "tp_dp": (4, {"tensor_parallel_size": 2}),
}
SOME = [pytest.param(name, marks=pytest.mark.slow) for name in ("one", "dp", "tp")] + ["pp"]
"""Every layout for a test that ends in an error; the hardest one in the quick suite."""
PLAN = ParallelPlan(
    splits={
        "0.weight": column(),
        "0.bias": follows(),
        "2.weight": row(),
        "2.bias": replicated(),
        "4.*": replicated(),
    }
)


def make_network() -> nn.Sequential:
    """Three linear layers, the same values in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)
        )


def make_data(batches: int = BATCHES, seed: int = 5) -> TensorDataset:
    """Samples whose targets a network can learn."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batches * GLOBAL_BATCH, FEATURES, generator=generator)
    return TensorDataset(x, x.sin().sum(1, keepdim=True))


class Net(L.LightningModule):
    """A user's ordinary module. Nothing in it knows of a layout."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        self.network = make_network()

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Rows(Logger):
    """Keeps what Lightning logs, on rank 0 as every logger does."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []
        self.hyper_parameters: list[Any] = []

    name = version = "rows"

    @property
    @rank_zero_experiment
    def experiment(self) -> None:
        return None

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.hyper_parameters.append(dict(params))

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.rows.append({"step": -1.0 if step is None else float(step), **metrics})


class Probe(L.Callback):
    """Keeps losses, rates and counts; runs after the user's callbacks."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.steps: list[int] = []
        self.validations: list[int] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        if outputs:
            self.losses.append(float(outputs["loss"]))
        self.rates += [group["lr"] for o in trainer.optimizers for group in o.param_groups]
        self.steps.append(trainer.global_step)

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        if not trainer.sanity_checking:
            self.validations.append(trainer.global_step)

    def facts(self, trainer: L.Trainer) -> dict[str, Any]:
        return {
            "losses": self.losses,
            "rates": self.rates,
            "steps": self.steps,
            "validations": self.validations,
            "epoch": trainer.current_epoch,
        }


@dataclass(frozen=True)
class Part:
    """Every `size`-th row of a tensor, from row `rank`."""

    rank: int
    size: int
    rows: Tensor


@dataclass
class Case:
    """One scenario on one rank of one layout."""

    layout: str
    rank: int
    world_size: int
    folder: Path
    """A folder of this scenario, the same on all ranks."""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def alone(self) -> bool:
        """Lightning's own strategy in one process: the reference."""
        return self.layout == "one"

    @property
    def data_parallel_size(self) -> int:
        parts = 1
        for size in LAYOUTS[self.layout][1].values():
            parts *= size
        return self.world_size // parts

    @property
    def batch_size(self) -> int:
        """Of one rank's loader, so that a step sees `GLOBAL_BATCH` samples in every layout."""
        return GLOBAL_BATCH // self.data_parallel_size

    def strategy(self, **changes: Any) -> Any:
        if self.alone:
            return "auto"
        layout = LAYOUTS[self.layout][1]
        plan = {"plan": PLAN} if layout else {}
        return MegatronStrategy(**{**layout, **plan, **changes})

    def trainer(self, *callbacks: L.Callback, strategy: Any = None, **changes: Any) -> L.Trainer:
        """A quiet Trainer of this layout."""
        options: dict[str, Any] = dict(
            accelerator="cpu",
            devices=self.world_size,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            default_root_dir=str(self.folder),
        )
        return L.Trainer(
            strategy=strategy or self.strategy(),
            callbacks=list(callbacks),
            **{**options, **changes},
        )

    def loader(self, batches: int = BATCHES, *, seed: int = 5, **options: Any) -> DataLoader:
        """A loader in the order of the data set."""
        return DataLoader(make_data(batches, seed), batch_size=self.batch_size, **options)

    def train_loader(self, batches: int = BATCHES) -> DataLoader:
        """A loader whose global batches are the same in every layout: where Lightning doesn't put
        its DistributedSampler, there is one already.
        """
        data = make_data(batches)
        order = None
        if self.data_parallel_size == 1:
            order = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True, seed=0)
        return DataLoader(data, batch_size=self.batch_size, sampler=order)

    def weights(self, trainer: L.Trainer) -> dict[str, Any]:
        """What this rank holds of the weights, as boxes."""
        module = trainer.lightning_module
        if not self.alone:
            return boxes(trainer, "value")
        return {
            name: (p.shape, (0,) * p.dim(), tuple(p.shape), p.detach().clone())
            for name, p in module.named_parameters()
        }

    def own_part(self, everything: Tensor) -> "Part":
        """Predictions of this rank; data-parallel ranks have every n-th sample."""
        size = self.data_parallel_size
        return Part(self.rank % size if size > 1 else 0, size, everything)

    def fit(
        self,
        *callbacks: L.Callback,
        module: L.LightningModule | None = None,
        validate: bool = True,
        batches: int = BATCHES,
        **options: Any,
    ) -> dict[str, Any]:
        """Fit on the usual data; everything that one may compare."""
        probe, rows = Probe(), Rows()
        trainer = self.trainer(*callbacks, probe, **{"logger": rows, **options})
        module = Net() if module is None else module
        val = self.loader(2, seed=6) if validate else None
        trainer.fit(module, self.train_loader(batches), val)
        return {
            **probe.facts(trainer),
            "metrics": numbers(trainer.callback_metrics),
            "rank0": {"rows": [numbers(each) for each in rows.rows]},
            "weights": self.weights(trainer),
        }


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in metrics.items()}


Scenario = Callable[[Case], dict[str, Any]]


def run_all(
    rank: int, world_size: int, layout: str, scenarios: Sequence[Scenario], folder: str
) -> dict[str, dict[str, Any]]:
    """Run scenarios one after another in this rank."""
    facts = {}
    for scenario in scenarios:
        own = Path(folder) / scenario.__name__
        own.mkdir(exist_ok=True)
        torch.manual_seed(11)
        try:
            facts[scenario.__name__] = scenario(Case(layout, rank, world_size, own))
        except Exception as error:
            error.add_note(f"in {scenario.__name__} at layout {layout!r}")
            raise
    return facts


def facts_of(layout: str, scenarios: tuple[Scenario, ...]) -> list[dict[str, dict[str, Any]]]:
    """Facts of each rank, run once for all tests of a file."""
    facts = _facts_or_error(layout, scenarios)
    if isinstance(facts, RankError):
        raise facts
    return facts


@functools.cache
def _facts_or_error(layout: str, scenarios: tuple[Scenario, ...]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        try:
            return run_ranks_fresh(run_all, LAYOUTS[layout][0], layout, scenarios, folder)
        except RankError as error:
            return error


Groups = Sequence[tuple[Sequence[str], Sequence[Scenario]]]
"""Layouts, and the scenarios that run in each of them, one after another in the same ranks."""


def cases_of(groups: Groups) -> list[Any]:
    """Parameters (scenario, layout, group) of a test over groups."""
    return [
        pytest.param(scenario, layout, tuple(group), id=f"{scenario.__name__}-{layout}")
        for layouts, group in groups
        for scenario in group
        for layout in layouts
    ]


def assert_same(scenario: Scenario, layout: str, scenarios: Sequence[Scenario]) -> None:
    """The facts of `scenario` on every rank of `layout` equal those of Lightning alone."""
    name = scenario.__name__
    want = facts_of("one", tuple(scenarios))[0][name]
    ranks = [facts[name] for facts in facts_of(layout, tuple(scenarios))]
    compare_ranks(ranks, want)


def compare_ranks(ranks: Sequence[Mapping[str, Any]], want: Mapping[str, Any]) -> None:
    for rank, got in enumerate(ranks):
        assert got.keys() == want.keys()
        for key, value in want.items():
            if not key.startswith("weights") and (key != "rank0" or rank == 0):
                compare(got[key], value, f"rank {rank}: {key}")
    for key in (key for key in want if key.startswith("weights")):
        compare(assemble([got[key] for got in ranks]), assemble([want[key]]), key)


def compare(got: Any, want: Any, where: str) -> None:
    """Equal, numbers within the tolerance of float32 sums in another order."""
    if isinstance(want, Part):
        compare(got.rows, want.rows[got.rank :: got.size], where)
    elif isinstance(want, Tensor):
        torch.testing.assert_close(
            got.float(), want.float(), rtol=RELATIVE, atol=ABSOLUTE, msg=lambda m: f"{where}: {m}"
        )
    elif isinstance(want, Mapping):
        assert sorted(got) == sorted(want), f"{where}: {sorted(got)} instead of {sorted(want)}"
        for key in want:
            compare(got[key], want[key], f"{where}[{key!r}]")
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want), f"{where}: {got} instead of {want}"
        for index, (a, b) in enumerate(zip(got, want, strict=True)):
            compare(a, b, f"{where}[{index}]")
    elif isinstance(want, float) and isinstance(got, float):
        same = got == want or (got != got and want != want)
        assert same or abs(got - want) <= ABSOLUTE + RELATIVE * abs(want), (
            f"{where}: {got} instead of {want}"
        )
    else:
        assert got == want, f"{where}: {got!r} instead of {want!r}"
