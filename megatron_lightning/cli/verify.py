"""`megatron-lightning verify`: does a layout change the training?

Trains a few steps in one process and in each candidate layout, on the same data and from the same
weights, and compares everything from the samples to the updated weights. Says which signal left its
tolerance first, in which layer and on which rank. Nothing is made smaller unless it is asked for.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_lightning.cli.assignment import model_changes
from megatron_lightning.cli.errors import Parser, UserError, check_writable, wrong_input
from megatron_lightning.cli.plan_estimate import make_plan
from megatron_lightning.cli.plan_request import HARDWARE, PlanRequest
from megatron_lightning.cli.verify_layouts import (
    Candidate,
    alone_config,
    one_dimension_at_a_time,
    parse_layout,
)
from megatron_lightning.cli.verify_ranks import RunFailed
from megatron_lightning.cli.verify_report import (
    as_markdown,
    as_text,
    as_values,
    tolerance_lines,
)
from megatron_lightning.cli.verify_run import Settings, limits_of, problems_of, verify
from megatron_lightning.cli.verify_source import Source, from_config, from_preset
from megatron_lightning.config.validate import raise_if_any
from megatron_lightning.models.presets import PRESETS
from megatron_lightning.utils.env import provide
from megatron_lightning.utils.wording import counted

EXIT_DIFFERENT = 1
SMALLEST_LAYOUTS = ("tp2+sp", "tp4+sp", "tp8+sp", "tp8+sp+pp2", "tp8+sp+pp4")
"""Baselines that are tried in turn where one GPU can't hold the model."""


def main(arguments: list[str]) -> None:
    """Run and report. Exits with 1 when a layout differs or fails, 2 after a wrong input."""
    options = _parser().parse_args(arguments)
    provide(override=False, PYTORCH_NVML_BASED_CUDA_CHECK="1")  # looking must not use CUDA: forks
    torch.set_num_threads(1)  # nor may threads be made before ranks are forked
    with wrong_input():
        check_writable(json=options.json, report=options.report)
        if options.steps < 1:
            raise UserError(f"--steps {options.steps}: at least 1 optimizer step")
        if not options.timeout > 0:
            raise UserError(f"--timeout {options.timeout}: must be above 0 seconds")
        source = _source(options)
        candidates = _candidates(options, source)
    settings = Settings(
        steps=options.steps,
        seed=options.seed,
        accelerator=_accelerator(options, candidates),
        timeout_seconds=options.timeout,
    )
    baseline, why = _baseline(options, source, settings)
    raise_if_any(problems_of(source, [baseline, *candidates]))
    for line in (
        f"{source.name}: {settings.steps} steps in {source.precision} on {settings.accelerator}",
        *(f"  {note}" for note in (*source.notes, why) if note),
        *tolerance_lines(source, limits_of(source)),
    ):
        print(line)
    folder = None if options.keep is None else Path(options.keep)
    try:
        result = verify(
            source,
            baseline,
            candidates,
            settings,
            folder=folder,
            say=lambda text: print(text, flush=True),
        )
    except RunFailed as error:
        print(f"megatron-lightning verify: {error}")
        raise SystemExit(EXIT_DIFFERENT) from error
    print(as_text(result))
    if options.json:
        Path(options.json).write_text(json.dumps(as_values(result), indent=1, default=str))
    if options.report:
        Path(options.report).write_text(as_markdown(result))
    if not result.passed:
        raise SystemExit(EXIT_DIFFERENT)


def _source(options: argparse.Namespace) -> Source:
    changes = model_changes(options.set, "vocab_size=512")
    changes |= {"num_layers": options.layers} if options.layers else {}
    changes |= {"hidden_size": options.hidden} if options.hidden else {}
    if options.config:
        source = from_config(options.config, changes=changes, synthetic=options.synthetic)
    elif options.preset:
        source = from_preset(
            options.preset,
            seq_length=options.seq_length,
            micro_batch_size=options.micro_batch_size,
            global_batch_size=options.global_batch_size,
            changes=changes,
        )
    else:
        raise UserError("give a model: --config FILE, or --preset NAME")
    if options.precision and options.precision != source.precision:
        note = f"precision {options.precision} in place of {source.precision}"
        source = _replaced(source, options.precision, note if options.config else "")
    return source


def _replaced(source: Source, precision: str, note: str) -> Source:
    notes = (*source.notes, note) if note else source.notes
    return dataclasses.replace(source, precision=precision, notes=notes)


def _candidates(options: argparse.Namespace, source: Source) -> list[Candidate]:
    if options.layouts:
        return [parse_layout(text, alone_config(source.target)) for text in options.layouts]
    if source.world_size is None:
        raise UserError("give layouts, e.g. --layouts tp2+sp pp2 dp2 tp2+sp+pp2+dp2")
    found = one_dimension_at_a_time(source.target, source.world_size)
    return [candidate for candidate in found if candidate.world_size >= 1]


