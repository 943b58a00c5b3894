"""`docs/lightning.md` is up to date, complete, and says nothing that no test shows."""

import inspect
from pathlib import Path

import lightning as L
import lightning.pytorch.callbacks
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks

from tests.distributed import (
    test_lightning_callbacks,
    test_lightning_data,
    test_lightning_hooks,
    test_lightning_logging,
    test_lightning_refusals,
    test_lightning_refused_running,
    test_lightning_training,
)
from tests.lightning_matrix import PAGE, SECTIONS, render
from tests.lightning_rows import LAYOUTS, LOGGING, REFUSED, SAME

TESTS = Path(__file__).resolve().parents[1]
ROWS = [row for section in SECTIONS for row in section.rows]
MODULES = (
    test_lightning_callbacks,
    test_lightning_data,
    test_lightning_hooks,
    test_lightning_logging,
    test_lightning_training,
)
NO_HOOKS = {
    "configure_sharded_model",  # Lightning itself refuses it
    "state_key",  # a name, no hook
}


def public(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")} - NO_HOOKS


def covered() -> set[str]:
    return {name for row in ROWS for name in row.names}


def shown() -> dict[str, set[str]]:
    """Scenario -> layouts in which it runs and is compared with one process."""
    found: dict[str, set[str]] = {}
    for module in MODULES:
        for layouts, group in module.GROUPS:
            for scenario in group:
                found.setdefault(scenario.__name__, set()).update(layouts)
    return found


def refused() -> dict[str, set[str]]:
    """Refusal -> layouts in which it is provoked."""
    tables = (test_lightning_refusals.BEFORE_START, test_lightning_refused_running.WHILE_RUNNING)
    return {name: set(entry[0]) for table in tables for name, entry in table.items()}


def all_tests() -> set[str]:
    """Names of all test functions."""
    found = set()
    for path in TESTS.rglob("test_*.py"):
        lines = path.read_text().splitlines()
        found |= {line[4:].partition("(")[0] for line in lines if line.startswith("def test_")}
    return found


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == render(), "run `python -m tests.lightning_matrix`"


def test_nothing_of_lightning_is_missing() -> None:
    flags = set(inspect.signature(L.Trainer.__init__).parameters) - {"self"}
    logging = set(inspect.signature(L.LightningModule.log).parameters) - {"self"}
    calls: set[str] = {"fit", "validate", "test", "predict"}
    for name in tuple(calls):
        calls |= set(inspect.signature(getattr(L.Trainer, name)).parameters)
    calls -= {"self", "model", "train_dataloaders", "val_dataloaders", "dataloaders"}
    hooks = public(ModelHooks) | public(DataHooks) | public(CheckpointHooks) | public(L.Callback)
    callbacks = set(lightning.pytorch.callbacks.__all__)
    for wanted in (flags, calls, hooks, callbacks):
        assert wanted - covered() == set()
    assert logging - {name for row in LOGGING for name in row.names} == set()


def test_names_are_listed_once() -> None:
    names = [name for row in ROWS for name in row.names]
    twice = {name for name in names if names.count(name) > 1}
    assert twice <= {"logger", "state_dict", "load_state_dict"}  # a flag and an option of self.log


def test_every_verdict_has_evidence() -> None:
    same, refusals, tests = shown(), refused(), all_tests()
    for row in ROWS:
        evidence = set(row.evidence.split())
        assert evidence - same.keys() - refusals.keys() - tests == set()
        for layout, verdict in zip(LAYOUTS, row.verdicts, strict=True):
            assert verdict in (SAME, REFUSED)
            table = same if verdict == SAME else refusals
            by_layout = {name for name in evidence if layout in table.get(name, ())}
            assert by_layout or evidence & tests, (
                f"{row.name}: nothing shows that it is {verdict} under {layout}"
            )


def test_every_refusal_is_on_the_page() -> None:
    used = {name for row in ROWS for name in row.evidence.split()}
    assert refused().keys() - used == set()
