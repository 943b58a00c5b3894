"""What `self.log` records inside a schedule, and what Lightning is given afterwards."""

from typing import Any

import lightning as L
import pytest
import torch
from torchmetrics import MeanMetric

from megatron_lightning.runtime.metrics import (
    LogKey,
    LogRecorder,
    log_published,
    merge_total,
    value_of,
)


class Module(L.LightningModule):
    """Keeps what reaches Lightning's own `log`."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, Any, dict[str, Any]]] = []
        self.mean = MeanMetric()

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        self.seen.append((name, value, kwargs))


def recorder(module: L.LightningModule, *, pipelined: bool = False) -> LogRecorder:
    return LogRecorder(module, torch.device("cpu"), pipelined=pipelined)


def values(record: LogRecorder) -> dict[str, float]:
    return {key.name: float(value_of(key, total)) for key, total in record.totals.items()}


def test_means_weigh_by_tokens_and_extremes_do_not() -> None:
    module = Module()
    record = recorder(module)
    with record.capture():
        for value, tokens in ((1.0, 1), (4.0, 3)):
            record.begin_micro_batch()
            module.log("mean", value)
            module.log("sum", value, reduce_fx="sum")
            module.log("largest", torch.tensor([value]), reduce_fx=torch.max)
            module.log("least", value, reduce_fx=min)
            module.log("own", value, batch_size=1)
            record.end_micro_batch(tokens)
    assert values(record) == {
        "mean": pytest.approx(3.25),
        "sum": 5.0,
        "largest": 4.0,
        "least": 1.0,
        "own": 2.5,
    }
    assert not module.seen
    module.log("outside", 1.0)  # the shadow is gone
    assert module.seen


def test_a_micro_batch_without_tokens_does_not_count() -> None:
    module = Module()
    record = recorder(module)
    with record.capture():
        for value, tokens in ((2.0, 5), (float("nan"), 0)):
            module.log("loss", value)
            record.end_micro_batch(tokens)
    assert values(record) == {"loss": 2.0}


def test_a_mean_over_nothing_is_zero() -> None:
    module = Module()
    record = recorder(module)
    with record.capture():
        module.log("loss", float("nan"))
        record.end_micro_batch(0)
    assert values(record) == {"loss": 0.0}


def test_a_name_logged_twice_counts_twice() -> None:
    module = Module()
    record = recorder(module)
    with record.capture():
        module.log("x", 1.0)
        module.log("x", 3.0)
        record.end_micro_batch(2)
    assert values(record) == {"x": 2.0}


def test_what_a_chunk_that_is_not_the_last_logs_is_forgotten() -> None:
    module = Module()
    record = recorder(module, pipelined=True)
    with record.capture():
        module.log("x", 1.0)  # before the network, on a chunk that isn't the last
        record.begin_micro_batch()
        module.log("x", 3.0)
        record.end_micro_batch(1)
    assert values(record) == {"x": 3.0}


def test_options_by_position_and_by_name_are_one_key() -> None:
    module = Module()
    record = recorder(module)
    with record.capture():
        module.log("x", 1.0, True, False)
        module.log("x", 3.0, prog_bar=True, logger=False)
        record.end_micro_batch(1)
    [key] = record.totals
    assert key.keywords == {"prog_bar": True, "logger": False}


def test_keys_are_equal_on_all_ranks_however_a_reduction_is_named() -> None:
    module = Module()
    record = recorder(module)
    with record.capture():
        module.log("x", 1.0, reduce_fx=torch.mean)
        module.log("x", 3.0, reduce_fx="mean", sync_dist=True)
        record.end_micro_batch(1)
    assert list(record.totals) == [LogKey("x", "mean", (("reduce_fx", "mean"),))]


def test_what_cannot_be_logged() -> None:
    module = Module()
    record = recorder(module, pipelined=True)
    with record.capture():
        with pytest.raises(ValueError, match=r"'x'.*reduce_fx=.*choose one of"):
            module.log("x", 1.0, reduce_fx=torch.median)
        with pytest.raises(ValueError, match=r"'x'.*2 elements"):
            module.log("x", torch.zeros(2))
        with pytest.raises(ValueError, match=r"'x', <dict>.*single number"):
            module.log("x", {"a": 1.0})
        with pytest.raises(ValueError, match=r"'x', <MeanMetric>.*pipeline_parallel_size > 1"):
            module.log("x", module.mean)
        with pytest.raises(ValueError, match="all_gather inside a step"):
            module.all_gather(torch.zeros(1))


def test_metric_objects_reach_lightning_without_a_pipeline() -> None:
    module = Module()
    record = recorder(module)
    with record.capture():
        module.log("mean", module.mean)
        module.log("zero", 1.0, rank_zero_only=True)
    assert [name for name, _, _ in module.seen] == ["mean", "zero"]


def test_the_shadow_goes_when_a_step_fails() -> None:
    module = Module()
    with pytest.raises(KeyError), recorder(module, pipelined=True).capture():
        raise KeyError
    assert "log" not in vars(module)
    assert "all_gather" not in vars(module)


def test_every_key_is_logged_once_with_its_weight() -> None:
    module = Module()
    mean, largest = LogKey("a", "mean", (("prog_bar", True),)), LogKey("b", "max", ())
    totals = {
        mean: (torch.tensor(6.0), torch.tensor(3.0)),
        largest: (torch.tensor(7.0), torch.tensor(3.0)),
    }
    log_published(module, totals, None)
    [(a, a_value, a_options), (b, b_value, _)] = module.seen
    assert (a, float(a_value), b, float(b_value)) == ("a", 2.0, "b", 7.0)
    assert a_options["prog_bar"] is True
    assert a_options["sync_dist"] is False
    assert float(a_options["batch_size"]) == 3.0


def test_in_training_the_step_value_is_the_windows() -> None:
    module = Module()
    key = LogKey("a", "mean", ())
    new = (torch.tensor(6.0), torch.tensor(3.0))
    window = {key: merge_total(key, (torch.tensor(1.0), torch.tensor(4.0)), new)}
    log_published(module, {key: new}, window)
    assert float(module.seen[0][1]) == 1.0
    module.seen.clear()
    per_epoch = LogKey("a", "mean", (("on_epoch", True), ("on_step", False)))
    log_published(module, {per_epoch: new}, {per_epoch: window[key]})
    assert float(module.seen[0][1]) == 2.0  # Lightning averages batches itself
