"""When layers are recorded, replayed, dropped or left alone; on the CPU, where a stand-in for a
graph repeats the recorded operations on the same memory.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from megatron_lightning.config import (
    DataParallelConfig,
    MoEConfig,
    MultiTokenPredictionConfig,
    RuntimeConfig,
)
from megatron_lightning.config.parallel import ParallelConfig
from megatron_lightning.config.plan import ParallelPlan
from megatron_lightning.config.validate import check_layout
from megatron_lightning.layers.moe import Router
from megatron_lightning.models import GPTModel
from megatron_lightning.parallel.flat import Slot
from megatron_lightning.runtime import chunks, graph_choice
from megatron_lightning.runtime.graph_region import GraphRegion
from megatron_lightning.runtime.layer_graphs import LayerGraphs
from tests import graphs_on_cpu, layout_runs
from tests.graphs_on_cpu import Tape, after_first, stand_in_for_graphs
from tests.layout_runs import Run, assert_same_training, tiny_config, train

made: list[LayerGraphs] = []
StandIn: Any = Tape


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(chunks, "graph_layers", chunks.graph_layers)  # restored
    stand_in_for_graphs(lambda: StandIn(), made)
    yield
    made.clear()


GRAPHS = RuntimeConfig(cuda_graphs="layers")


def run_of(**changes: Any) -> Run:
    changes = {"layout": dict(micro_batch_size=4), "steps": 8, **changes}
    return Run(**changes, keep_gradients=(0, 3, 7))


def with_graphs(run: Run) -> Run:
    layout = {**run.layout, "runtime": GRAPHS}
    return Run(**{**vars(run), "layout": layout})


def assert_bitwise(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["losses"] == wanted["losses"]
    assert found["norms"] == wanted["norms"]
    for step, gradients in wanted["gradients"].items():
        for name, (*_, gradient) in gradients.items():
            assert torch.equal(found["gradients"][step][name][3], gradient), (step, name)


@pytest.mark.parametrize(
    "run",
    [
        run_of(),
        run_of(trainer=dict(accumulate_grad_batches=2)),
        pytest.param(
            run_of(config=tiny_config(hidden_dropout=0.1, attention_dropout=0.1)),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            run_of(layout=dict(data_parallel=DataParallelConfig(fuse_weight_gradients=False))),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["plain", "accumulate", "dropout", "unfused"],
)
def test_training_is_the_same(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    if run.config.attention_dropout:  # torch's default generator is exchanged by Python
        monkeypatch.setattr(sys.modules[__name__], "StandIn", graphs_on_cpu.StandIn)
    found = train(0, 1, with_graphs(run))
    (graphs,) = made
    assert graphs.num_replays >= 4 * 6  # all micro-batches of a kind but the first two
    assert_bitwise(found, train(0, 1, run))


class Steady(layout_runs.Recorder):
    """Fails where something is compiled once layers are recorded."""

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        torch._dynamo.config.error_on_recompile = trainer.global_step > 1

    def on_train_end(self, *args: Any) -> None:
        torch._dynamo.config.error_on_recompile = False


@pytest.mark.slow
@pytest.mark.parametrize("experts", [False, True])
def test_compiled_layers_are_recorded_as_they_are(
    experts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    moe = MoEConfig(num_experts=4, router_topk=2) if experts else None
    monkeypatch.setattr(sys.modules[__name__], "StandIn", graphs_on_cpu.StandIn)
    run = run_of(steps=6, config=tiny_config(moe=moe), trainer=dict(limit_val_batches=0))
    layout = {**run.layout, "runtime": RuntimeConfig(compile_layers=True)}
    wanted = train(0, 1, Run(**{**vars(run), "layout": layout}))
    torch._dynamo.reset()
    monkeypatch.setattr(layout_runs, "Recorder", Steady)
    layout = {**run.layout, "runtime": RuntimeConfig(cuda_graphs="layers", compile_layers=True)}
    found = train(0, 1, Run(**{**vars(run), "layout": layout}))
    assert made[0].num_replays > 0
    if experts:  # compiled otherwise, around the attention
        assert_same_training([found], wanted)
    else:
        assert_bitwise(found, wanted)


def test_of_layers_with_experts_attention_alone_is_graphed() -> None:
    config = tiny_config(moe=MoEConfig(num_experts=4, router_topk=2, aux_loss_coeff=1e-2))
    run = run_of(config=config)
    found = train(0, 1, with_graphs(run))
    assert made[0].num_replays > 0
    assert [region.name for region in made[0]._regions] == [
        f"decoder.layers.{i}.self_attention" for i in range(4)
    ]
    assert_bitwise(found, train(0, 1, run))


PADDED = MoEConfig(num_experts=4, router_topk=2, capacity_factor=1.25, pad_to_capacity=True)
BALANCED = dict(
    aux_loss_coeff=1e-1,
    z_loss_coeff=1e-2,
    expert_bias=True,
    expert_bias_update_rate=1e-2,
    router_score_function="sigmoid",
)
EXPERTS: dict[str, dict[str, Any]] = {
    "probability": dict(aux_loss_coeff=1e-1),
    "bias": dict(BALANCED, shared_expert_ffn_hidden_size=32, drop_policy="position"),
    "global": dict(load_balancing="global_aux_loss", aux_loss_coeff=1e-1, input_jitter=0.1),
    "sinkhorn": dict(load_balancing="sinkhorn", latent_size=32),
}


def test_timed_micro_batches_run_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those in which others would be recorded: the first of both kinds are."""
    timed = property(lambda region: made[0].micro_batch in (6, 9, 10, 11))
    monkeypatch.setattr(GraphRegion, "is_timed", timed)
    run = run_of(config=tiny_config(num_layers=2))
    found = train(0, 1, with_graphs(run))
    assert made[0].num_replays == 2 * (16 - 4 - 4)
    assert_bitwise(found, train(0, 1, run))


