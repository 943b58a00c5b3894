"""`megatron-lightning plan`: the examples that it promises, all faults at once, and its outputs."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_lightning.cli import verify
from megatron_lightning.cli.errors import EXIT_WRONG_INPUT, UserError, run_command
from megatron_lightning.cli.plan import main
from megatron_lightning.cli.plan_outside import RESERVED_BYTES
from megatron_lightning.cli.plan_request import HARDWARE
from megatron_lightning.cli.plan_text import in_unit, sized
from megatron_lightning.models.presets import PRESETS
from tests.unit.models.test_presets import PUBLISHED


def words_of(*arguments: str) -> list[str]:
    return " ".join(arguments).split()


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    main([*words_of(*arguments), "--json"])
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of a wrong input, with its exit status checked."""
    assert run_command(main, words_of(*arguments), "plan") == EXIT_WRONG_INPUT
    return capsys.readouterr().err


def test_the_rest_is_data_parallel(capsys: pytest.CaptureFixture[str]) -> None:
    values = plan(
        capsys,
        "--preset llama3-70b --gpus 64 --tensor-parallel-size 4",
        "--pipeline-parallel-size 4 --context-parallel-size 2",
    )
    assert values["data_parallel_size"] == 2
    assert values["layers_per_stage"] == [20, 20, 20, 20]
    axes = {row["axis"]: row for row in values["mesh"]["axes"]}
    assert [axes[name]["size"] for name in ("tp", "cp", "dp", "pp")] == [4, 2, 2, 4]
    assert axes["tp"]["first_group"] == [0, 1, 2, 3]
    assert axes["cp"]["first_group"] == [0, 4]
    assert [axes[name]["nodes_of_a_group"] for name in ("tp", "cp", "dp", "pp")] == [1, 1, 2, 4]
    last = values["mesh"]["ranks"][63]
    assert last == {"rank": 63, "node": 7, "pp": 3, "dp": 1, "cp": 1, "tp": 3}


