"""Every hook of modules and callbacks: called in the same order, as often, in every layout. Manual
optimization.
"""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import LayerSync
from torch import Tensor, nn

from tests.lightning_cases import (
    Case,
    Net,
    assert_same,
    cases_of,
    facts_of,
    make_network,
    numbers,
)
from tests.lightning_rows import HOOKS

CALLBACK_HOOKS = [
    name
    for name in dir(L.Callback)
    if name.startswith("on_") or name in ("setup", "teardown", "state_dict", "load_state_dict")
]
MODULE_HOOKS = [
    name
    for name in dir(L.LightningModule)
    if (name.startswith("on_") and name != "on_gpu")
    or name
    in (
        "setup",
        "teardown",
        "prepare_data",
        "configure_model",
        "configure_callbacks",
        "configure_optimizers",
        "configure_gradient_clipping",
        "optimizer_step",
        "optimizer_zero_grad",
        "lr_scheduler_step",
        "transfer_batch_to_device",
    )
]


def recording(base: type, hooks: list[str], prefix: str) -> type:
    """A subclass of `base` that writes down each call of a hook, and does what `base` does."""

    def wrap(name: str) -> Callable[..., Any]:
        original = getattr(base, name)

        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.__dict__.setdefault("events", []).append(prefix + name)
            return original(self, *args, **kwargs)

        return hook

    return type(f"Recording{base.__name__}", (base,), {name: wrap(name) for name in hooks})


class Stateful(L.Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"kept": 1}


RecordingNet = recording(Net, MODULE_HOOKS, "module.")
RecordingCallback = recording(Stateful, CALLBACK_HOOKS, "")


def hook_order(case: Case) -> dict[str, Any]:
    """Fit with sanity check, accumulation and validation; a checkpoint; resume; test; predict."""
    module, callback = RecordingNet(), RecordingCallback()
    events: list[str] = []
    module.__dict__["events"] = callback.__dict__["events"] = events
    options = {"limit_train_batches": 4, "accumulate_grad_batches": 2, "num_sanity_val_steps": 1}
    trainer = case.trainer(callback, **options)
    loader = case.loader(1, seed=6)
    path = case.folder / f"{case.layout}.ckpt"
    trainer.fit(module, case.train_loader(), loader)
    trainer.save_checkpoint(path)
    trainer.validate(module, loader)
    trainer.test(module, loader)
    trainer.predict(module, loader)
    before, events[:] = list(events), []
    module = RecordingNet()
    module.__dict__["events"] = events
    case.trainer(callback, max_epochs=2, **options).fit(
        module, case.train_loader(), loader, ckpt_path=path
    )
    prepared = "module.prepare_data"
    if case.rank > 0:  # data are prepared on one rank of a machine
        assert prepared not in before + events
    return {
        "events": [each for each in before if each != prepared],
        # a strategy that cuts the model loads when there are optimizers: on_load_checkpoint comes
        # after configure_optimizers, as under Lightning's own model-parallel strategies
        "resumed": sorted(each for each in events if each != prepared),
    }


class Values(Net):
    """What hooks are given and what they change."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Any] = []

    def on_before_backward(self, loss: Tensor) -> None:
        self.given.append(float(loss))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.given.append(float(outputs["loss"]))

    def on_after_backward(self) -> None:
        if self.trainer.fit_loop._should_accumulate():
            return
        for parameter in self.parameters():
            parameter.grad.clamp_(min=-0.05)  # what is changed here reaches the optimizer

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 4 else None  # skips the rest of the epoch


def hook_values(case: Case) -> dict[str, Any]:
    module = Values()
    trainer = case.trainer(max_epochs=2, accumulate_grad_batches=2)
    trainer.fit(module, case.train_loader())
    return {"given": module.given, "step": trainer.global_step, "weights": case.weights(trainer)}


class Skips(Net):
    """Returns None for every other batch: nothing is learned from it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 2 else loss


def skipped_steps(case: Case) -> dict[str, Any]:
    facts = case.fit(module=Skips(), max_epochs=2)
    return {"steps": facts["steps"], "weights": facts["weights"]}


class Gatherer(Net):
    """`all_gather` and `print` in hooks."""

    def on_train_epoch_end(self) -> None:
        value = torch.tensor([float(self.global_rank)])
        gathered = self.all_gather(value)
        self.gathered = sorted(gathered.flatten().tolist())
        self.print("once")


def gathering(case: Case) -> dict[str, Any]:
    module = Gatherer()
    case.fit(module=module, validate=False)
    return {"right": module.gathered == [float(i) for i in range(case.world_size)]}


