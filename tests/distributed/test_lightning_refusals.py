"""What a layout can't honour is refused by name: before any process is started wherever that can
be known, else on the rank that meets it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.multiprocessing
from lightning.pytorch.accelerators import MPSAccelerator
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BatchSizeFinder,
    EMAWeightAveraging,
    ModelPruning,
    ModelSummary,
    StochasticWeightAveraging,
    ThroughputMonitor,
    WeightAveraging,
)
from lightning.pytorch.plugins import AsyncCheckpointIO, LayerSync, TorchCheckpointIO
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from torchmetrics import MeanMetric

from megatron_lightning.config.validate import ConfigurationError
from megatron_lightning.models import GPTModel
from tests.layout_runs import tiny_config
from tests.lightning_cases import LAYOUTS, Case, Net

Make = Callable[[Case], tuple[L.Trainer, L.LightningModule]]


class Backward(Net):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(2 * loss)


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class WithExample(Net):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, 6)


class WithMetric(Net):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MeanMetric()


class Compiled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.network = torch.compile(self.network, backend="eager")  # type: ignore[assignment]


class OwnSync(LayerSync):
    def apply(self, model: Any) -> Any:
        return model

    def revert(self, model: Any) -> Any:
        return model


class OtherDevice(MPSAccelerator):
    """Stands for an accelerator that the strategy doesn't know."""


class Registered(Net):
    def configure_callbacks(self) -> Any:
        return [ThroughputMonitor(batch_size_fn=len)]


def monitor() -> ThroughputMonitor:
    return ThroughputMonitor(batch_size_fn=len)


def with_callback(make: Callable[[], L.Callback]) -> Make:
    return lambda case: (case.trainer(make(), logger=[]), Net())


def with_flag(**flags: Any) -> Make:
    return lambda case: (case.trainer(**flags), Net())


def with_module(make: Callable[[], L.LightningModule], **flags: Any) -> Make:
    return lambda case: (case.trainer(**flags), make())


BEFORE_START: dict[str, tuple[tuple[str, ...], str, Make]] = {
    "weight_averaging": (("tp", "pp"), "callback WeightAveraging", with_callback(WeightAveraging)),
    "ema": (("tp", "pp"), "callback EMAWeightAveraging", with_callback(EMAWeightAveraging)),
    "swa_refused": (
        ("tp", "pp"),
        "callback StochasticWeightAveraging",
        with_callback(lambda: StochasticWeightAveraging(swa_lrs=0.1)),
    ),
    "averaging_of_a_late_network": (
        ("dp",),
        "callback EMAWeightAveraging.*GPTModel",
        lambda case: (case.trainer(EMAWeightAveraging()), GPTModel(tiny_config())),
    ),
    "pruning_refused": (
        ("tp", "pp"),
        "callback ModelPruning",
        with_callback(lambda: ModelPruning("l1_unstructured", amount=0.5)),
    ),
    "finetuning_refused": (
        ("pp",),
        "callback BackboneFinetuning.*pipeline_parallel_size=2",
        with_callback(BackboneFinetuning),
    ),
    "own_finetuning": (
        ("pp",),
        "callback BaseFinetuning.*pipeline_parallel_size=2",
        with_callback(BaseFinetuning),
    ),
    "batch_size_finder": (
        ("dp", "tp", "pp"),
        "callback BatchSizeFinder .Tuner.scale_batch_size",
        with_callback(BatchSizeFinder),
    ),
    "throughput_refused": (("tp", "pp"), "callback ThroughputMonitor", with_callback(monitor)),
    "example_input": (
        ("pp",),
        "example_input_array with ModelSummary",
        lambda case: (case.trainer(ModelSummary()), WithExample()),
    ),
    "checkpoint_plugin": (
        ("dp", "tp", "pp"),
        r"plugins=\[AsyncCheckpointIO",
        lambda case: (case.trainer(plugins=AsyncCheckpointIO(TorchCheckpointIO())), Net()),
    ),
    "sync_batchnorm": (("dp", "tp", "pp"), "sync_batchnorm=True", with_flag(sync_batchnorm=True)),
    "layer_sync_plugin": (
        ("tp", "pp"),
        r"plugins=\[OwnSync",
        lambda case: (case.trainer(plugins=OwnSync()), Net()),
    ),
    "manual_optimization_refused": (
        ("tp", "pp"),
        "automatic_optimization=False",
        with_module(Manual),
    ),
    "compiled_in_plan": (
        ("tp", "pp"),
        r"no row matches parameter '_orig_mod\.\*\.weight'",
        with_module(Compiled),
    ),
    "backward_hook": (("dp", "tp", "pp"), "Backward.backward", with_module(Backward)),
    "metric_in_pipeline": (
        ("pp",),
        "WithMetric.accuracy is a torchmetrics object",
        with_module(WithMetric),
    ),
}


@pytest.fixture(autouse=True)
def no_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("subprocess.Popen", refuse)
    monkeypatch.setattr("torch.distributed.init_process_group", refuse)


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, layout) for name, (layouts, _, _) in BEFORE_START.items() for layout in layouts],
)
def test_refused_before_start(name: str, layout: str, tmp_path: Path) -> None:
    _, message, make = BEFORE_START[name]
    case = Case(layout, 0, LAYOUTS[layout][0], tmp_path)
    trainer, module = make(case)
    with pytest.raises(ConfigurationError, match=f"(?s){message}"):
        trainer.fit(module, case.loader())


@pytest.mark.parametrize("layout", ["dp", "tp", "pp"])
def test_scale_batch_size_is_refused(layout: str, tmp_path: Path) -> None:
    case = Case(layout, 0, 2, tmp_path)
    ours_or_lightnings = "Tuner.scale_batch_size|batch size is currently not supported"
    with pytest.raises(ValueError, match=ours_or_lightnings):
        Tuner(case.trainer()).scale_batch_size(Net(), case.loader())


@pytest.mark.parametrize(
    "precision", ["16-mixed", "16-true", "transformer-engine", "transformer-engine-float16"]
)
@pytest.mark.parametrize("layout", ["dp", "tp", "pp"])
def test_precisions_are_refused(layout: str, precision: str, tmp_path: Path) -> None:
    """By the Trainer's constructor; Transformer Engine by Lightning itself where it is missing."""
    case = Case(layout, 0, 2, tmp_path)
    with pytest.raises((ValueError, ModuleNotFoundError), match="(?i)precision|transformer_engine"):
        case.trainer(precision=precision)


@pytest.mark.parametrize("layout", ["dp", "tp", "pp"])
def test_compiled_module_is_refused(layout: str, tmp_path: Path) -> None:
    case = Case(layout, 0, 2, tmp_path)
    with pytest.raises(RuntimeError, match="compiled model is incompatible.*MegatronStrategy"):
        case.trainer().fit(torch.compile(Net(), backend="eager"), case.loader())


@pytest.mark.parametrize("layout", ["dp", "tp", "pp"])
def test_other_accelerators_are_refused(layout: str, tmp_path: Path) -> None:
    """One that is neither CPU nor CUDA; and uploads of single files."""
    case = Case(layout, 0, 2, tmp_path)
    trainer = case.trainer()
    trainer.strategy.accelerator = OtherDevice()
    trainer._model_registry = "name"
    with pytest.raises(ConfigurationError, match="(?s)accelerator=OtherDevice.*model_registry="):
        trainer.fit(Net(), case.loader())


def test_ranks_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    """Before any process starts, with the numbers (C55)."""
    case = Case("tp", 0, 2, tmp_path)
    with pytest.raises(ConfigurationError, match="3.*tensor_parallel_size.*2"):
        case.trainer(devices=3)
