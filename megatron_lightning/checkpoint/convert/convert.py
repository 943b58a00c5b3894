"""From a checkpoint of one kind to another, a tensor at a time, in one process and without GPUs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import lightning
import torch

from megatron_lightning.checkpoint.config_codec import CODEC
from megatron_lightning.checkpoint.convert import single_file
from megatron_lightning.checkpoint.convert.content import (
    GROUPS,
    MASTER,
    MODEL,
    OPTIMIZER,
    Content,
)
from megatron_lightning.checkpoint.convert.lazy import LazyTensor
from megatron_lightning.checkpoint.convert.lightning_files import (
    META,
    GroupOf,
    read_lightning_file,
    read_lightning_folder,
)
from megatron_lightning.checkpoint.convert.megatron_core import weights_of
from megatron_lightning.checkpoint.convert.megatron_state import training_state
from megatron_lightning.checkpoint.convert.native import read_native, write_native
from megatron_lightning.checkpoint.convert.nemo import WEIGHTS, is_nemo, nemo_config
from megatron_lightning.checkpoint.convert.torch_dcp import (
    TABLE,
    DcpFolder,
    read_dcp,
    read_dcp_content,
    write_dcp,
)
from megatron_lightning.checkpoint.errors import CheckpointError
from megatron_lightning.checkpoint.manifest import MANIFEST_FILE, pickle_note
from megatron_lightning.config.model import GPTConfig

Kind = Literal["native", "safetensors", "torch-dcp", "megatron-core", "nemo", "lightning"]
KINDS: tuple[Kind, ...] = get_args(Kind)
WRITTEN: tuple[Kind, ...] = ("native", "safetensors", "torch-dcp")
PICKLED: tuple[Kind, ...] = ("torch-dcp", "megatron-core", "nemo", "lightning")
_NETWORK = "network."  # attribute of the module that the network is
_HEAD = "output_layer.weight"


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What a conversion does besides copying."""

    weights_only: bool = False
    """Leave optimizer, schedulers and callbacks behind."""
    dtype: torch.dtype | None = None
    """Of the weights; None: as they are stored."""
    moments_dtype: torch.dtype | None = None
    """Of the optimizer's floating state; None: as it is stored."""
    files: int = 1
    """Data files of a native checkpoint."""
    allow_pickle: bool = False
    """Whether sources made of pickles may be read (without running code from them)."""
    hyper_parameters: Mapping[str, Any] | None = None
    """Constructor arguments of the module, in place of those of the source."""
    shapes: Mapping[str, tuple[int, ...]] | None = None
    """Name (`network. ...`) -> shape of all parameters of the model; None: not checked."""
    vocab_size: int | None = None
    """True vocabulary of a NeMo checkpoint that doesn't say it."""
    group_of: GroupOf | None = None
    """How parameters were put into groups of an optimizer that does not name them."""

    def check(self) -> list[str]:
        """Every violation as a sentence."""
        problems = []
        for field in ("dtype", "moments_dtype"):
            value: torch.dtype | None = getattr(self, field)
            if value is not None and not value.is_floating_point:
                problems.append(f"{field}={value}: give a floating dtype such as torch.bfloat16")
        if self.files < 1:
            problems.append(f"files={self.files}: give at least 1")
        if self.weights_only and self.moments_dtype is not None:
            problems.append("moments_dtype: there are no moments with weights_only; leave one out")
        return problems


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    source_kind: Kind | None = None,
    target_kind: Kind | None = None,
    how: Conversion | None = None,
) -> Content:
    """Read `source`, write `target` (complete or not at all), and return what was written.

    Kinds are found by looking where they are not given; a target is a safetensors file if it is
    called so, else a native checkpoint folder. At most one tensor is in memory at a time.

    Raises ValueError for options that don't fit, CheckpointError naming what is wrong with the
    source.
    """
    how, source, target = how or Conversion(), Path(source), Path(target)
    kind = source_kind or kind_of(source)
    wanted: Kind = target_kind or (
        "safetensors" if target.suffix == single_file.SUFFIX else "native"
    )
    _check(source, target, kind, wanted, how)
    if kind == "nemo" and how.hyper_parameters is None:
        how = replace(how, hyper_parameters={"config": nemo_config(source, how.vocab_size)})
    content = _prepare(_read(source, kind, how), how, wanted)
    if how.shapes is not None:
        _check_shapes(content, how.shapes)
    target.absolute().parent.mkdir(parents=True, exist_ok=True)
    if wanted == "native":
        write_native(target, content, files=how.files)
    elif wanted == "safetensors":
        single_file.write_safetensors(target, content)
    else:
        write_dcp(target, content)
    return content


