"""What no check can know before the start is refused by name on the rank that meets it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torchmetrics import MeanMetric

from tests.harness import RankError, run_ranks_fresh
from tests.lightning_cases import LAYOUTS, Case, Net, Scenario, run_all


def second_order(case: Case) -> dict[str, Any]:
    class Module(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    return case.fit(module=Module())


class Twice(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        closure()
        return super().step(closure)


def evaluated_twice(case: Case) -> dict[str, Any]:
    class Module(Net):
        def configure_optimizers(self) -> Any:
            return Twice(self.parameters(), lr=0.1)

    return case.fit(module=Module())


def metric_in_step(case: Case) -> dict[str, Any]:
    metric = MeanMetric()

    class Module(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            metric.update(self.loss(batch))
            self.log("metric", metric)

    return case.fit(module=Module())


def group_in_log(case: Case) -> dict[str, Any]:
    class Module(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("x", self.loss(batch), sync_dist_group="any")

    return case.fit(module=Module())


def other_reduction(case: Case) -> dict[str, Any]:
    class Module(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("x", self.loss(batch), reduce_fx=torch.median)

    return case.fit(module=Module())


def graph_in_log(case: Case) -> dict[str, Any]:
    class Module(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("x", loss, enable_graph=True)
            return loss

    return case.fit(module=Module())


def gather_in_step(case: Case) -> dict[str, Any]:
    class Module(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.all_gather(loss.detach())
            return loss

    return case.fit(module=Module())


def changed_when_loaded(case: Case) -> dict[str, Any]:
    class Module(Net):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"].clear()

    path = case.folder / "a.ckpt"
    trainer = case.trainer()
    trainer.fit(Module(), case.train_loader(1))
    trainer.save_checkpoint(path)
    case.trainer(max_epochs=2).fit(Module(), case.train_loader(1), ckpt_path=path)
    return {}


def kept_gradients(case: Case) -> dict[str, Any]:
    class Module(Net):
        def optimizer_zero_grad(self, *args: Any) -> None:
            """Keeps what is there."""

        def on_before_zero_grad(self, optimizer: Any) -> None:
            for parameter in self.parameters():
                parameter.grad = torch.ones_like(parameter)

    return case.fit(module=Module())


def storage_options(case: Case) -> dict[str, Any]:
    trainer = case.trainer()
    trainer.fit(Net(), case.train_loader(1))
    trainer.save_checkpoint(case.folder / "a.ckpt", storage_options={"secret": 1})
    return {}


WHILE_RUNNING: dict[str, tuple[tuple[str, ...], str, Scenario]] = {
    "lbfgs": (("dp", "tp", "pp"), "LBFGS evaluates the closure several times", second_order),
    "closure_twice": (("dp",), "Twice evaluates the closure several times", evaluated_twice),
    "metric_in_step": (("pp",), "a torchmetrics object", metric_in_step),
    "sync_dist_group_refused": (("dp", "tp", "pp"), "sync_dist_group=", group_in_log),
    "enable_graph": (("dp", "tp", "pp"), "enable_graph=True", graph_in_log),
    "reduce_fx": (("dp",), "reduce_fx=<built-in method median", other_reduction),
    "gather_in_step": (("pp",), "all_gather .*pipeline_parallel_size", gather_in_step),
    "changed_when_loaded": (("dp",), "on_load_checkpoint: the state dict", changed_when_loaded),
    "storage_options": (("dp", "tp", "pp"), "storage_options=", storage_options),
    "kept_gradients": (("dp",), "optimizer_zero_grad", kept_gradients),
}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=() if layout == layouts[-1] else pytest.mark.slow)
        for name, (layouts, _, _) in WHILE_RUNNING.items()
        for layout in layouts
    ],
)
def test_refused_while_running(name: str, layout: str, tmp_path: Path) -> None:
    _, message, scenario = WHILE_RUNNING[name]
    with pytest.raises(RankError, match=f"(?s){message}"):
        run_ranks_fresh(run_all, LAYOUTS[layout][0], layout, [scenario], str(tmp_path), timeout=60)