class Routers(layout_runs.Recorder):
    """Keeps what routers counted and learned besides weights."""

    seen: list[Any]

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        super().on_train_start(trainer, module)
        Routers.seen = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, module, *args)
        for router in (m for m in module.modules() if isinstance(m, Router)):
            values = {k: v for k, v in vars(router.statistics).items() if k != "is_closed"}
            values |= dict(router.named_buffers())
            Routers.seen.append({name: value.tolist() for name, value in values.items()})


@pytest.mark.parametrize(
    "options",
    [name if name == "bias" else pytest.param(name, marks=pytest.mark.slow) for name in EXPERTS],
)
def test_experts_of_static_capacity_are_graphed(
    options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routing, losses, statistics, dispatch, experts: whole layers, in which nothing waits."""
    monkeypatch.setattr(layout_runs, "Recorder", Routers)
    moe = dataclasses.replace(PADDED, **EXPERTS[options])
    shape = dict(num_layers=2, moe=moe)
    trainer = dict(accumulate_grad_batches=2)
    run = run_of(config=tiny_config(**shape), trainer=trainer)
    found = train(0, 1, with_graphs(run))
    assert [region.name for region in made[0]._regions] == [f"decoder.layers.{i}" for i in (0, 1)]
    assert made[0].num_replays == 2 * (2 * 2 * 8 - 2 * 2)  # of both kinds, two ran as ever
    seen = Routers.seen
    assert_bitwise(found, train(0, 1, run))
    assert seen == Routers.seen
    assert seen[-1]["num_forwards"] == 4
    assert any(one["dropped"] for one in seen) == (options != "sinkhorn")  # which is even


def test_layers_of_several_inputs_with_gradients() -> None:
    """Multi-token prediction: of the hidden state and of the next tokens' embedding."""
    further = MultiTokenPredictionConfig()
    run = run_of(config=tiny_config(num_layers=2, multi_token_prediction=further))
    found = train(0, 1, with_graphs(run))
    assert len(made[0]._regions) == 3
    assert made[0].num_replays == 3 * (2 * 8 - 2 * 2)
    assert_bitwise(found, train(0, 1, run))


def two_lengths(run: Run, index: int) -> dict[str, Tensor]:
    batch = layout_runs.global_batch(Run(config=run.config), index)
    length = 16 if index % 3 else 8
    return {key: value[:, :length] for key, value in batch.items()}


@pytest.mark.slow
def test_each_shape_has_graphs_of_its_own() -> None:
    run = run_of(make_batch=two_lengths, steps=14)
    found = train(0, 1, with_graphs(run))
    assert made[0].num_replays == 4 * (2 * 14 - 4 * 2)  # lengths, first and later: two as ever
    assert_bitwise(found, train(0, 1, run))


class Hooked(layout_runs.Recorder):
    """Hooks the second layer's MLP from the sixth step on."""

    calls = 0

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, index: int) -> None:
        if index == 5:
            mlp = module.network.decoder.layers["1"].mlp
            mlp.register_forward_hook(self.called)

    def called(self, *args: Any) -> None:
        Hooked.calls += 1


def test_a_hook_inside_is_called(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = train(0, 1, run_of())
    monkeypatch.setattr(layout_runs, "Recorder", Hooked)
    found = train(0, 1, with_graphs(run_of()))
    assert Hooked.calls >= 2 * 3  # micro-batches of three steps; validation calls it too
    assert "hooks of ['mlp'] would not be called" in caplog.text
    assert_bitwise(found, wanted)


class Watched(layout_runs.Recorder):
    """Has a hook on all modules in two of the steps."""

    calls = 0

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, index: int) -> None:
        if index == 5:
            self.handle = register_module_forward_hook(self.called)
        if index == 7:
            self.handle.remove()

    def called(self, *args: Any) -> None:
        Watched.calls += 1


