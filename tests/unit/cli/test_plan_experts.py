"""`plan` and `verify` with experts: their mesh, memory, traffic, suggestions, layouts, refusals."""

import json
from typing import Any

import pytest

from megatron_lightning.cli.errors import EXIT_WRONG_INPUT, UserError, run_command
from megatron_lightning.cli.plan import main
from megatron_lightning.cli.plan_memory import unit_parameters
from megatron_lightning.cli.verify_layouts import one_dimension_at_a_time, parse_layout
from megatron_lightning.cli.verify_source import from_preset
from megatron_lightning.config import ExpertConfig, MoEConfig, ParallelConfig
from tests.layout_runs import tiny_config

TINY = "--preset tiny-moe --gpus 8 --seq-length 64 --global-batch-size 64"


def plan(capsys: pytest.CaptureFixture[str], arguments: str) -> dict[str, Any]:
    main([*arguments.split(), "--json"])
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], arguments: str) -> str:
    assert run_command(main, arguments.split(), "plan") == EXIT_WRONG_INPUT
    return capsys.readouterr().err


def test_the_mesh_has_two_views(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--tensor-parallel-size 2 --expert-parallel-size 4 --expert-tensor-parallel-size 1"
    axes = {row["axis"]: row for row in plan(capsys, f"{TINY} {options}")["mesh"]["axes"]}
    assert [axes[name]["size"] for name in ("tp", "dp", "etp", "ep", "edp")] == [2, 4, 1, 4, 2]
    assert axes["ep"]["first_group"] == [0, 1, 2, 3]
    assert axes["edp"]["first_group"] == [0, 4]


def test_only_experts_shrink_with_expert_parallelism() -> None:
    model = tiny_config(moe=MoEConfig(num_experts=8, ffn_hidden_size=32, layer_pattern="ED"))
    alone, shared = unit_parameters(model, 1), unit_parameters(model, 1, 4, 2)
    assert alone.total == shared.total == model.num_parameters()
    assert alone.experts == (8 * 3 * 64 * 32, 0) * 2
    assert shared.experts == tuple(count // 8 for count in alone.experts)
    for layer in range(4):
        dense = alone.layers[layer] - alone.experts[layer]
        assert shared.layers[layer] - shared.experts[layer] == dense


def test_memory_and_traffic(capsys: pytest.CaptureFixture[str]) -> None:
    """Optimizer state of experts is shared out to their own copies alone."""
    options = "--preset mixtral-8x7b --gpus 8 --seq-length 2048 --global-batch-size 8"
    whole = plan(capsys, f"{options} --sharding optimizer")
    dealt = plan(capsys, f"{options} --sharding optimizer --expert-parallel-size 8")
    before, after = (values["memory"]["ranks"][0] for values in (whole, dealt))
    experts = 32 * 8 * 3 * 4096 * 14336
    dense = whole["model"]["num_parameters"] - experts
    assert before["num_parameters"] == dense + experts
    assert after["num_parameters"] == dense + experts // 8
    assert before["optimizer"] == pytest.approx(12 * (dense + experts) / 8)
    assert after["optimizer"] == pytest.approx(12 * dense / 8 + 12 * experts / 8)
    tokens, hidden = 2048, 4096
    sent = 32 * 4 * 7 / 8 * 2 * tokens * hidden * 2  # layers, moves, ring, experts a token, bytes
    assert dealt["communication_bytes"][0]["expert"] == pytest.approx(sent)
    assert whole["communication_bytes"][0]["expert"] == 0.0
    assert any("even load" in note for note in dealt["notes"])


def test_pairs_of_a_backward_and_a_forward(capsys: pytest.CaptureFixture[str]) -> None:
    """The bubble of 1F1B, for more activations."""
    options = f"{TINY} --expert-parallel-size 2 --micro-batch-size 1"
    for pipeline in ("", " --pipeline-parallel-size 2"):
        plain = plan(capsys, options + pipeline)
        paired = plan(capsys, f"{options}{pipeline} --overlap-all-to-all")
        for name in ("bubble_fraction", "bubble_fraction_equal_stages"):
            assert paired["pipeline"][name] == pytest.approx(plain["pipeline"][name])
        live = plain["pipeline"]["peak_live_activations"]
        assert paired["pipeline"]["peak_live_activations"] == [2 * n for n in live]
        for one, two in zip(paired["memory"]["ranks"], plain["memory"]["ranks"], strict=True):
            assert one["activations"] > two["activations"]
    assert "tokens don't travel" in refusal(capsys, f"{TINY} --overlap-all-to-all")


def test_wrong_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert "does not divide the 8 experts" in refusal(
        capsys, "--preset tiny-moe --gpus 6 --expert-parallel-size 3"
    )
    assert "set expert_tensor_parallel_size=1" in refusal(
        capsys, "--preset tiny-moe --gpus 4 --tensor-parallel-size 4 --expert-parallel-size 4"
    )
    assert "has no experts" in refusal(capsys, "--preset tiny --gpus 4 --expert-parallel-size 4")


def test_suggestions_deal_experts_where_they_do_not_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = "--preset mixtral-8x7b --set num_layers=4 --gpus 8 --gpu-memory 40"
    values = plan(capsys, f"{options} --seq-length 1024 --global-batch-size 16 --suggest")
    best = [s for s in values["fitting"] if s["tensor_parallel_size"] == 1]
    assert any(s["expert_parallel_size"] > 1 for s in best)


def test_fields_of_experts_are_set_by_a_dot(capsys: pytest.CaptureFixture[str]) -> None:
    changed = plan(capsys, f"{TINY} --set moe.router_topk=3 --set moe.aux_loss_coeff=1e-3")
    moe = changed["model"]["config"]["moe"]
    assert (moe["router_topk"], moe["aux_loss_coeff"], moe["num_experts"]) == (3, 0.001, 8)
    assert "moe.router_topk=9 is above" in refusal(capsys, f"{TINY} --set moe.router_topk=9")
    assert "moe.topk is no field: it has num_experts" in refusal(capsys, f"{TINY} --set moe.topk=2")


def test_verify_names_the_fields_that_it_changes() -> None:
    source = from_preset(
        "tiny-moe",
        seq_length=16,
        micro_batch_size=1,
        global_batch_size=2,
        changes={"moe.capacity_factor": 0.5, "num_layers": 1},
    )
    assert [note for note in source.notes if note.startswith("reduced")] == [
        "reduced: num_layers=1 in place of 4",
        "reduced: moe.capacity_factor=0.5 in place of None",
    ]


def test_layouts_of_verify() -> None:
    base = ParallelConfig()
    alone = parse_layout("ep4+gather-tokens", base)
    assert (alone.world_size, alone.parallel.expert_parallel_size) == (4, 4)
    assert alone.parallel.expert.dispatcher == "all_gather"
    folded = parse_layout("tp2+ep2+etp1", base)
    assert folded.world_size == 2
    assert parse_layout("tp2+ep2", base).world_size == 4
    assert parse_layout("pp2+ep2+dp4", base).world_size == 8
    with pytest.raises(UserError, match="ep2"):
        parse_layout("ep2+ep2", base)
    target = ParallelConfig(
        tensor_parallel_size=2,
        expert_parallel_size=2,
        expert_tensor_parallel_size=1,
        expert=ExpertConfig(dispatcher="all_gather"),
    )
    found = {c.name: c for c in one_dimension_at_a_time(target, 4)}
    assert found["ep2"].world_size == 2
    assert found["ep2"].parallel.expert == target.expert
    assert found["tp2"].parallel.expert_tensor_size == 2
    assert found["all together"].parallel == target