def _accelerator(options: argparse.Namespace, candidates: Sequence[Candidate]) -> str:
    """GPUs where there are enough of them; asked for by name, they must be."""
    most = max(candidate.world_size for candidate in candidates)
    there = torch.cuda.device_count()
    if options.accelerator == "gpu" and there < most:
        raise UserError(
            f"--accelerator gpu: the largest layout needs {counted(most, 'GPU')} and"
            f" {there} are here; leave layouts out, or use --accelerator cpu"
        )
    if options.accelerator == "auto":
        return "gpu" if there >= most else "cpu"
    return str(options.accelerator)


def _baseline(
    options: argparse.Namespace, source: Source, settings: Settings
) -> tuple[Candidate, str]:
    """The layout that the others are compared with, and why it is this one."""
    alone = alone_config(source.target)
    single = Candidate(name="one process", parallel=alone, world_size=1)
    if options.baseline:
        return parse_layout(options.baseline, alone), "baseline as asked for"
    if settings.accelerator != "gpu" or source.config is None or _fits(source, single):
        return single, ""
    for text in SMALLEST_LAYOUTS:
        candidate = parse_layout(text, alone)
        there = torch.cuda.device_count()
        if candidate.world_size <= there and _fits(source, candidate):
            return candidate, f"one GPU can't hold the model: the baseline is {text}"
    raise UserError(
        "no baseline fits into these GPUs; give fewer --layers or a smaller --hidden, or --baseline"
    )


def _fits(source: Source, candidate: Candidate) -> bool:
    data: Any = source.make_data()
    assert source.config is not None
    request = PlanRequest(
        model=source.config,
        model_name=source.name,
        parallel=candidate.parallel,
        gpus=candidate.world_size,
        seq_length=data.seq_length,
        micro_batch_size=candidate.parallel.micro_batch_size or data.micro_batch_size,
        global_batch_size=data.global_batch_size,
        precision=source.precision,
        hardware=dataclasses.replace(HARDWARE["h100"], memory_bytes=_gpu_bytes()),
    )
    return make_plan(request).fits


def _gpu_bytes() -> int:
    """Memory of the first GPU as its driver tells it, without using CUDA here."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        return int(answer.split()[0]) << 20
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError) as error:
        raise UserError(
            f"how much memory a GPU has can't be asked ({error}); give --baseline"
        ) from error


def _parser() -> Parser:
    parser = Parser("verify", "Check that layouts train exactly as one process does.")
    add = parser.add_argument
    add("--config", metavar="FILE", help="YAML of `megatron-lightning fit`")
    add("--preset", choices=sorted(PRESETS), help="a published shape, on synthetic tokens")
    add(
        "--layouts",
        nargs="+",
        metavar="LAYOUT",
        help="e.g. tp2+sp pp2 cp2+ring dp2+zero1; default: each dimension of the config's layout"
        " alone, then all together",
    )
    add("--baseline", metavar="LAYOUT", help="default: one process, or the smallest that fits")
    add("--steps", type=int, default=3, metavar="N", help="optimizer steps (default: 3)")
    add(
        "--seed", type=int, default=1234, metavar="N", help="of weights and dropout (default: 1234)"
    )
    add("--precision", metavar="NAME", help="in place of the config's (32-true sees most)")
    add("--accelerator", choices=("auto", "cpu", "gpu"), default="auto", help="default: auto")
    add("--synthetic", action="store_true", help="random tokens in place of the config's data")
    group = parser.add_argument_group("reductions, of a GPTModel; printed in the report")
    group.add_argument("--layers", type=int, metavar="N", help="layers of the network")
    group.add_argument(
        "--hidden", type=int, metavar="N", help="hidden size; sizes derived from it follow"
    )
    group.add_argument("--set", action="append", metavar="FIELD=VALUE", help="any other field")
    group = parser.add_argument_group("synthetic tokens of a preset")
    group.add_argument(
        "--seq-length", type=int, default=64, metavar="TOKENS", help="tokens a sample (default: 64)"
    )
    group.add_argument(
        "--micro-batch-size",
        type=int,
        default=1,
        metavar="SAMPLES",
        help="samples in one forward (default: 1)",
    )
    group.add_argument(
        "--global-batch-size",
        type=int,
        default=8,
        metavar="SAMPLES",
        help="samples of a step over all ranks (default: 8)",
    )
    group = parser.add_argument_group("output")
    group.add_argument("--json", metavar="FILE", help="write what was found as JSON")
    group.add_argument("--report", metavar="FILE.md", help="write the report as Markdown")
    group.add_argument("--keep", metavar="FOLDER", help="keep logs and records of all ranks there")
    group.add_argument("--timeout", type=float, default=1800.0, metavar="SECONDS", help="of a run")
    return parser
