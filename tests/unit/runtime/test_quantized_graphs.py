"""Layers in low precision as graphs; on the CPU, where torch has the products of `_scaled_mm` too
and a stand-in for a graph repeats the recorded operations on the same memory.
"""

import copy
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from megatron_lightning.config import LoraConfig, MoEConfig, QuantizationConfig, RuntimeConfig
from megatron_lightning.config.parallel import ParallelConfig
from megatron_lightning.config.validate import check_layout
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.quantized import quantization as quantizations
from megatron_lightning.parallel.quantized import recipes
from megatron_lightning.parallel.quantized.products import QuantizedProducts, WeightClock
from megatron_lightning.precision.fp8 import FP8TensorRecipe
from megatron_lightning.precision.kept_operands import overwrite
from megatron_lightning.precision.operands import Operand, Pair
from megatron_lightning.runtime import chunks
from megatron_lightning.runtime.layer_graphs import LayerGraphs
from megatron_lightning.strategies import precision_checks
from tests import layout_runs
from tests.graphs_on_cpu import StandIn, Tape, stand_in_for_graphs
from tests.layout_runs import Run, tiny_config, train
from tests.unit.precision.test_weight_casts import Casts
from tests.unit.runtime.test_layer_graphs import GRAPHS, assert_bitwise

made: list[LayerGraphs] = []


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(chunks, "graph_layers", chunks.graph_layers)  # restored
    monkeypatch.setattr(recipes, "device_problem", lambda *_, **__: None)
    monkeypatch.setattr(precision_checks, "_quantization", lambda *_: iter(()))
    stand_in_for_graphs(Tape, made)
    yield
    made.clear()


def run_of(
    graphs: bool, recipe: str, *, compiled: bool = False, simulate: bool = False, **changes: Any
) -> Run:
    """Real products where torch has them on the CPU, unless they are to be simulated."""
    config: Any = dict(recipe=recipe, keep_first=0, keep_last=0)
    simulate = simulate or recipe in ("fp8_blockwise", "mxfp8")
    quantization = QuantizationConfig(**config, simulate=simulate)
    runtime = replace(GRAPHS if graphs else RuntimeConfig(), compile_layers=compiled)
    layout = dict(micro_batch_size=4, quantization=quantization, runtime=runtime)
    trainer = dict(precision="bf16-mixed") | changes.pop("trainer", {})
    shape = changes.pop("config", tiny_config(num_layers=2))
    options = dict(steps=8, keep_gradients=(0, 3, 7), **changes)
    return Run(config=shape, layout=layout, trainer=trainer, **options)


def compare(recipe: str, **changes: Any) -> int:
    """Layers that were replayed; the same training as without graphs."""
    found = train(0, 1, run_of(True, recipe, **changes))
    assert_bitwise(found, train(0, 1, run_of(False, recipe, **changes)))
    (graphs,) = made
    return graphs.num_replays


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    "recipe", ["fp8_tensorwise", "fp8_delayed", "fp8_rowwise", "fp8_blockwise", "mxfp8"]
)
def test_training_is_the_same(recipe: str, accumulate: int) -> None:
    check_replays(recipe, accumulate)


def test_simulated_delayed_scaling() -> None:
    check_replays("fp8_delayed", 2, simulate=True)


def check_replays(recipe: str, accumulate: int, **changes: Any) -> None:
    """Training is the same, and by as many replays as can be."""
    replays = compare(recipe, trainer=dict(accumulate_grad_batches=accumulate), **changes)
    # All micro-batches of both kinds but two of each; delayed scaling begins with a history.
    forwards = 2 * accumulate * (7 if recipe == "fp8_delayed" else 8)
    assert replays == 2 * (forwards - 4)


def test_networks_in_float32() -> None:
    assert compare("fp8_tensorwise", trainer=dict(precision="32-true")) > 0


@pytest.mark.parametrize("padded", [False, True])
def test_layers_with_experts(padded: bool) -> None:
    """Dropless ones wait for the host, so that their attention alone is recorded."""
    capacity = 1.25 if padded else None
    moe = MoEConfig(num_experts=4, router_topk=2, capacity_factor=capacity, pad_to_capacity=padded)
    config = tiny_config(num_layers=2, moe=moe)
    trainer = dict(accumulate_grad_batches=2)
    assert compare("fp8_tensorwise", config=config, trainer=trainer) == 2 * (2 * 2 * 8 - 4)


def test_frozen_weights_under_adapters() -> None:
    assert compare("fp8_tensorwise", lora=LoraConfig(rank=16, alpha=16)) == 2 * (2 * 8 - 4)


class InPlace(Casts):
    """`WeightCasts` by plain torch."""

    pairs: list[Pair] | None = None

    def cast(self) -> list[Pair]:
        with torch.inference_mode(False), torch.no_grad():
            pairs = super().cast()
            if self.pairs is None:
                self.pairs = pairs
            for kept, pair in zip(self.pairs, pairs, strict=True):
                overwrite(kept, pair, lends_scales=False)
        return self.pairs