class EditsCheckpoint(Net):
    """Drops a parameter and adds an entry when it saves; loads without the missing one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))
        self.found: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        kept = checkpoint["state_dict"]
        kept.pop("network.4.bias", None)  # a stage has only its own part
        if "network.4.weight" in kept:
            kept["network.4.weight"] = 0 * kept["network.4.weight"].detach()
        checkpoint["note"] = {"tensor": torch.arange(3)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.found = checkpoint["note"]["tensor"].tolist()


def edited_checkpoint(case: Case) -> dict[str, Any]:
    path = case.folder / f"{case.layout}.ckpt"
    trainer = case.trainer()
    trainer.fit(EditsCheckpoint(), case.train_loader())
    trainer.save_checkpoint(path)
    module = EditsCheckpoint()
    module.strict_loading = False
    tested = case.trainer().test(module, case.loader(2, seed=6), ckpt_path=path)
    return {"tested": tested, "found": module.found}


SCENARIOS = [hook_order, hook_values, skipped_steps, gathering, edited_checkpoint]


# ---------------------------------------------------------------------- manual optimization


class Adversaries(L.LightningModule):
    """Two networks against each other, as a GAN: two optimizers, schedulers, manual backward."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker, self.judge = make_network(), nn.Linear(1, 1)
        nn.init.constant_(self.judge.weight, 0.3)
        nn.init.zeros_(self.judge.bias)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        makes, judges = self.optimizers()
        self.toggle_optimizer(makes)
        makes.zero_grad()
        made = self.maker(x)
        loss = F.softplus(-self.judge(made)).mean() + F.mse_loss(made, y)
        self.manual_backward(loss)
        self.clip_gradients(makes, gradient_clip_val=0.5, gradient_clip_algorithm="value")
        makes.step()
        self.untoggle_optimizer(makes)
        self.toggle_optimizer(judges)
        judges.zero_grad()
        with torch.no_grad():
            made = self.maker(x)
        for part in (F.softplus(-self.judge(y)).mean(), F.softplus(self.judge(made)).mean()):
            self.manual_backward(part)  # gradients of two backward passes add up
        if (batch_idx + 1) % 2 == 0:
            judges.step()
        self.untoggle_optimizer(judges)
        self.log("made", loss, prog_bar=True, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self) -> Any:
        makes = torch.optim.Adam(self.maker.parameters(), lr=0.01)
        judges = torch.optim.SGD(self.judge.parameters(), lr=0.1)
        decays = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (makes, judges)]
        return [makes, judges], decays


def manual_optimization(case: Case) -> dict[str, Any]:
    trainer = case.trainer(max_epochs=2)
    trainer.fit(Adversaries(), case.train_loader())
    return {
        "step": trainer.global_step,
        "metrics": numbers(trainer.callback_metrics),
        "rates": [o.param_groups[0]["lr"] for o in trainer.optimizers],
        "weights": case.weights(trainer),
    }


def compiled_network(case: Case) -> dict[str, Any]:
    """A compiled submodule; a compiled module is refused by Lightning itself."""
    module = Net()
    module.network = torch.compile(module.network, backend="eager")  # type: ignore[assignment]
    facts = case.fit(module=module)
    facts["weights"] = {name.replace("_orig_mod.", ""): v for name, v in facts["weights"].items()}
    return facts


class NotedSync(LayerSync):
    """Notes when Lightning's strategies for several devices would exchange layers, and back."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def apply(self, model: Any) -> Any:
        self.seen.append("apply")
        return model

    def revert(self, model: Any) -> Any:
        self.seen.append("revert")
        return model


def layer_sync(case: Case) -> dict[str, Any]:
    sync, module = NotedSync(), Net()
    trainer = case.trainer(plugins=sync)
    trainer.fit(module, case.train_loader())
    trainer.test(module, case.loader(1))
    assert sync.seen == ([] if case.alone else ["apply", "revert"])
    return {"weights": case.weights(trainer)}


REPLICATED = [manual_optimization, compiled_network, layer_sync]


GROUPS = [(("dp", "tp", "pp"), SCENARIOS), (("dp",), REPLICATED)]


@pytest.mark.parametrize(("scenario", "layout", "group"), cases_of(GROUPS))
def test_same_meaning(scenario: Any, layout: str, group: Any) -> None:
    assert_same(scenario, layout, group)


def test_every_hook_of_the_table_was_called() -> None:
    """What `docs/lightning.md` says of the order of hooks stands on hooks that were there."""
    facts = facts_of("one", tuple(SCENARIOS))[0]["hook_order"]
    called = {each.removeprefix("module.") for each in facts["events"] + facts["resumed"]}
    listed = {name for row in HOOKS if "hook_order" in row.evidence.split() for name in row.names}
    assert listed - called == set()