def test_hooks_on_all_modules_are_called(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(layout_runs, "Recorder", Watched)
    run = run_of(config=tiny_config(num_layers=2))
    wanted = train(0, 1, run)
    calls, Watched.calls = Watched.calls, 0
    found = train(0, 1, with_graphs(run))
    assert Watched.calls == calls > 0
    assert "hooks for all modules" in caplog.text
    assert made[0].num_replays == 2 * (2 * 8 - 2 * 2 - 2 * 2)
    assert_bitwise(found, wanted)


class Changed(layout_runs.Recorder):
    """Changes something of the second layer from the sixth step on."""

    what = ""
    before = 0

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, index: int) -> None:
        layer = module.network.decoder.layers["1"]
        if index == 5 and Changed.what == "mode":
            layer.mlp_dropout.eval()
        elif index == 5:
            layer.mlp.linear_fc1.weight.requires_grad_(Changed.what == "thawed")
        elif index == 0 and Changed.what == "thawed":
            layer.mlp.linear_fc1.weight.requires_grad_(False)
        if index == 9 and made:
            Changed.before = made[0].num_replays


@pytest.mark.parametrize("what", ["mode", pytest.param("frozen", marks=pytest.mark.slow), "thawed"])
def test_what_changes_behind_a_recording_is_noticed(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Changed, "what", what)
    monkeypatch.setattr(layout_runs, "Recorder", Changed)
    run = run_of(steps=10, config=tiny_config(num_layers=2, hidden_dropout=0.1))
    wanted = train(0, 1, run)
    found = train(0, 1, with_graphs(run))
    assert_bitwise(found, wanted)
    assert made[0].num_replays - Changed.before == 2 * 2  # of the last step: made anew


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        (dict(pipeline_parallel_size=2), "pipeline_parallel_size=2"),
        (dict(context_parallel_size=2), "context_parallel_size=2"),
        (dict(data_parallel=DataParallelConfig(sharding="fsdp")), "sharding='fsdp'"),
        (
            dict(runtime=RuntimeConfig(cuda_graphs="layers", exact_dropout=True)),
            "exact_dropout=True",
        ),
        (
            dict(
                tensor_parallel_size=2,
                sequence_parallel=True,
                runtime=RuntimeConfig(cuda_graphs="layers", overlap_tensor_parallel=True),
            ),
            "overlap_tensor_parallel=True",
        ),
        (dict(runtime=RuntimeConfig(cuda_graphs="all")), "'all'"),  # type: ignore[arg-type]
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], names: str) -> None:
    config = ParallelConfig(**{"runtime": GRAPHS, **changes})
    problems = [text for text in check_layout(config) if "cuda_graphs" in text]
    assert any(names in problem for problem in problems)


@pytest.mark.parametrize(
    "changes",
    [
        dict(tensor_parallel_size=2, sequence_parallel=True),
        dict(expert_parallel_size=2),
        dict(tensor_parallel_size=2, expert_tensor_parallel_size=2),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_tensor_and_expert_parallelism_have_them(changes: dict[str, Any], compiled: bool) -> None:
    runtime = dataclasses.replace(GRAPHS, compile_layers=compiled)
    config = ParallelConfig(runtime=runtime, **changes)
    assert [text for text in check_layout(config) if "cuda_graphs" in text] == []


def test_the_cpu_has_none(caplog: pytest.LogCaptureFixture) -> None:
    network, cpu = torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.device("cpu")
    assert graph_choice.graph_layers(network, ParallelPlan(), None, cpu) is None
    assert "cuda_graphs='layers' has no effect on the CPU" in caplog.text


class Frozen:
    """As a CUDA graph does: what Python chose when it was recorded is what is replayed, such as
    whether a gradient overwrites its sum or is added.
    """

    recording: list[bool] | None = None
    replaying: list[bool] | None = None

    def begin(self) -> None:
        pass

    def close(self) -> None:
        pass

    def record(
        self, function: Callable[[], Any], generators: Sequence[torch.Generator]
    ) -> tuple[Callable[[], None], Any]:
        chosen: list[bool] = []
        Frozen.recording = chosen
        result = function()
        Frozen.recording = None

        def replay() -> None:
            Frozen.replaying = list(chosen)
            again = function()
            Frozen.replaying = None
            for kept, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                kept.data.copy_(new)

        return after_first(replay), result


def frozen(method: Callable[..., Any]) -> Callable[..., Any]:
    def called(slot: Slot, *args: Any, **options: Any) -> Any:
        if Frozen.recording is not None:
            Frozen.recording.append(slot.filled)
        elif Frozen.replaying is not None:
            slot.filled = Frozen.replaying.pop(0)
        return method(slot, *args, **options)

    return called


class Twice(GPTModel):
    """Calls its network twice in some steps."""

    late = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        if (self.trainer.global_step >= 5) == Twice.late:
            result["loss"] = result["loss"] + 3 * super().training_step(batch, batch_idx)["loss"]
        return result


@pytest.mark.parametrize("late", [True, False])
def test_steps_that_call_layers_more_often_or_less(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is recorded in one of them must not overwrite or add to another one's sums."""
    for name in ("add", "add_product", "add_written"):
        monkeypatch.setattr(Slot, name, frozen(getattr(Slot, name)))
    monkeypatch.setattr(sys.modules[__name__], "StandIn", Frozen)
    monkeypatch.setattr(Twice, "late", late)
    monkeypatch.setattr(layout_runs, "GPTModel", Twice)
    found = train(0, 1, with_graphs(run_of()))
    assert made[0].num_replays > 0
    wanted = train(0, 1, run_of())
    assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-5)
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