class Changes(layout_runs.Recorder):
    """Writes to a weight: between windows, in the middle of one, and past the version counter while
    it is evaluated, which weight averaging does. Another weight has other memory meanwhile.
    """

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, index: int) -> None:
        if index in (8, 11):
            with torch.no_grad():
                self.weight(module).mul_(1.5)

    def on_validation_start(self, trainer: L.Trainer, module: Any) -> None:
        self.before = self.weight(module).detach().clone()
        self.weight(module).data.mul_(-2.0)
        other = self.weight(module, "linear_fc2")
        self.kept, other.data = other.data, other.data * 3.0

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        self.weight(module).data.copy_(self.before)
        self.weight(module, "linear_fc2").data = self.kept

    def weight(self, module: Any, name: str = "linear_fc1") -> Tensor:
        return getattr(module.network.decoder.layers["1"].mlp, name).weight


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "fp8_rowwise"])
def test_weights_written_by_others_are_rounded_anew(
    recipe: str, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout_runs, "Recorder", Changes)
    if together:
        monkeypatch.setattr(quantizations, "fit", bool)
        monkeypatch.setattr(quantizations, "WeightCasts", InPlace)
    trainer = dict(accumulate_grad_batches=2, val_check_interval=5)
    # None is made anew: rounded weights stay where they are.
    assert compare(recipe, trainer=trainer) == 2 * (2 * 2 * 8 - 4)


def test_graphs_are_made_anew_where_rounded_weights_have_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    windows = itertools.count()
    monkeypatch.setattr(quantizations, "fit", lambda weights: bool(weights) and next(windows) > 4)
    monkeypatch.setattr(quantizations, "WeightCasts", InPlace)
    # Of eight windows of two micro-batches: the third to the fifth, and the last one's second.
    assert compare("fp8_tensorwise") == 2 * (3 * 2 + 1)


class Steady(layout_runs.Recorder):
    """Fails where something is compiled once layers are recorded."""

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        torch._dynamo.config.error_on_recompile = trainer.global_step > 2

    def on_train_end(self, *args: Any) -> None:
        torch._dynamo.config.error_on_recompile = False


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "fp8_delayed", "fp8_rowwise"])
def test_compiled_layers_are_recorded_as_they_are(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    stand_in_for_graphs(StandIn, made)
    monkeypatch.setattr(layout_runs, "Recorder", Steady)
    options = dict(accumulate_grad_batches=2, limit_val_batches=0)
    assert compare(recipe, compiled=True, trainer=options) > 0


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        (dict(recipe="nvfp4", simulate=True), "quantization.recipe='nvfp4'"),
        (dict(kernels="transformer_engine"), "quantization.kernels='transformer_engine'"),
        (dict(experts=True), "quantization.experts=True"),
        (dict(), None),
        (dict(recipe="fp8_delayed"), None),
        (dict(fp8_gather=True), None),
    ],
)
def test_what_is_refused(changes: dict[str, Any], names: str | None) -> None:
    config = ParallelConfig(runtime=GRAPHS, quantization=QuantizationConfig(**changes))
    problems = [text for text in check_layout(config) if "cuda_graphs" in text]
    assert len(problems) == (names is not None)
    assert all(f"cuda_graphs='layers' with {names}: " in problem for problem in problems)


def test_operands_stay_where_they_are() -> None:
    """What they share is copied once; scales of the recipe's are taken from it."""

    def pair(value: float, columns: int = 16) -> Pair:
        values, scale = torch.full((16, columns), value), torch.tensor(value)
        return Pair(Operand(values, scale), Operand(values.t(), scale))

    kept = pair(1.0)
    done = overwrite(kept, pair(2.0), lends_scales=False)
    for old, new in zip(kept, done, strict=True):
        assert old is not None
        assert new is not None
        assert new.values is old.values
        assert new.scale is old.scale
        assert new.values.eq(2).all()
        assert new.scale == 2
    lent = pair(3.0)
    done = overwrite(kept, lent, lends_scales=True)
    assert done.itself is not None
    assert lent.itself is not None
    assert kept.itself is not None
    assert done.itself.scale is lent.itself.scale
    assert done.itself.values is kept.itself.values
    assert done.itself.values.eq(3).all()
    wider = pair(4.0, columns=32)
    assert overwrite(kept, wider, lends_scales=False) is wider
    assert kept.itself.values.eq(3).all()


def test_copies_of_a_layer_round_into_memory_of_their_own() -> None:
    single = MeshAxis(name="single")
    layer = QuantizedProducts(
        recipe=FP8TensorRecipe("e5m2"),
        split="none",
        tensor_axis=single,
        context_axis=single,
        splits_sequence=False,
        clock=WeightClock(),
        weight_stays=True,
    )
    weight = torch.randn(16, 32)
    with torch.inference_mode():  # what an evaluation makes is overwritten too
        layer.refresh(weight)
    where = layer.weight_addresses
    layer.refresh(weight.mul_(2))
    assert layer.weight_addresses == where
    assert len(where) == 4
    copied = copy.deepcopy(layer)
    assert not copied.weight_stays
    assert copied.weight_addresses == ()
