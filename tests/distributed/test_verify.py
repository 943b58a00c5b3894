"""`verify` on four real gloo ranks: a clean run passes, and each planted fault is named with its
signal, layer and rank.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lightning.cli import verify as command
from megatron_lightning.cli.errors import EXIT_WRONG_INPUT, run_command
from megatron_lightning.cli.verify_layouts import (
    alone_config,
    one_dimension_at_a_time,
    parse_layout,
)
from megatron_lightning.cli.verify_report import as_text
from megatron_lightning.cli.verify_run import Settings, problems_of, verify
from megatron_lightning.cli.verify_source import (
    Source,
    SyntheticBatches,
    SyntheticTokens,
    from_preset,
)
from megatron_lightning.cli.verify_tolerances import LIMITS
from megatron_lightning.config import ParallelConfig, PipelineConfig, RecomputeConfig
from megatron_lightning.layers.attention import FusedAttention
from megatron_lightning.parallel import collectives
from megatron_lightning.parallel.data import GradientBuckets
from megatron_lightning.parallel.exact_dropout import ExactDropout
from megatron_lightning.parallel.overlap import whole as whole_products
from tests import tolerances
from tests.harness import run_ranks_fresh

LAYOUT = "tp2+sp+dp2"  # global rank = 2 x data rank + tensor rank
SIZES: dict[str, Any] = dict(seq_length=32, micro_batch_size=2, global_batch_size=8)


def counted(function: Callable[..., Any], broken: Callable[..., Any], when: int) -> Any:
    """`function`, but `broken` in its call number `when` (from 0)."""
    calls = iter(range(10**9))

    def call(*args: Any, **kwargs: Any) -> Any:
        return (broken if next(calls) == when else function)(*args, **kwargs)

    return call


def no_sum_forward(rank: int) -> None:
    """Rank 3 keeps its own part in the reduce-scatter behind layer 2's MLP: of each micro-batch's
    forward there are two a layer.
    """
    if rank != 3:
        return
    real = whole_products.product_scatter

    def unsummed(x: Tensor, weight: Tensor, axis: Any) -> Tensor:
        real(x, weight, axis)
        return collectives.own_part(x @ weight.t(), axis, 0).clone()

    whole_products.product_scatter = counted(real, unsummed, 5)


def no_sum_of_gradients(rank: int) -> None:
    """On rank 1 the data-parallel sum of layer 1's second MLP weight does not arrive."""
    if rank != 1:
        return
    real = dist.all_reduce

    def unsummed(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return real(tensor.clone(), *args, **kwargs)

    matches = iter(range(10**9))

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        alone = tensor.numel() == 64 * 176 // 2 and kwargs.get("async_op", False)
        broken = alone and next(matches) == 2  # layers come from the last on
        return (unsummed if broken else real)(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce


def no_causal_mask(rank: int) -> None:
    """Rank 2's heads of layer 1 see the future."""
    if rank != 2:
        return
    real = FusedAttention.forward

    def everything(self: FusedAttention, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        weights = (q @ k.transpose(-1, -2) * self.scale).softmax(dim=-1)
        return (weights @ v).permute(2, 0, 1, 3).flatten(2)

    FusedAttention.forward = counted_method(real, everything, 1)


def counted_method(function: Any, broken: Any, when: int) -> Any:
    calls = iter(range(10**9))

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (broken if next(calls) == when else function)(self, *args, **kwargs)

    return method


def wrong_scale_forward(rank: int) -> None:
    """Rank 0's heads of layer 3 forget to divide scores by the root of the head size."""
    if rank != 0:
        return
    real = FusedAttention.forward

    def unscaled(self: FusedAttention, *args: Any, **kwargs: Any) -> Tensor:
        kept, self.scale = self.scale, 1.0
        try:
            return real(self, *args, **kwargs)
        finally:
            self.scale = kept

    FusedAttention.forward = counted_method(real, unscaled, 3)


def wrong_scale_of_gradients(rank: int) -> None:
    """Rank 2 divides its gradients by twice the weight."""
    if rank == 2:
        real = GradientBuckets.finish
        GradientBuckets.finish = lambda self, weight: real(self, weight * 2)  # type: ignore[method-assign]


def other_stream(rank: int) -> None:
    """On rank 1 the dropout behind layer 2's MLP draws from another stream."""
    if rank != 1:
        return
    real = ExactDropout.draw

    def draw(self: ExactDropout, shape: torch.Size, p: float, *, site: str, **rest: Any) -> Tensor:
        site = f"{site}'" if "layers.2.mlp_dropout" in site else site
        return real(self, shape, p, site=site, **rest)

    ExactDropout.draw = draw  # type: ignore[method-assign]


def other_samples(rank: int) -> None:
    """Both ranks of the second model copy read the samples of the first."""
    if rank in (2, 3):
        real = SyntheticBatches.__init__
        SyntheticBatches.__init__ = lambda self, data, r, n: real(self, data, 0, n)  # type: ignore[method-assign]


def one_reads_other_samples(rank: int) -> None:
    """One of two tensor ranks does: the run itself refuses that."""
    if rank == 3:
        other_samples(rank)


def other_loss_mask(rank: int) -> None:
    """The first model copy counts one token less, or more, in its third sample."""
    if rank not in (0, 1):
        return
    real = SyntheticBatches.global_batch

    def changed(self: SyntheticBatches, index: int) -> dict[str, Tensor]:
        batch = real(self, index)
        batch["loss_mask"][2, 0] = 1 - batch["loss_mask"][2, 0]
        return batch

    SyntheticBatches.global_batch = changed  # type: ignore[method-assign]


PLANTS: dict[str, tuple[Callable[[int], None], str, str, str, tuple[int, ...]]] = {
    "reduction_forward": (no_sum_forward, "activation", "layers.2.mlp", "layer 2", (3,)),
    "reduction_of_gradients": (
        no_sum_of_gradients,
        "gradient",
        "layers.1.mlp.linear_fc2.weight",
        "layer 1",
        (1,),
    ),
    "mask_of_attention": (
        no_causal_mask,
        "activation",
        "layers.1.self_attention.core_attention",
        "layer 1",
        (2,),
    ),
    "scale_forward": (
        wrong_scale_forward,
        "activation",
        "layers.3.self_attention.core_attention",
        "layer 3",
        (0,),
    ),
    "scale_of_gradients": (
        wrong_scale_of_gradients,
        "gradient",
        "output_layer.weight",
        "head",
        (2,),
    ),
    "random_stream": (other_stream, "activation", "layers.2", "layer 2", (1,)),
    "samples": (other_samples, "sample ids", "tokens", "", (2, 3)),
    "mask_of_loss": (other_loss_mask, "batch field", "loss_mask", "", (0, 1)),
}


FAST = ("reduction_forward", "reduction_of_gradients")


def checked(
    rank: int, world_size: int, plant: str | None, fault: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """Verify in this process, which forks the four ranks; findings as plain values."""
    drops = {"hidden_dropout": 0.1} if plant == "random_stream" else {}
    fault = fault if plant is None else PLANTS[plant][0]
    source = from_preset("tiny", changes=drops, **SIZES)
    base = alone_config(source.target)
    buckets = {"bucket_size": 1} if plant == "reduction_of_gradients" else {}
    data = type(base.data_parallel)(**buckets)
    base = ParallelConfig(micro_batch_size=2, data_parallel=data)
    result = verify(
        source,
        parse_layout("dp1", base),
        [parse_layout(LAYOUT, base)],
        Settings(steps=2),
        plant=fault,
    )
    [outcome] = result.outcomes
    if outcome.comparison is None:
        return {"passed": result.passed, "failure": outcome.failure, "text": as_text(result)}
    findings = outcome.comparison.findings
    return {
        "passed": result.passed,
        "findings": [vars(finding) for finding in findings],
        "first": findings[0].describe() if findings else "",
        "signals": {signal.signal: signal.compared for signal in outcome.comparison.signals},
    }


@pytest.mark.parametrize(
    "plant",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in PLANTS],
)
def test_a_planted_fault_is_named(plant: str) -> None:
    _, signal, name, layer, ranks = PLANTS[plant]
    result = run_ranks_fresh(checked, 1, plant)[0]
    assert not result["passed"]
    first = result["findings"][0]
    print(result["first"])
    assert (first["signal"], first["layer"], first["ranks"]) == (signal, layer, ranks)
    assert first["name"].endswith(name)


@pytest.mark.slow
def test_a_run_that_fails_is_a_failed_candidate() -> None:
    result = run_ranks_fresh(checked, 1, None, one_reads_other_samples)[0]
    assert not result["passed"]
    assert "got different batches" in result["failure"]
    assert result["failure"].startswith("rank ")
    assert "the run failed: rank" in result["text"]
    assert result["text"].endswith("FAILED")


def test_a_clean_run_passes_and_compares_everything() -> None:
    result = run_ranks_fresh(checked, 1, None)[0]
    assert result["passed"], result["first"]
    expected = {
        "sample ids",
        "batch field",
        "tokens in the step",
        "loss_mask in the step",
        "initial weights",
        "activation",
        "logits",
        "token losses",
        "loss",
        "token count",
        "learning rate",
        "gradient",
        "gradient norm",
        "first update",
        "update over all steps",
        "weights after the step",
    }
    assert expected <= result["signals"].keys()


def command_line(rank: int, world_size: int, arguments: str) -> int:
    """Exit status of the command."""
    try:
        return run_command(command.main, arguments.split(), "verify")
    except SystemExit as error:
        return int(error.code or 0)


def test_the_command_writes_its_reports(tmp_path: Path) -> None:
    report, values = tmp_path / "report.md", tmp_path / "report.json"
    status = run_ranks_fresh(
        command_line,
        1,
        "--preset tiny --layers 2 --layouts pp2 recompute --steps 2 --seq-length 16"
        f" --micro-batch-size 4 --accelerator cpu --json {values} --report {report}",
    )[0]
    assert status == 0
    content = json.loads(values.read_text())
    assert content["passed"]
    assert [candidate["name"] for candidate in content["candidates"]] == ["pp2", "recompute"]
    assert any("num_layers=2 in place of 4" in note for note in content["notes"])
    text = report.read_text()
    assert "Verification of tiny: passed" in text
    assert "| gradient | 5e-02" not in text
    assert "num_layers=2 in place of 4" in text


class Plain(L.LightningModule):
    """A user's own module, without a plan."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.network(batch["tokens"]).flatten(0, 1)
        return nn.functional.cross_entropy(logits, batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def check_plain(rank: int, world_size: int) -> tuple[list[str], bool, str]:
    source = Source(
        name="plain",
        make_module=Plain,
        make_data=lambda: SyntheticTokens(50, 16, 2, 8),
        target=ParallelConfig(),
        world_size=2,
        precision="32-true",
    )
    base = ParallelConfig(micro_batch_size=2)
    candidates = [parse_layout(text, base) for text in ("dp2", "dp2+zero1")]
    problems = problems_of(source, candidates)
    result = verify(source, parse_layout("dp1", base), candidates, Settings(steps=2))
    return problems, result.passed, as_text(result)


@pytest.mark.slow
def test_an_own_module_over_data_ranks() -> None:
    problems, passed, text = run_ranks_fresh(check_plain, 1)[0]
    assert not problems
    assert passed, text


@pytest.mark.slow
def test_a_config_file_one_dimension_at_a_time(tmp_path: Path) -> None:
    """The quickstart's layout, on synthetic tokens of its sizes; and one that differs fails."""
    values = tmp_path / "report.json"
    path = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
    arguments = f"--config {path} --synthetic --steps 2 --accelerator cpu --json {values}"
    assert run_ranks_fresh(command_line, 1, arguments, timeout=200)[0] == 0
    content = json.loads(values.read_text())
    names = [candidate["name"] for candidate in content["candidates"]]
    assert names == ["tp2", "tp2+sp", "pp2", "all together"]
    assert "synthetic tokens in place of the data" in content["notes"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--preset tiny --layouts tp3", ["layout tp3", "num_query_groups=2"]),
        ("--preset tiny --layouts tp2+xx", ["'xx' is unknown", "tp2"]),
        ("--preset tiny --layouts tp2+tp4", ["given twice"]),
        ("--preset tiny --layouts dp0", ["at least 1"]),
        ("--preset tiny --layouts sp pp7 dp3", ["sequence_parallel", "layout pp7", "layout dp3"]),
        ("--preset tiny", ["give layouts"]),
        ("--layouts tp2", ["--config FILE"]),
        ("--preset tiny --layouts tp2 --precision 16-mixed", ["16-mixed"]),
        ("--config nowhere.yaml", ["no such file"]),
    ],
)
def test_wrong_input_is_one_message(
    arguments: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(command.main, arguments.split(), "verify") == EXIT_WRONG_INPUT
    text = capsys.readouterr().err
    for word in words:
        assert word in text


def test_dimensions_alone_then_together() -> None:
    target = ParallelConfig(
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        sequence_parallel=True,
        pipeline=PipelineConfig(virtual_pipeline_size=2),
        recompute=RecomputeConfig(mode="full"),
    )
    found = one_dimension_at_a_time(target, 8)
    assert [(candidate.name, candidate.world_size) for candidate in found] == [
        ("tp2", 2),
        ("tp2+sp", 2),
        ("pp2+vp2", 2),
        ("dp2", 2),
        ("recompute", 1),
        ("all together", 8),
    ]
    assert found[-1].parallel == target
    assert [c.name for c in one_dimension_at_a_time(ParallelConfig(), 2)] == ["dp2"]


def test_limits_agree_with_those_of_the_tests() -> None:
    for precision, dtype in (("32-true", torch.float32), ("bf16-mixed", torch.bfloat16)):
        ours, tests = LIMITS[precision], tolerances.TOLERANCES[dtype]
        assert ours.loss == tests.loss
        assert ours.gradient_norm == tests.gradient_norm
        assert ours.gradient == tests.first_gradient
        assert ours.zero_gradient == tests.zero_gradient
        assert ours.update == tests.update
