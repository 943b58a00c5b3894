"""A checkpoint between reading and writing: tensors by this package's names, and the rest as JSON.

Names are those of `strategies/checkpoint_tensors.py`: `model.NAME`, `master.NAME` (float32 copies
of narrower weights) and `optimizer.I.KEY.NAME`; `objects/...` are large tensors out of the objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_lightning.checkpoint.convert.lazy import LazyTensor
from megatron_lightning.checkpoint.encode import OBJECT_TENSORS
from megatron_lightning.checkpoint.errors import CheckpointError

MODEL, MASTER, OPTIMIZER = "model.", "master.", "optimizer."
GROUPS = "optimizer_param_groups"
TRAINING_OBJECTS = ("callbacks", "lr_schedulers", GROUPS, "optimizer_states")
"""What Lightning leaves out of a checkpoint of weights only."""
PRECISION_OBJECTS = ("MegatronPrecision", "MixedPrecision", "Precision")
_COUNTER = "step"
"""State of an optimizer that counts, and keeps its dtype."""


@dataclass(frozen=True, kw_only=True)
class Content:
    """A whole checkpoint that has not been read yet."""

    origin: str
    """What it was read from, for messages and the record of the conversion."""
    tensors: Mapping[str, LazyTensor]
    objects: Mapping[str, Any]
    """Encoded (`Codec`) values by their key."""
    metadata: Mapping[str, Any]
    """Encoded values for the manifest."""

    def weights_only(self) -> Content:
        """Model tensors, and the objects that Lightning keeps with weights."""
        dropped = (*TRAINING_OBJECTS, *PRECISION_OBJECTS)
        kept = {key: value for key, value in self.objects.items() if key not in dropped}
        referred = set(_references(kept))
        tensors = {
            name: tensor
            for name, tensor in self.tensors.items()
            if name.startswith(MODEL) or name in referred
        }
        return replace(self, tensors=tensors, objects=kept)

    def with_weights_dtype(self, dtype: torch.dtype) -> Content:
        """Floating weights as `dtype`. Float32 values are taken from the masters where there are
        some; where the optimizer stays and weights become narrower, masters keep what they lose.
        """
        tensors = dict(self.tensors)
        with_optimizer = any(name.startswith(OPTIMIZER) for name in tensors)
        stepped = {name.split(".", 3)[3] for name in tensors if _is_state(name)}
        for name, tensor in self.tensors.items():
            if not name.startswith(MODEL) or not tensor.dtype.is_floating_point:
                continue
            bare = name.removeprefix(MODEL)
            exact = self.tensors.get(MASTER + bare, tensor)
            tensors[name] = (exact if dtype.itemsize > 2 else tensor).to(dtype)
            if dtype.itemsize > 2:
                tensors.pop(MASTER + bare, None)
            elif with_optimizer and bare in stepped:
                tensors[MASTER + bare] = exact.to(torch.float32)
        return replace(self, tensors=tensors)

    def with_moments_dtype(self, dtype: torch.dtype) -> Content:
        """Floating state of the optimizer as `dtype`, except counters of steps."""
        tensors = {
            name: tensor.to(dtype)
            if _is_state(name)
            and name.split(".", 3)[2] != _COUNTER
            and tensor.dtype.is_floating_point
            else tensor
            for name, tensor in self.tensors.items()
        }
        return replace(self, tensors=tensors)


def exact_weights(content: Content) -> dict[str, LazyTensor]:
    """Weights by their bare names, as they are stored."""
    found = {
        name.removeprefix(MODEL): tensor
        for name, tensor in content.tensors.items()
        if name.startswith(MODEL)
    }
    if not found:
        raise CheckpointError(f"{content.origin} holds no weights (no tensor {MODEL}...)")
    return found


def _is_state(name: str) -> bool:
    return name.startswith(OPTIMIZER) and name.count(".") >= 3


def _references(tree: Any) -> Iterator[str]:
    """Names of tensors that an encoded tree refers to."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key == "ref" and isinstance(value, str):
                if value.startswith(OBJECT_TENSORS):
                    yield value
            else:
                yield from _references(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _references(value)
