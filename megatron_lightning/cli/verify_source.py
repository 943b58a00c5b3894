"""Where `verify` gets modules and data from: built anew in every rank, always the same.

Either a preset with synthetic tokens, or the model and data sections of the config file of a
training run, whatever classes they name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import LightningArgumentParser
from torch import Tensor

from megatron_lightning.cli.config_file import read_mapping
from megatron_lightning.cli.config_names import check_names
from megatron_lightning.cli.errors import UserError
from megatron_lightning.cli.plan_request import arguments_of, build_config, layout_of_section
from megatron_lightning.config.model import GPTConfig
from megatron_lightning.config.parallel import ParallelConfig
from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.layers.torch_backend import AttentionKernel
from megatron_lightning.models.gpt import GPTModel
from megatron_lightning.models.presets import preset_config


@dataclass(frozen=True, kw_only=True)
class Source:
    """What is trained, on what, and how."""

    name: str
    make_module: Callable[[], L.LightningModule]
    make_data: Callable[[], L.LightningDataModule]
    target: ParallelConfig
    """Layout of the config file."""
    world_size: int | None
    """Its devices times nodes; None where it doesn't say."""
    precision: str
    trainer: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the Trainer that change what is computed."""
    config: GPTConfig | None = None
    """Of a GPTModel, after reductions."""
    notes: tuple[str, ...] = ()
    """Everything that differs from what was asked for."""


class SyntheticTokens(L.LightningDataModule):
    """Deterministic global batches of random tokens with unequal loss masks; a data rank gets its
    slice.
    """

    def __init__(
        self, vocab_size: int, seq_length: int, micro_batch_size: int, global_batch_size: int
    ) -> None:
        super().__init__()
        self.vocab_size, self.seq_length = vocab_size, seq_length
        self.micro_batch_size, self.global_batch_size = micro_batch_size, global_batch_size

    def train_dataloader(self) -> SyntheticBatches:
        """Batches of this rank."""
        assert self.trainer is not None
        place = self.trainer.strategy.distributed_sampler_kwargs  # type: ignore[attr-defined]
        return SyntheticBatches(self, place["rank"], place["num_replicas"])


class SyntheticBatches:
    """An iterable that Lightning leaves alone, since it is no DataLoader."""

    def __init__(self, data: SyntheticTokens, rank: int, size: int) -> None:
        self.data, self.rank, self.size = data, rank, size

    def __len__(self) -> int:
        return 1 << 20

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for index in range(len(self)):
            batch = self.global_batch(index)
            yield {name: value.chunk(self.size)[self.rank] for name, value in batch.items()}

    def global_batch(self, index: int) -> dict[str, Tensor]:
        """Batch number `index` of all ranks together: (global_batch_size, seq_length)."""
        generator = torch.Generator().manual_seed(1000 + index)
        rows, length = self.data.global_batch_size, self.data.seq_length
        shape = (rows, length + 1)
        tokens = torch.randint(0, self.data.vocab_size, shape, generator=generator)
        mask = (torch.rand(rows, length, generator=generator) < 0.8).float()
        mask[::3, length // 2 :] = 0.0
        return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask}


def from_preset(
    preset: str,
    *,
    seq_length: int,
    micro_batch_size: int,
    global_batch_size: int,
    changes: Mapping[str, Any],
    precision: str = "32-true",
    learning_rate: float = 1e-3,
) -> Source:
    """A GPT of a published shape on synthetic tokens; `changes` are fields of its config."""
    config, notes = _reduced(preset_config(preset), changes)
    attention: AttentionKernel = "reference" if config.attention_dropout > 0 else "fused"
    return Source(
        name=preset,
        make_module=lambda: GPTModel(
            config,
            OptimizerConfig(lr=learning_rate),
            SchedulerConfig(min_lr=learning_rate / 10),
            attention=attention,
        ),
        make_data=lambda: SyntheticTokens(
            config.vocab_size, seq_length, micro_batch_size, global_batch_size
        ),
        target=ParallelConfig(micro_batch_size=micro_batch_size),
        world_size=None,
        precision=precision,
        trainer={"gradient_clip_val": 1.0},
        config=config,
        notes=(*notes, *_dropout_notes(config), "synthetic tokens"),
    )


def from_config(path: str, *, changes: Mapping[str, Any], synthetic: bool = False) -> Source:
    """Model, data, layout and Trainer of a config file for `megatron-lightning fit`.

    `changes` are fields of a GPTModel's config (reductions). UserError names what can't be used.
    """
    content = read_mapping(path, "trainer, model and data")
    check_names(content, path)
    if "model" not in content:
        raise UserError(f"--config {path}: it has no model section")
    trainer = content.get("trainer") or {}
    model, data = _section(content["model"], "GPTModel"), content.get("data")
    notes: list[str] = []
    config = None
    if _is_gpt(model):
        model, config, notes = _gpt_section(model, changes, path)
    elif changes:
        raise UserError(
            f"--layers, --hidden, --set: they reduce a GPTModel, not {model['class_path']}"
        )
    if synthetic:
        notes.append("synthetic tokens in place of the data")
    devices = trainer.get("devices")
    devices = len(devices) if isinstance(devices, (list, tuple)) else devices
    world_size = devices * trainer.get("num_nodes", 1) if isinstance(devices, int) else None
    kept = ("gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches")
    return Source(
        name=Path(path).stem,
        make_module=lambda: _build(L.LightningModule, model),
        make_data=_synthetic(data, config, path) if synthetic else _data(data, path),
        target=layout_of_section(trainer.get("strategy"), path),
        world_size=world_size,
        precision=str(trainer.get("precision") or "32-true"),
        trainer={name: trainer[name] for name in kept if trainer.get(name) is not None},
        config=config,
        notes=tuple(notes),
    )


def _data(data: Any, path: str) -> Callable[[], L.LightningDataModule]:
    if data is None:
        raise UserError(f"--config {path}: it has no data section; use --synthetic")
    section = _section(data, "PretrainingDataModule")
    return lambda: _build(L.LightningDataModule, section)


def _synthetic(
    data: Any, config: GPTConfig | None, path: str
) -> Callable[[], L.LightningDataModule]:
    if config is None:
        raise UserError("--synthetic: only for a GPTModel, whose batches are known")
    arguments = arguments_of(data)
    names = ("seq_length", "micro_batch_size", "global_batch_size")
    missing = [name for name in names if not isinstance(arguments.get(name), int)]
    if missing:
        raise UserError(f"--synthetic: the data section of {path} gives no {', '.join(missing)}")
    sizes: list[int] = [arguments[name] for name in names]
    return lambda: SyntheticTokens(config.vocab_size, *sizes)


def _section(section: Mapping[str, Any], default: str) -> dict[str, Any]:
    if "class_path" in section:
        return dict(section)
    return {"class_path": f"megatron_lightning.{default}", "init_args": dict(section)}


def _is_gpt(section: Mapping[str, Any]) -> bool:
    return str(section["class_path"]).rpartition(".")[2] in ("GPTModel", "gpt_preset")


def _gpt_section(
    section: dict[str, Any], changes: Mapping[str, Any], path: str
) -> tuple[dict[str, Any], GPTConfig, list[str]]:
    """The section with reductions, and with exact dropout if it drops."""
    arguments = dict(section.get("init_args") or {})
    if "preset" in arguments:
        given = preset_config(str(arguments.pop("preset")))
    elif isinstance(arguments.get("config"), Mapping):
        given = build_config(GPTConfig, arguments["config"], f"{path}: model.config")
    else:
        raise UserError(f"--config {path}: model.init_args.config: give the fields of a GPTConfig")
    config, notes = _reduced(given, changes)
    arguments["config"] = config.to_dict()
    if config.attention_dropout > 0:
        arguments["attention"] = "reference"
    made = {"class_path": "megatron_lightning.GPTModel", "init_args": arguments}
    return made, config, [*notes, *_dropout_notes(config)]


def _reduced(config: GPTConfig, changes: Mapping[str, Any]) -> tuple[GPTConfig, list[str]]:
    """The config with `changes`, and a sentence for each."""
    reduced = config.with_changes(**changes) if changes else config
    return reduced, _differences(config.to_dict(), reduced.to_dict())


def _differences(
    before: Mapping[str, Any], after: Mapping[str, Any], inside: str = ""
) -> list[str]:
    notes: list[str] = []
    for name, value in before.items():
        if isinstance(value, Mapping) and isinstance(after[name], Mapping):
            notes += _differences(value, after[name], f"{inside}{name}.")
        elif value != after[name]:
            notes.append(f"reduced: {inside}{name}={after[name]} in place of {value}")
    return notes


def _dropout_notes(config: GPTConfig) -> list[str]:
    if config.attention_dropout == 0 and config.hidden_dropout == 0:
        return []
    reference = " and the reference attention" if config.attention_dropout > 0 else ""
    return [f"dropout is on: masks by global position{reference}, so that layouts can be compared"]


def _build(kind: type[Any], section: Mapping[str, Any]) -> Any:
    """An instance of the class that a section names, as LightningCLI makes it."""
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_lightning_class_args(kind, "made", subclass_mode=True)
    try:
        parsed = parser.parse_object({"made": _plain(section)})
        return parser.instantiate_classes(parsed)["made"]
    except (TypeError, ValueError, ImportError) as error:
        raise UserError(f"{section['class_path']}: {error}") from error


def _plain(value: Any) -> Any:
    """Lists in place of tuples, as a config file has them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value
