"""The optimizer of a Megatron-Core checkpoint: float32 masters, moments, and how far training was.

Read are the forms that keep state by parameter, `optimizer.state.KIND.NAME`: with the parameter's
own shape (`fully_reshardable`, and optimizers that aren't distributed), or with each rank's part
flattened (`fully_sharded_model_space`: a parameter [X, Y] of local shape [x, y] is stored as
[X / x, Y / y, x * y]). Forms that keep buckets of one layout are refused by name.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.checkpoint.boxes import Box
from megatron_lightning.checkpoint.convert.inert_pickle import Record, read_values
from megatron_lightning.checkpoint.convert.lazy import LazyTensor
from megatron_lightning.checkpoint.convert.megatron_core import (
    MODEL_PREFIXES,
    bare_weights,
    gpt_rules,
)
from megatron_lightning.checkpoint.convert.rules import to_ours
from megatron_lightning.checkpoint.convert.torch_dcp import DcpFolder
from megatron_lightning.checkpoint.errors import CheckpointError
from megatron_lightning.config.model import GPTConfig

COMMON = "common.pt"
"""What is the same on all ranks: iteration, schedules, hyper-parameters of the optimizer."""
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
_MASTERS = ("param", "fp32_param")
_BUCKETS = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.")


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """By the names of our network."""

    masters: Mapping[str, LazyTensor]
    moments: Mapping[str, Mapping[str, LazyTensor]]
    """Kind (`exp_avg`, ...) -> parameter -> values."""
    step: int | None
    """Optimizer steps; None where the checkpoint doesn't say."""


def training_state(found: DcpFolder, config: GPTConfig) -> TrainingState:
    """State of the optimizer, not read yet. CheckpointError for a form that isn't known."""
    buckets = next((n for n in [*found.tensors, *found.values] if _BUCKETS.match(n)), None)
    by_kind: dict[str, dict[str, LazyTensor]] = defaultdict(dict)
    weights = bare_weights(found)
    for name, tensor in found.tensors.items():
        if (match := _STATE.fullmatch(name)) is None:
            continue
        kind, parameter = match.groups()
        prefix = next((p for p in MODEL_PREFIXES if parameter.removeprefix(p) in weights), None)
        bare = parameter.removeprefix(prefix or "")
        like = weights.get(bare)
        if prefix is None or like is None:
            raise CheckpointError(f"{found.folder}: {name} is the state of no parameter in it")
        by_kind[kind][bare] = _with_shape(tensor, like.shape, f"{found.folder}: {name}")
    if buckets is not None and any(_BUCKETS.match(name) for name in found.tensors):
        raise CheckpointError(
            f"{found.folder}: the optimizer's state is in buckets of one layout ({buckets}), which"
            " can't be read; save with distrib_optim_sharding_type='fully_reshardable', or convert"
            " with --weights-only"
        )
    rules = gpt_rules(config)
    named = {kind: to_ours(rules, tensors).tensors for kind, tensors in by_kind.items()}
    masters = next((named.pop(kind) for kind in _MASTERS if kind in named), {})
    return TrainingState(masters=masters, moments=named, step=_step(found.folder))


def _with_shape(tensor: LazyTensor, shape: tuple[int, ...], where: str) -> LazyTensor:
    """A parameter's state in the parameter's shape."""
    if tensor.shape == shape:
        return tensor
    fragments, flat = tensor.shape[:-1], tensor.shape[-1] if tensor.shape else 0
    local = tuple(size // f if f else 0 for size, f in zip(shape, fragments, strict=False))
    whole = tuple(f * size for f, size in zip(fragments, local, strict=False))
    if len(fragments) != len(shape) or whole != shape or math.prod(local) != flat:
        raise CheckpointError(
            f"{where} of shape {list(tensor.shape)} is neither the parameter's {list(shape)} nor"
            " parts of it that were flattened; convert with --weights-only"
        )

    def part(box: Box) -> Tensor:
        target = torch.empty(box.sizes, dtype=tensor.dtype)
        for place in _grid(box, local):
            held = Box(tuple(i * size for i, size in zip(place, local, strict=True)), local)
            common = held.intersect(box)
            if common is None:
                continue
            stored = tensor.part(Box((*place, 0), (*(1,) * len(place), flat))).view(local)
            view = target[common.shift(box.offsets, sign=-1).slices()]
            view.copy_(stored[common.shift(held.offsets, sign=-1).slices()])
        return target

    return LazyTensor(shape, tensor.dtype, part)


def _grid(box: Box, local: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Places of the parts of shape `local` that the box touches."""
    found: list[tuple[int, ...]] = [()]
    for begin, size, length in zip(box.offsets, box.sizes, local, strict=True):
        numbers = range(begin // length, -(-(begin + size) // length))
        found = [(*place, number) for place in found for number in numbers]
    return found


def _step(folder: Path) -> int | None:
    path = folder / COMMON
    if not path.is_file():
        return None
    common = read_values(path)
    iteration = common.get("iteration") if isinstance(common, dict) else None
    return iteration if isinstance(iteration, int) else _find_step(common)


def _find_step(values: Any) -> int | None:
    """`step` of the first group of parameters."""
    if isinstance(values, Record):
        return None
    if isinstance(values, Mapping):
        for group in values.get("param_groups") or ():
            if isinstance(group, Mapping) and isinstance(group.get("step"), (int, float)):
                return int(group["step"])
        values = list(values.values())
    found = [_find_step(one) for one in values] if isinstance(values, list) else []
    return next((step for step in found if step is not None), None)
