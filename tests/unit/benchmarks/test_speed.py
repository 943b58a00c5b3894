"""The speed benchmarks without a GPU: rows, overrides, the peer beside us, table and chart."""

import argparse
import importlib
import json
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a script of benchmarks/ by name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return lambda name: importlib.import_module(name)


def arguments(train_step: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    """What `train_step.measure` is called with for a command line."""
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr(train_step, "measure", lambda name, args: seen.append(args) or {})
    monkeypatch.setattr(sys, "argv", ["train_step.py", *words])
    train_step.main()
    return seen[0]


def test_every_row_is_a_valid_layout_of_as_many_gpus(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_lightning.config.validate import check_layout, check_world
    from megatron_lightning.parallel.pipeline import build_layout

    rows, train_step, options = (module(name) for name in ("rows", "train_step", "step_options"))
    for name, row in rows.ROWS.items():
        words = [*row.ours.split(), "--compile", "--devices", str(row.gpus)]
        with monkeypatch.context() as patch:
            args = arguments(train_step, patch, *words)
        layout = options.layout_of(args)
        assert [*check_layout(layout), *check_world(layout, row.gpus)] == [], name
        network = options.network_of(options.shape_of(args.shapes[0], args), args)
        pipeline = layout.pipeline
        build_layout(
            network.num_layers,
            layout.pipeline_parallel_size,
            pipeline.virtual_pipeline_size,
            pipeline.layout,
            head_cost=pipeline.head_cost,
            v_shaped=pipeline.schedule == "zb-v",
        )
        shape = options.shape_of(args.shapes[0], args)
        run = vars(args) | {"shape": args.shapes[0], **{k: shape[k] for k in ("seq", "accumulate")}}
        assert rows.row_of(run) == name


@pytest.mark.parametrize(
    "words",
    [
        ["--set", "pipeline.head_cost=0.5", "network.qk_layernorm=True"],
        ["--set", "pipeline.head_cost=0.5", "--set", "network.qk_layernorm=True"],
        ["--set", "pipeline.head_cost=0.5", "--tp", "1", "--set", "network.qk_layernorm=True"],
    ],
)
def test_settings_behind_one_option_or_several(
    words: list[str], module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_step, options = module("train_step"), module("step_options")
    assert arguments(train_step, monkeypatch).set == []
    args = arguments(train_step, monkeypatch, *words)
    assert args.set == ["pipeline.head_cost=0.5", "network.qk_layernorm=True"]
    assert options.layout_of(args).pipeline.head_cost == 0.5
    assert options.network_of(options.shape_of("a", args), args).qk_layernorm
    assert arguments(train_step, monkeypatch).set == []


def test_settings_reach_their_field_and_unknown_ones_are_refused(module: Any) -> None:
    from megatron_lightning.config.parallel import ParallelConfig

    override = module("step_options").override
    settings = ["pipeline.head_cost=0.5", "context.form=all_gather", "runtime.compile_layers=True"]
    config = override(ParallelConfig(), settings)
    assert config.pipeline.head_cost == 0.5
    assert config.context.form == "all_gather"
    assert config.runtime.compile_layers is True
    with pytest.raises(ValueError, match="'hurry' is none of launcher"):
        override(config, ["runtime.hurry=True"])
    with pytest.raises(ValueError, match="'deeper' is none of nothing"):
        override(config, ["pipeline.head_cost.deeper=1"])


def test_documents_fill_their_samples(module: Any) -> None:
    starts = module("shapes").document_starts(8, 4096, seed=5)
    lengths = starts.diff(dim=1)
    assert (starts[:, 0] == 0).all()
    assert (starts[:, -1] == 4096).all()
    assert (lengths >= 0).all()
    mean = 8 * 4096 / int((lengths > 0).sum())
    assert 500 < mean < 1300


STAND_IN = """
import json, os, sys
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert words["--steps"] == "3" and words["--warm"] == "1"
print(sys.argv)
runs = [{"tokens_per_s_per_gpu": 500.0, "peak_alloc_GiB": 3.0, "peak_alloc_GiB_max_rank": 4.0,
         "step_ms_median": 20.0, "mfu_full_vs_989": 0.25, "configs": words["--configs"]}]
versions = {"configs": words["--configs"], "env": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")}
with open(words["--out"], "w") as file:
    json.dump({"runs": runs, "versions": versions}, file)
"""


def result(rate: float, **more: Any) -> dict[str, Any]:
    return {
        "tokens_per_second_per_gpu": rate,
        "step_ms": 10.0,
        "step_ms_p95": 11.0,
        "mfu_full": 0.5,
        "mfu_causal": 0.4,
        "share_of_ceiling": 0.7,
        "kernel_busy_share": 0.98,
        "peak_gib": 2.0,
        **more,
    }


@pytest.fixture
def speed(module: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`speed.py` with a stand-in for our side; the peer is a process."""
    found = module("speed")
    rates = iter([600.0, 590.0, 610.0, 450.0])
    monkeypatch.setattr(found, "ours", lambda row, args: result(next(rates)))
    return found


def run(speed: Any, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["speed.py", "--steps", "3", "--warm", "1", *words])
    speed.main()


def test_a_row_beside_a_peer(
    speed: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    script, out = tmp_path / "peer.py", tmp_path / "out.json"
    script.write_text(STAND_IN)
    peer = f"{sys.executable} {script}"
    words = ("--rows", "c-ep2", "--repeats", "3", "--peer", peer, "--out", str(out))
    run(speed, monkeypatch, *words)
    row = json.loads(out.read_text())["rows"]["c-ep2"]
    assert row["rates"] == {"ours": [600, 590, 610], "peer": [500, 500, 500]}
    assert (row["ratio"], row["memory_ratio"]) == (1.2, 0.5)  # 600 of 500; 2 of 4 GiB
    assert row["peer"]["versions"] == {"configs": "c@ep=2", "env": "32"}
    printed = capsys.readouterr().out
    assert "1.6-1.8" in printed
    assert "6 N_matmul" in printed

    old = out.read_text()
    (tmp_path / "before.json").write_text(old)
    with pytest.raises(SystemExit) as ended:  # 450 of 500 now
        run(speed, monkeypatch, "--rows", "c-ep2", "--peer", peer,
            "--against", str(tmp_path / "before.json"))  # fmt: skip
    assert ended.value.code == 1
    assert "c-ep2: ratio to the peer 0.900, was 1.200" in capsys.readouterr().out


def test_a_row_of_our_own_is_compared_with_the_other(
    speed: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    run(speed, monkeypatch, "--rows", "a", "a-packed", "--out", str(out))
    rows = json.loads(out.read_text())["rows"]
    assert "ratio" not in rows["a"]
    assert rows["a-packed"]["ratio"] == round(590 / 600, 4)


def test_a_peer_that_measures_nothing_is_an_error(
    speed: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "peer.py"
    script.write_text(STAND_IN.replace('"runs": runs', '"runs": [], "failed": ["no memory"]'))
    with pytest.raises(RuntimeError, match="measured nothing.*no memory"):
        run(speed, monkeypatch, "--rows", "a", "--peer", f"{sys.executable} {script}")


def test_documents_show_what_the_results_say() -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "chart.py")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_last_entry_counts_and_the_chart_is_drawn_to_scale(module: Any) -> None:
    chart = module("chart")
    common = {"date": "2026-11-30", "commit": "abc", "note": ""}
    peer = {"tokens_per_second_per_gpu": 500, "peak_gib": 4.0}
    entries = [
        {"row": "a", **common, "ours": result(1), "peer": None},
        {"row": "a-packed", **common, "ours": result(540), "peer": None},
        {"row": "a", **common, "ours": result(600), "peer": peer},
        {"row": "b", **common, "ours": result(34636 * 1.5), "peer": None},
    ]
    found = list(chart.comparisons(entries))
    assert [one.name for one in found] == ["a", "b", "a-packed"]
    assert [round(one.ratio, 3) for one in found] == [1.2, 1.5, 0.9]
    assert [one.source for one in found] == ["same run", "published", "unpacked"]
    assert "| (a) dense 1.1B, bf16 | 600 | 500, same run | 1.20 |" in chart.short_table(found)
    assert "2.0, 4.0 | 500 same run | 1.20 | 1.12, torch alone 1.1 |" in chart.long_table(found)
    drawing = xml.etree.ElementTree.fromstring(chart.chart(found))
    bars = [e for e in drawing.iter() if e.tag.endswith("rect")][1:]
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert [round(a / b, 2) for a, b in zip(widths[::2], widths[1::2], strict=True)] == [
        1.2,
        1.5,
        0.9,
    ]


def test_results_of_both_scripts_are_added(module: Any, tmp_path: Path) -> None:
    chart = module("chart")
    args = argparse.Namespace(date="2026-12-01", commit="abc", note="one GPU", peer="")
    lines = tmp_path / "lines.json"
    layout = {"devices": 2, "tp": 1, "pp": 2, "ep": 1, "cp": 1}
    one = result(700.0, shape="a", accumulate=8, **layout)
    other = result(700.0, shape="a", accumulate=2, **layout)
    lines.write_text(f"{json.dumps(one)}\nsome words\n{json.dumps(other)}\n")
    [entry] = chart.entries_of(lines, args)
    assert (entry["row"], entry["date"], entry["peer"]) == ("a-pp2", "2026-12-01", None)
    whole = tmp_path / "whole.json"
    rows = {"b": {"ours": result(3.0), "peer": result(2.0)}, "a-packed": {"ours": result(1.0)}}
    whole.write_text(json.dumps({"date": "2026-12-02", "rows": rows}))
    added = chart.entries_of(whole, args)
    assert [(e["row"], e["date"], e["peer"] is None) for e in added] == [
        ("b", "2026-12-02", False),
        ("a-packed", "2026-12-02", True),
    ]


def test_host_overhead_runs_anywhere(
    module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host, out = module("host_overhead"), tmp_path / "out.json"
    words = ["--shape", "tiny", "--rounds", "2", "--steps", "2", "--warm", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["host_overhead.py", *words])
    host.main()
    found = json.loads(out.read_text())
    assert (len(found["bare_ms"]), len(found["trainer_ms"]), len(found["overheads"])) == (3, 2, 2)