def kind_of(path: Path) -> Kind:
    """What kind of checkpoint lies at `path`, by its files' names. Raises CheckpointError."""
    if path.is_file():
        if path.suffix == single_file.SUFFIX:
            return "safetensors"
        with open(path, "rb") as file:
            is_pickled = bool(pickle_note(file.read(4)))
        if not is_pickled and path.suffix not in _PICKLE_SUFFIXES:
            raise CheckpointError(
                f"{path} is no checkpoint: it is neither a *{single_file.SUFFIX} file nor one that"
                " torch.save has written; give one of these, or a folder"
            )
        return "lightning"
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give the file or folder of a checkpoint")
    if (path / MANIFEST_FILE).is_file():
        return "native"
    if (path / TABLE).is_file():
        if (path / META).is_file():
            return "lightning"
        return "megatron-core" if _is_megatron_core(path) else "torch-dcp"
    if is_nemo(path):
        return "nemo"
    inner = sorted(child.name for child in path.glob("iter_*") if (child / TABLE).is_file())
    if inner:
        raise CheckpointError(f"{path} holds several checkpoints; give one: {path / inner[-1]}")
    raise CheckpointError(
        f"{path} is no checkpoint of a known kind: it has neither {MANIFEST_FILE} nor {TABLE}"
    )


_PICKLE_SUFFIXES = (".ckpt", ".pt", ".pth")
"""Names that say so where the beginning doesn't: the oldest pickles have no signature."""
_FILES = ("safetensors", "lightning")
"""Kinds that may be one file."""