def test_memory_that_tensor_ranks_share(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """4 parts of 1,024 tokens and 3 partial sums, twice; in low precision only where asked for."""
    outside = []
    for options in (
        "{tensor_parallel_size: 4}",
        "{tensor_parallel_size: 4, sequence_parallel: true}",
        "{tensor_parallel_size: 4, sequence_parallel: true,"
        " runtime: {overlap_tensor_parallel: false}}",
        "{tensor_parallel_size: 4, sequence_parallel: true,"
        " quantization: {recipe: fp8_tensorwise}}",
        "{tensor_parallel_size: 4, sequence_parallel: true,"
        " runtime: {overlap_tensor_parallel: true}, quantization: {recipe: fp8_tensorwise}}",
    ):
        path = tmp_path / "short.yaml"
        path.write_text(
            f"""
trainer: {{devices: 4, precision: bf16-mixed, strategy: {options}}}
model: {{class_path: megatron_lightning.cli.presets.gpt_preset, init_args: {{preset: llama3-8b}}}}
data: {{paths: corpus, seq_length: 4096, micro_batch_size: 1, global_batch_size: 4}}
"""
        )
        memory = plan(capsys, "--config", str(path))["memory"]
        outside.append(memory["outside_of_allocator_bytes"])
    assert outside[1] - outside[0] == 2 * 7 * 1024 * 4096 * 2
    assert outside[2] == outside[3] == outside[0]
    assert outside[4] == outside[1]


@pytest.mark.parametrize(
    ("options", "shared"),
    [
        ("{peer_memory: true}", 2 * 2 * 2048 * (4096 + 2 * 1024) // 2 * 2),
        ("{peer_memory: true, head_groups: 2}", 0),
        ("{head_groups: 1}", 0),
    ],
)
def test_memory_that_context_ranks_share(
    options: str, shared: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """2 parts of 2,048 tokens, half of their queries, keys and values, twice."""
    path = tmp_path / "context.yaml"
    context = options.replace("{", "{form: all_to_all, ")
    path.write_text(
        f"""
trainer:
  devices: 2
  precision: bf16-mixed
  strategy: {{context_parallel_size: 2, context: {context}}}
model: {{class_path: megatron_lightning.cli.presets.gpt_preset, init_args: {{preset: llama3-8b}}}}
data: {{paths: corpus, seq_length: 4096, micro_batch_size: 1, global_batch_size: 4}}
"""
    )
    memory = plan(capsys, "--config", str(path))["memory"]
    assert memory["outside_of_allocator_bytes"] - RESERVED_BYTES == shared


def low_precision(*arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, int]:
    """Memory of the first rank of Llama-3-8B's shape with 4 layers."""
    shape = "--preset llama3-8b --num-layers 4 --seq-length 4096 --micro-batch-size 1"
    return plan(capsys, shape, *arguments)["memory"]["ranks"][0]


LINEARS = 4096 * (6144 + 4096 + 3 * 14336)
"""Weights of a layer's products."""


@pytest.mark.parametrize(
    ("layout", "words", "held"),
    [
        ("--gpus 1", "fp8_tensorwise keep_first=0 keep_last=0", 2 * 4 * LINEARS),
        ("--gpus 1", "fp8_tensorwise", 2 * 2 * LINEARS),
        ("--gpus 1", "mxfp8 simulate=true keep_first=2", 2 * 2 * LINEARS),
        ("--gpus 2 --tensor-parallel-size 2", "fp8_tensorwise", 2 * LINEARS),
        ("--gpus 2 --pipeline-parallel-size 2", "fp8_tensorwise keep_first=0", 2 * 2 * LINEARS),
        ("--gpus 2 --sharding optimizer", "fp8_tensorwise", 2 * 2 * LINEARS),
        ("--gpus 2 --sharding fsdp", "fp8_tensorwise", 0),
    ],
)
def test_memory_of_low_precision(
    layout: str, words: str, held: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both operands of each weight are held, and less of activations."""
    without = low_precision(layout, capsys=capsys)
    with_it = low_precision(layout, "--quantization", words, capsys=capsys)
    assert without["rounded"] == 0
    assert with_it["rounded"] == held
    kept = with_it["activations"] / without["activations"]
    assert 0.7 < kept < 1 if "simulate" not in words else kept > 1
    gathered = with_it["buffers"] - without["buffers"]
    assert gathered == (2 * 4096 * 14336 if "fsdp" in layout else 0)


def test_61_layers_on_4_stages(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--preset llama3-8b --num-layers 61 --gpus 4 --pipeline-parallel-size 4"
    assert plan(capsys, arguments)["layers_per_stage"] == [16, 15, 15, 15]
    main(words_of(arguments))
    assert "16+15+15+15" in capsys.readouterr().out


def test_what_the_head_counts_for(capsys: pytest.CaptureFixture[str]) -> None:
    """The note on unequal stages names an option, and it moves layers away from the head."""
    arguments = "--preset llama3-8b --gpus 4 --pipeline-parallel-size 4"
    with_one = plan(capsys, arguments)
    (note,) = [note for note in with_one["notes"] if note.startswith("stages are unequal")]
    assert note.endswith("head costs 1.84 layers, counted as 1 (--head-cost; pipeline.head_cost)")
    assert with_one["layers_per_stage"] == [8, 8, 8, 8]
    balanced = plan(capsys, arguments, "--head-cost 2.5")
    assert balanced["layers_per_stage"] == [9, 9, 8, 6]
    assert max(s["cost_in_layers"] for s in balanced["stages"]) == 9
    layout = "--pipeline-layout Et*8|t*8|t*8|t*8L"
    assert "--head-cost" not in "".join(plan(capsys, arguments, layout)["notes"])
    with pytest.raises(UserError, match="--head-cost: pipeline.layout alone says"):
        main(words_of(f"{arguments} {layout} --head-cost 2.5"))


@pytest.mark.parametrize("command", ["plan", "verify"])
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("foo.bar=3", "foo.bar is no field: it has "),
        ("hiden_size.x=3", "hiden_size.x is no field: do you mean hidden_size?"),
        ("pipeline.head_cost=3", "belongs to the layout; use its option (`--help` lists them), or"),
        ("tensor_parallel_size=2", "write trainer.strategy.tensor_parallel_size into the file of"),
        ("moe.router_topk=3", "moe.router_topk=3: moe is None here, and has no fields"),
    ],
)
def test_fields_that_the_model_has_not(
    command: str, words: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, layout = {"plan": (main, "--gpus 4"), "verify": (verify.main, "--layouts dp2")}[command]
    arguments = words_of(f"--preset tiny {layout} --set", words)
    assert run_command(run, arguments, command) == EXIT_WRONG_INPUT
    assert told in capsys.readouterr().err


def test_more_tensor_ranks_than_key_heads_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    text = refusal(capsys, "--preset llama3-70b --gpus 64 --tensor-parallel-size 16")
    assert "tensor_parallel_size=16 does not divide num_query_groups=8" in text
    assert "[1, 2, 4, 8]" in text


def test_60_gpus_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    layout = "--tensor-parallel-size 8 --pipeline-parallel-size 4"
    text = refusal(capsys, "--preset llama3-70b --gpus 60", layout)
    assert "60 ranks" in text
    assert "32 or 64" in text


def test_all_faults_are_explained_together(capsys: pytest.CaptureFixture[str]) -> None:
    text = refusal(
        capsys,
        "--preset llama3-70b --gpus 60 --tensor-parallel-size 16",
        "--pipeline-parallel-size 100 --precision 16-true --recompute selective",
        "--recompute-modules core_atention",
    )
    for words in (
        "60 ranks",
        "num_query_groups=8",
        "pipeline_parallel_size=100",
        "precision='16-true'",
        "'core_atention' matches no module",
    ):
        assert words in text
    assert text.startswith("megatron-lightning plan: 5 problems")


def test_layout_and_model_faults_are_explained_together(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = refusal(
        capsys,
        "--preset tiny --gpus 4 --set num_attention_heads=3 --sequence-parallel",
        "--schedule zb-v --pipeline-parallel-size 2 --micro-batch-size 0",
    )
    for words in ("num_query_groups=2", "sequence_parallel=True", "zb-v", "micro_batch_size=0"):
        assert words in text


def test_batch_that_does_not_divide(capsys: pytest.CaptureFixture[str]) -> None:
    text = refusal(capsys, "--preset tiny --gpus 4 --global-batch-size 6")
    assert "global_batch_size=6" in text
    assert "use 4 or 8" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--gpus 4", "--preset NAME"),
        ("--preset tiny", "--gpus N"),
        ("--preset tiny --gpus 1 --set colour=red", "colour"),
        ("--preset tiny --gpus 1 --set colour", "FIELD=VALUE"),
        ("--preset tiny --gpus 1 --picture mesh.gif", ".svg"),
        ("--config nowhere.yaml --gpus 1", "no such file"),
        ("--preset tiny --gpus many", "many"),
    ],
)
def test_wrong_options(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refusal(capsys, arguments)


@pytest.mark.parametrize("preset", PUBLISHED)
def test_parameters_are_the_published_ones(preset: str, capsys: pytest.CaptureFixture[str]) -> None:
    values = plan(capsys, f"--preset {preset} --gpus 1 --seq-length 1024")
    assert values["model"]["num_parameters"] == PUBLISHED[preset]


def test_every_published_preset_is_checked() -> None:
    named = {name for name in PRESETS if not name.startswith("tiny")}
    assert named - {"deepseek-v3"} == set(PUBLISHED)  # whose count has a test of its own


def test_a_config_file_and_options_on_top(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = Path(__file__).parents[3] / "examples" / "quickstart.yaml"
    values = plan(capsys, "--config", str(path))
    assert (values["gpus"], values["tensor_parallel_size"]) == (4, 2)
    assert values["layout"]["sequence_parallel"] is True
    assert (values["seq_length"], values["micro_batch_size"]) == (128, 4)
    assert values["precision"] == "32-true"
    assert values["num_microbatches"] == 4
    other = plan(capsys, "--config", str(path), "--gpus", "8", "--context-parallel-size", "2")
    assert (other["gpus"], other["data_parallel_size"]) == (8, 1)
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(path.read_text().replace("sequence_parallel", "sequence_paralel"))
    assert "sequence_paralel" in refusal(capsys, "--config", str(wrong))


def test_short_config_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "short.yaml"
    path.write_text(
        """
trainer: {devices: 4, num_nodes: 2, precision: bf16-mixed, strategy: {tensor_parallel_size: 2}}
model: {class_path: megatron_lightning.cli.presets.gpt_preset, init_args: {preset: llama3-8b}}
data: {paths: corpus, seq_length: 1024, micro_batch_size: 2, global_batch_size: 64}
"""
    )
    values = plan(capsys, "--config", str(path))
    assert (values["gpus"], values["gpus_per_node"], values["data_parallel_size"]) == (8, 4, 4)
    assert values["model"]["num_parameters"] == PUBLISHED["llama3-8b"]
    assert (values["num_microbatches"], values["precision"]) == (8, "bf16-mixed")
    path.write_text(path.read_text().replace("gpt_preset", "OtherModel"))
    assert "plan knows GPTModel only" in refusal(capsys, "--config", str(path))


def test_low_precision_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    layout = "--preset llama3-8b --num-layers 4 --gpus 1"
    assert "rounded" not in _text(capsys, layout)
    assert "rounded" in _text(capsys, layout, "--quantization fp8_rowwise")
    assert "keep=0: 'keep' is none of" in refusal(capsys, layout, "--quantization mxfp8 keep=0")
    assert "simulate=False" in refusal(capsys, layout, "--quantization mxfp8")
    assert "must be True or False" in refusal(capsys, layout, "--quantization mxfp8 simulate=oui")
    assert "global_batch_size=0: must be" in refusal(capsys, layout, "--global-batch-size 0")
    assert "choose one of" in refusal(capsys, layout, "--quantization fp4")
    assert "write FIELD=VALUE" in refusal(capsys, layout, "--quantization fp8_rowwise experts")


def _text(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(words_of(*arguments))
    return capsys.readouterr().out


def test_text_and_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture, file = tmp_path / "plan.svg", tmp_path / "plan.json"
    arguments = "--preset llama3-8b --gpus 16 --pipeline-parallel-size 2 --tensor-parallel-size 2"
    main([*words_of(arguments), "--picture", str(picture), "--json", str(file)])
    text = capsys.readouterr().out
    for words in ("Mesh", "Stages", "Memory of a rank", "Communication", "bubble"):
        assert words in text
    assert json.loads(file.read_text())["data_parallel_size"] == 4
    assert "<svg" in picture.read_text()
    assert "16 GPUs" in picture.read_text() or "#text_" in picture.read_text()
    main([*words_of(arguments), "--picture", str(tmp_path / "plan.png")])
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_the_bubble_is_the_simulators(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--preset tiny --gpus 4 --pipeline-parallel-size 4 --micro-batch-size 1"
    values = plan(capsys, arguments, "--global-batch-size 8")
    pipeline = values["pipeline"]
    assert pipeline["bubble_fraction_equal_stages"] == pytest.approx(3 / 11)  # (p-1)/(m+p-1)
    assert pipeline["bubble_fraction"] > pipeline["bubble_fraction_equal_stages"]
    assert pipeline["peak_live_activations"] == [4, 3, 2, 1]


def test_suggestions_fit_and_the_others_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    values = plan(capsys, "--preset llama3-8b --gpus 8 --gpu h100 --suggest")
    fitting, refused = values["fitting"], values["refused"]
    assert fitting
    assert all(row["peak_bytes"] < 80 << 30 for row in fitting)
    seconds = [row["step_seconds"] for row in fitting]
    assert seconds == sorted(seconds)
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
    for row in fitting:
        product = row["data_parallel_size"]
        for name in sizes:
            product *= row[name]
        assert product == 8
    small = plan(capsys, "--preset llama3-8b --gpus 8 --suggest --gpu-memory 8")
    assert small["fitting"] == []
    assert all(row["reason"] for row in small["refused"])
    assert any("GiB of 8.00" in row["reason"] for row in small["refused"])
    main(words_of("--preset tiny --gpus 2 --suggest"))
    assert "Suggestions, fastest first" in capsys.readouterr().out
    assert isinstance(refused, list)


def test_a_small_model_has_numbers_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--preset tiny --gpus 2 --tensor-parallel-size 2 --seq-length 128"
    values = plan(capsys, words, "--micro-batch-size 1 --global-batch-size 1")
    text = _text(capsys, words, "--micro-batch-size 1 --global-batch-size 1")
    assert "2 GPUs (" in text
    assert "1 micro-batch a rank" in text
    row = text.split("Memory of a rank, MiB\n")[1].splitlines()[2].split()
    assert row[3] == f"{values['memory']['ranks'][0]['parameters'] / 2**20:.2f}"
    sent = text.split("Communication: KiB")[1].splitlines()[3].split()
    assert float(sent[1]) > 1
    assert "1 GPU (" in _text(capsys, "--preset tiny --gpus 1 --seq-length 128")
    suggested = _text(capsys, "--preset tiny --gpus 2 --seq-length 128 --suggest")
    assert "microseconds" in suggested
    assert " 0.00 " not in suggested
    assert in_unit(3, "KiB") == "<0.01"
    assert (in_unit(0, "KiB"), sized(3 << 29)) == ("0.00", "1.50 GiB")


def test_the_gpu_is_the_measured_kind_unless_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--preset tiny --gpus 2 --seq-length 128"
    assert plan(capsys, words)["memory"] == plan(capsys, words + " --gpu h200")["memory"]
    assert plan(capsys, words)["memory"] != plan(capsys, words + " --gpu h100")["memory"]


def test_c50_peaks_are_dense_ones() -> None:
    """989 TFLOP/s of bfloat16 on H100 and H200, not the 1979 of sparse products."""
    assert HARDWARE["h200"].tflops == HARDWARE["h100"].tflops == 989
