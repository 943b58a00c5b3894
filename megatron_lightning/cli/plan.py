"""`megatron-lightning plan`: what a layout means before a GPU is asked for.

Checks everything at once, then shows mesh, stages, memory, operations, communication and bubble;
`--suggest` ranks the layouts that fit. Nothing is allocated and no process is started.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

from megatron_lightning.cli.assignment import assignment, model_changes
from megatron_lightning.cli.errors import UserError, check_writable, wrong_input
from megatron_lightning.cli.plan_estimate import make_plan
from megatron_lightning.cli.plan_options import plan_parser
from megatron_lightning.cli.plan_picture import draw
from megatron_lightning.cli.plan_request import (
    DEFAULT_GPU,
    GIB,
    HARDWARE,
    PlanRequest,
    problems_of,
    read_config,
)
from megatron_lightning.cli.plan_suggest import (
    suggest,
    suggestions_as_text,
    suggestions_as_values,
)
from megatron_lightning.cli.plan_text import as_text
from megatron_lightning.cli.plan_values import as_values
from megatron_lightning.config.parallel import ParallelConfig
from megatron_lightning.config.quantization import QuantizationConfig
from megatron_lightning.config.validate import raise_if_any
from megatron_lightning.models.presets import preset_config

_PARALLEL = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "expert_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
)
_PIPELINE = {
    "schedule": "schedule",
    "virtual_pipeline_size": "virtual_pipeline_size",
    "pipeline_layout": "layout",
    "head_cost": "head_cost",
}
_EXPERT = {"dispatcher": "dispatcher", "overlap_all_to_all": "overlap_all_to_all"}
_DATA = {"sharding": "sharding", "replicas": "replicas", "offload_optimizer": "offload_optimizer"}
_RECOMPUTE = {
    "recompute": "mode",
    "recompute_method": "method",
    "recompute_num_layers": "num_layers",
    "recompute_modules": "modules",
    "offload": "offload",
}


def main(arguments: list[str]) -> None:
    """Plan what the options say. Wrong input is one message with everything that is wrong."""
    options = plan_parser().parse_args(arguments)
    with wrong_input():
        check_writable(json=options.json, picture=options.picture)
        request = request_of(options)
    if options.suggest:
        model_only = dataclasses.replace(request, parallel=ParallelConfig())
        raise_if_any(f"model: {problem}" for problem in model_only.model.check())
        found = suggest(request)
        _print(options, suggestions_as_values(found), suggestions_as_text(found))
        return
    raise_if_any(problems_of(request))
    plan = make_plan(request)
    if options.picture:
        draw(plan, options.picture)
    _print(options, as_values(plan), as_text(plan))


def _print(options: argparse.Namespace, values: dict[str, Any], text: str) -> None:
    if options.json == "-":
        json.dump(values, sys.stdout, indent=1, default=str)
        print()
        return
    if options.json:
        with open(options.json, "w") as file:
            json.dump(values, file, indent=1, default=str)
    print(text)


def request_of(options: argparse.Namespace) -> PlanRequest:
    """The request: config file or preset, then the options that are given."""
    given = {name: value for name, value in vars(options).items() if value is not None}
    values: dict[str, Any] = read_config(options.config) if options.config else {}
    if "preset" in given:
        values |= {"model": preset_config(given["preset"]), "model_name": given["preset"]}
    if "model" not in values:
        raise UserError("give a model: --preset NAME, or --config FILE that names one")
    changes = model_changes(given.get("set"), "hidden_size=4096")
    if "num_layers" in given:
        changes["num_layers"] = given["num_layers"]
    if changes:
        values["model"] = values["model"].with_changes(**changes)
        values["model_name"] += " with " + ", ".join(f"{k}={v}" for k, v in changes.items())
    values["parallel"] = _parallel(values.get("parallel", ParallelConfig()), given)
    simple = ("gpus", "gpus_per_node", "seq_length", "micro_batch_size", "global_batch_size")
    values |= {name: given[name] for name in (*simple, "precision", "optimizer") if name in given}
    hardware = HARDWARE[given.get("gpu", DEFAULT_GPU)]
    if "gpu_memory" in given:
        if not 0 < given["gpu_memory"] < float("inf"):
            raise UserError(f"--gpu-memory {given['gpu_memory']}: must be above 0 GiB")
        hardware = dataclasses.replace(hardware, memory_bytes=round(given["gpu_memory"] * GIB))
    if "head_cost" in given and values["parallel"].pipeline.layout is not None:
        raise UserError("--head-cost: pipeline.layout alone says where layers are; give one")
    if "gpus" not in values:
        raise UserError("give the number of GPUs: --gpus N")
    values.setdefault("seq_length", min(values["model"].max_position_embeddings, 8192))
    values.setdefault("micro_batch_size", 1)
    values.setdefault("global_batch_size", None)
    return PlanRequest(hardware=hardware, **values)


def _parallel(base: ParallelConfig, given: dict[str, Any]) -> ParallelConfig:
    def changed(config: Any, names: dict[str, str]) -> Any:
        changes = {field: given[option] for option, field in names.items() if option in given}
        return dataclasses.replace(config, **changes)

    runtime = base.runtime
    if "compile" in given:
        runtime = dataclasses.replace(runtime, compile_layers=given["compile"])
    return dataclasses.replace(
        base,
        quantization=_quantization(base.quantization, given.get("quantization")),
        **{name: given[name] for name in _PARALLEL if name in given},
        pipeline=changed(base.pipeline, _PIPELINE),
        data_parallel=changed(base.data_parallel, _DATA),
        recompute=changed(base.recompute, _RECOMPUTE),
        context=changed(base.context, {"context_form": "form"}),
        expert=changed(base.expert, _EXPERT),
        runtime=runtime,
    )


def _quantization(
    base: QuantizationConfig | None, words: list[str] | None
) -> QuantizationConfig | None:
    """Recipe and FIELD=VALUE, on top of what the config file says."""
    if words is None:
        return base
    known = {field.name for field in dataclasses.fields(QuantizationConfig)}
    changes: dict[str, Any] = {"recipe": words[0]}
    for text in words[1:]:
        name, value = assignment(text, "keep_first=0", option="--quantization")
        if name not in known:
            raise UserError(f"--quantization {text}: {name!r} is none of {sorted(known)}")
        changes[name] = value
    return dataclasses.replace(base or QuantizationConfig(), **changes)