def _is_megatron_core(path: Path) -> bool:
    try:
        about = json.loads((path / "metadata.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(about, dict) and about.get("sharded_backend") == "torch_dist"


def _check(source: Path, target: Path, kind: Kind, wanted: Kind, how: Conversion) -> None:
    problems = how.check()
    if kind not in _FILES and source.is_file():
        raise ValueError(
            f"{source} is a file; a checkpoint of the kind {kind} is a folder: give it"
        )
    if wanted not in WRITTEN:
        problems.append(f"target_kind={wanted!r}: only {', '.join(WRITTEN)} are written")
    if target.exists() or target.is_symlink():
        problems.append(f"target={str(target)!r} exists; choose another name or remove it")
    if how.files > 1 and wanted != "native":
        problems.append(f"files={how.files}: only a native checkpoint has several data files")
    if how.moments_dtype is not None and wanted == "safetensors":
        problems.append("moments_dtype: a safetensors file holds weights only; leave it out")
    if kind in PICKLED and not how.allow_pickle:
        problems.append(
            f"{source} is of the kind {kind}, which is made of pickles: give --allow-pickle "
            f"(allow_pickle=True) to have it read; nothing in it is run, and what is not a tensor "
            f"or a plain value is refused"
        )
    if kind == "megatron-core" and how.hyper_parameters is None:
        problems.append(
            f"{source} is a checkpoint of Megatron-Core, which does not say what model it is: give "
            f"the model's config"
        )
    if problems:
        raise ValueError("\n".join(problems))


def _read(source: Path, kind: Kind, how: Conversion) -> Content:
    try:
        if kind == "native":
            return read_native(source)
        if kind == "safetensors":
            return single_file.read_safetensors(source)
        if kind == "torch-dcp":
            return read_dcp_content(source)
        if kind == "lightning":
            if source.is_dir():
                return read_lightning_folder(source)
            return read_lightning_file(source, how.group_of, weights_only=how.weights_only)
        return _read_megatron_core(source / WEIGHTS if kind == "nemo" else source, how)
    except OSError as error:
        raise CheckpointError(f"{source} cannot be read: {error}") from error


def _read_megatron_core(source: Path, how: Conversion) -> Content:
    config = (how.hyper_parameters or {}).get("config")
    if not isinstance(config, GPTConfig):
        raise ValueError(f"config={config!r}: a checkpoint of Megatron-Core needs a GPTConfig")
    found = read_dcp(source)
    renamed = weights_of(found, config)
    if renamed.left:
        more = f" and {len(renamed.left) - 5} more" if len(renamed.left) > 5 else ""
        raise CheckpointError(
            f"{source}: no rule for {', '.join(renamed.left[:5])}{more}; the model is not the GPT "
            f"that the config describes"
        )
    tensors = {f"{MODEL}{_NETWORK}{name}": tensor for name, tensor in renamed.tensors.items()}
    objects: dict[str, Any] = {}
    if not how.weights_only:
        state, objects = _training_state(found, config)
        tensors |= state
    if config.tie_word_embeddings:
        tensors = {n: t for n, t in tensors.items() if not n.endswith(f"{_NETWORK}{_HEAD}")}
    step = objects.get("global_step")
    metadata = {} if step is None else {"global_step": step}
    return Content(origin=str(source), tensors=tensors, objects=objects, metadata=metadata)


def _training_state(
    found: DcpFolder, config: GPTConfig
) -> tuple[dict[str, LazyTensor], dict[str, Any]]:
    """Tensors of the optimizer, and objects with which a Trainer goes on from there: its step,
    learning-rate schedule, and groups whose hyper-parameters are those of the run that goes on.
    """
    state = training_state(found, config)
    tensors = {f"{MASTER}{_NETWORK}{name}": tensor for name, tensor in state.masters.items()}
    if not state.moments:
        return tensors, {}
    for kind, moments in state.moments.items():
        tensors |= {f"{OPTIMIZER}0.{kind}.{_NETWORK}{n}": tensor for n, tensor in moments.items()}
    objects: dict[str, Any] = {
        GROUPS: [[{"name": "decay"}, {"name": "no_decay"}]],
        "lr_schedulers": [],
        "pytorch-lightning_version": lightning.__version__,
    }
    if state.step is not None:
        step = LazyTensor.held(torch.tensor(float(state.step)))
        names = next(iter(state.moments.values()))
        tensors |= {f"{OPTIMIZER}0.step.{_NETWORK}{name}": step for name in names}
        done = {"ready": state.step, "completed": state.step}
        objects |= {
            "epoch": 0,
            "global_step": state.step,
            "lr_schedulers": [{"last_epoch": state.step, "step_count": state.step + 1}],
            "loops": {"fit_loop": _progress(done)},
        }
    return tensors, CODEC.encode(objects).tree


def _progress(done: dict[str, int]) -> dict[str, Any]:
    """Lightning's record of so many optimizer steps."""
    both = {"current": done, "total": done}
    steps = {"step": both, "zero_grad": {k: {**done, "started": done["ready"]} for k in both}}
    return {
        "epoch_loop.automatic_optimization.optim_progress": {"optimizer": steps},
        "epoch_loop.scheduler_progress": both,
        "epoch_loop.state_dict": {"_batches_that_stepped": done["ready"]},
        "state_dict": {},
    }


def _prepare(content: Content, how: Conversion, wanted: Kind) -> Content:
    if how.dtype is not None:
        content = content.with_weights_dtype(how.dtype)
    if how.weights_only or wanted == "safetensors":
        content = content.weights_only()
    if how.moments_dtype is not None:
        content = content.with_moments_dtype(how.moments_dtype)
    if how.hyper_parameters is not None:
        encoded = CODEC.encode({"hyper_parameters": dict(how.hyper_parameters)})
        content = replace(content, objects={**content.objects, **encoded.tree})
    return replace(content, metadata={**content.metadata, "converted_from": content.origin})


def _check_shapes(content: Content, shapes: Mapping[str, tuple[int, ...]]) -> None:
    found = {
        name.removeprefix(MODEL): tensor.shape
        for name, tensor in content.tensors.items()
        if name.startswith(MODEL + _NETWORK)
    }
    problems = [f"missing: {name}" for name in sorted(set(shapes) - set(found))]
    problems += [f"unexpected: {name}" for name in sorted(set(found) - set(shapes))]
    problems += [
        f"{name}: shape {list(found[name])}, the model's is {list(shape)}"
        for name, shape in sorted(shapes.items())
        if name in found and found[name] != shape
    ]
    if problems:
        more = f"\n  and {len(problems) - 10} more" if len(problems) > 10 else ""
        listed = "".join(f"\n  {problem}" for problem in problems[:10])
        raise CheckpointError(f"{content.origin} does not fit the model:{listed}{more}")
