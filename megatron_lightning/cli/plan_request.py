"""What `plan` is asked about: model, layout, batch, machine; from a preset or the config file of a
training run, with options on top. And everything that is wrong with it, at once.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args, get_type_hints

from megatron_lightning.cli.config_file import read_mapping
from megatron_lightning.cli.config_names import check_names
from megatron_lightning.cli.errors import UserError
from megatron_lightning.config.model import GPTConfig
from megatron_lightning.config.names import remedy
from megatron_lightning.config.parallel import ParallelConfig
from megatron_lightning.config.training import OptimizerConfig
from megatron_lightning.config.validate import check_layout, check_world
from megatron_lightning.models.gpt import GPTModel
from megatron_lightning.models.presets import preset_config
from megatron_lightning.precision.policy import policy_for
from megatron_lightning.strategies.module_checks import module_problems

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of GPU and what connects it. Peaks are the makers' dense bfloat16 figures."""

    name: str
    memory_bytes: int
    tflops: float
    """Peak of bfloat16 products, in 10^12 operations a second."""
    node_gb_per_second: float
    """To the other GPUs of a node, in one direction, in 10^9 bytes a second."""
    network_gb_per_second: float
    """To other nodes, for each GPU, in one direction."""


HARDWARE = {
    hardware.name: hardware
    for hardware in (
        Hardware(
            name="a100",
            memory_bytes=80 * GIB,
            tflops=312,
            node_gb_per_second=300,
            network_gb_per_second=25,
        ),
        Hardware(
            name="h100",
            memory_bytes=80 * GIB,
            tflops=989,
            node_gb_per_second=450,
            network_gb_per_second=50,
        ),
        Hardware(
            name="h200",
            memory_bytes=139 * GIB,
            tflops=989,
            node_gb_per_second=450,
            network_gb_per_second=50,
        ),
        Hardware(
            name="b200",
            memory_bytes=178 * GIB,
            tflops=2250,
            node_gb_per_second=900,
            network_gb_per_second=50,
        ),
    )
}
"""By name. Bytes of memory are what a process can use."""
DEFAULT_GPU = "h200"
"""Kind of GPU where none is named: the one that this package was measured on."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """One layout of one training run."""

    model: GPTConfig
    model_name: str
    parallel: ParallelConfig
    gpus: int
    gpus_per_node: int = 8
    seq_length: int
    micro_batch_size: int
    global_batch_size: int | None
    """Samples of one batch over all ranks; None: 4 micro-batches for each pipeline stage."""
    precision: str = "bf16-mixed"
    optimizer: str = "adamw"
    hardware: Hardware = HARDWARE[DEFAULT_GPU]

    @property
    def data_parallel_size(self) -> int:
        """What is left of the GPUs."""
        return self.gpus // self.parallel.model_parallel_size

    @property
    def expert_data_size(self) -> int:
        """Ranks that hold equal experts."""
        return self.gpus // self.parallel.expert_model_size

    @property
    def batch_size(self) -> int:
        """Samples of one batch over all ranks."""
        if self.global_batch_size is not None:
            return self.global_batch_size
        return (
            4
            * self.parallel.pipeline_parallel_size
            * self.micro_batch_size
            * max(1, self.data_parallel_size)
        )

    @property
    def num_microbatches(self) -> int:
        """Forwards of one rank in a batch."""
        return self.batch_size // (self.micro_batch_size * self.data_parallel_size)


def problems_of(request: PlanRequest) -> list[str]:
    """Everything that is wrong, explained; the checks are those of a training run."""
    problems = [f"model: {problem}" for problem in request.model.check()]
    problems += check_layout(request.parallel)
    for field in ("gpus", "gpus_per_node", "seq_length", "micro_batch_size"):
        value: int = getattr(request, field)
        if value < 1:
            problems.append(f"{field}={value}: must be at least 1")
    if request.global_batch_size is not None and request.global_batch_size < 1:
        problems.append(f"global_batch_size={request.global_batch_size}: must be at least 1")
    sizes_fit = not problems
    problems += check_world(request.parallel, request.gpus)
    try:
        policy_for(request.precision)
    except ValueError as error:
        problems.append(str(error))
    if sizes_fit:
        problems += _module_problems(request)
    first: dict[str, str] = {}
    for problem in problems:
        first.setdefault(_without_layer_number(problem), problem)
    return list(first.values())


def _without_layer_number(problem: str) -> str:
    """Equal for what all layers say alike; the first of them is shown."""
    return re.sub(r"\.\d+\.", ".*.", problem)


def _module_problems(request: PlanRequest) -> list[str]:
    """The checks before a fit, on a stand-in for the strategy that only has its config."""
    strategy: Any = SimpleNamespace(config=request.parallel, user_plan=None)
    data = SimpleNamespace(
        seq_length=request.seq_length,
        micro_batch_size=request.micro_batch_size,
        global_batch_size=request.global_batch_size,
    )
    return module_problems(strategy, GPTModel(request.model), data, request.gpus)


# -------------------------------------------------------------------- from a config file


def read_config(path: str) -> dict[str, Any]:
    """What a file for `megatron-lightning fit --config` says, as fields of a request.

    Nothing is built and no data are opened. UserError names what is unknown.
    """
    file = Path(path)
    content = read_mapping(path, "trainer, model and data")
    check_names(content, path)
    trainer, data = content.get("trainer") or {}, arguments_of(content.get("data"))
    found: dict[str, Any] = {"model_name": file.stem}
    found |= _model(content.get("model") or {}, path)
    strategy = layout_of_section(trainer.get("strategy"), path)
    found["parallel"] = strategy
    found["micro_batch_size"] = strategy.micro_batch_size or data.get("micro_batch_size")
    found |= {name: data.get(name) for name in ("seq_length", "global_batch_size")}
    devices = trainer.get("devices")
    if isinstance(devices, (list, tuple)):
        devices = len(devices)
    if isinstance(devices, int) and devices > 0:
        found["gpus"] = devices * int(trainer.get("num_nodes", 1))
        found["gpus_per_node"] = devices
    found["precision"] = str(trainer.get("precision") or "32-true")
    return {name: value for name, value in found.items() if value is not None}


def arguments_of(section: Any) -> dict[str, Any]:
    """`init_args` of a class_path entry, or the section itself."""
    if not isinstance(section, Mapping):
        return {}
    if "class_path" in section:
        return dict(section.get("init_args") or {})
    return dict(section)


def _model(section: Mapping[str, Any], path: str) -> dict[str, Any]:
    kind = str(section.get("class_path", "GPTModel")).rpartition(".")[2]
    if kind not in ("GPTModel", "gpt_preset"):
        raise UserError(f"--config {path}: model.class_path={kind}: plan knows GPTModel only")
    arguments = arguments_of(section)
    found: dict[str, Any] = {}
    if isinstance(arguments.get("config"), Mapping):
        found["model"] = build_config(GPTConfig, arguments["config"], f"{path}: model.config")
    elif "preset" in arguments:
        name = str(arguments["preset"])
        found |= {"model": preset_config(name), "model_name": name}
    if isinstance(arguments.get("optimizer"), Mapping):
        where = f"{path}: model.optimizer"
        found["optimizer"] = build_config(OptimizerConfig, arguments["optimizer"], where).name
    return found


def layout_of_section(section: Any, path: str) -> ParallelConfig:
    """The layout that `trainer.strategy` of a config file describes."""
    if isinstance(section, str) or section is None:
        return ParallelConfig()
    kind = str(section.get("class_path", "MegatronStrategy")).rpartition(".")[2]
    if kind != "MegatronStrategy":
        raise UserError(f"--config {path}: trainer.strategy={kind}: plan knows MegatronStrategy")
    arguments = arguments_of(section)
    values = {k: v for k, v in arguments.items() if k not in ("plan", "batch_dims") and v != {}}
    values = {name: value for name, value in values.items() if value is not None}
    return build_config(ParallelConfig, values, f"{path}: trainer.strategy")


def build_config(kind: type[Any], values: Mapping[str, Any], where: str) -> Any:
    """A config dataclass from nested plain values; UserError names fields that it hasn't."""
    hints = get_type_hints(kind)
    unknown = sorted(set(values) - {field.name for field in dataclasses.fields(kind)})
    if unknown:
        section = where.rpartition(": ")[2] if ": " in where else ""
        prefix = f"{section}." if section else ""
        raise UserError(
            "; ".join(
                f"{where}.{name}: there is no such field: {remedy(kind, name, prefix)}"
                for name in unknown
            )
        )
    built: dict[str, Any] = {}
    for name, value in values.items():
        options = [hints[name], *get_args(hints[name])]
        nested = next((cast(Any, one) for one in options if dataclasses.is_dataclass(one)), None)
        if nested is not None and isinstance(value, Mapping):
            value = build_config(nested, value, f"{where}.{name}")
        built[name] = value
    try:
        return kind(**built)
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: {error}") from error
