"""Reading tagged JSON back. Builds the types that `encode_values.py` and the `Codec` list, and
nothing else.
"""

import dataclasses
import enum
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.data import AttributeDict

from megatron_lightning.checkpoint.encode_values import (
    FACTORIES,
    KINDS,
    TAG,
    Place,
    numpy_dtype,
    path_text,
    scalar_from_json,
    tensor_from_json,
)
from megatron_lightning.checkpoint.errors import CheckpointError


class Decoder:
    """Reads one tree. `tensors` are those that were taken out; `where` is named in errors."""

    def __init__(
        self, classes: Mapping[str, type], tensors: Mapping[str, torch.Tensor], where: str
    ) -> None:
        self._classes, self._tensors, self._where = classes, tensors, where
        self._kinds = {kind.tag: kind for kind in KINDS}
        self._tags: dict[str, Callable[[dict[str, Any], Place], Any]] = {
            "tuple": lambda node, place: tuple(self._items(node, place)),
            "set": lambda node, place: set(self._items(node, place)),
            "frozenset": lambda node, place: frozenset(self._items(node, place)),
            "deque": lambda node, place: deque(self._items(node, place), node["maxlen"]),
            "dict": lambda node, place: dict(self._pairs(node, place)),
            "OrderedDict": lambda node, place: OrderedDict(self._pairs(node, place)),
            "AttributeDict": lambda node, place: AttributeDict(self._pairs(node, place)),
            "defaultdict": lambda node, place: defaultdict(
                FACTORIES[node["factory"]], self._pairs(node, place)
            ),
            "numpy": lambda node, place: scalar_from_json(node),
            "tensor": lambda node, place: self._tensor(node),
            "ndarray": lambda node, place: self._array(node, place),
            "enum": lambda node, place: self._class(node, enum.Enum)[node["v"]],
            "dataclass": self._dataclass,
        }

    def decode(self, node: Any, place: Place) -> Any:
        """The value at `place`. Raises CheckpointError for what the encoder does not write."""
        if isinstance(node, list):
            return [self.decode(item, (*place, i)) for i, item in enumerate(node)]
        if not isinstance(node, dict):
            return node
        if TAG not in node:
            return {key: self.decode(item, (*place, key)) for key, item in node.items()}
        tag = node[TAG]
        try:
            if tag in self._kinds:
                return self._kinds[tag].from_json(node["v"])
            if tag in self._tags:
                return self._tags[tag](node, place)
        except CheckpointError:
            raise
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            ArithmeticError,
            RuntimeError,
        ) as error:
            raise CheckpointError(
                f"{self._where}: {path_text(place)} is not a valid {tag}: {error!r}"
            ) from error
        raise CheckpointError(
            f"{self._where}: {path_text(place)} is of the unknown kind {tag!r};"
            " it may come from a newer version"
        )

    def _items(self, node: dict[str, Any], place: Place) -> list[Any]:
        return [self.decode(item, (*place, i)) for i, item in enumerate(node["v"])]

    def _pairs(self, node: dict[str, Any], place: Place) -> list[tuple[Any, Any]]:
        pairs = []
        for key, item in node["items"]:
            decoded = self.decode(key, place)
            pairs.append((decoded, self.decode(item, (*place, decoded))))
        return pairs

    def _tensor(self, node: dict[str, Any]) -> torch.Tensor:
        if "ref" not in node:
            return tensor_from_json(node)
        if node["ref"] not in self._tensors:
            raise ValueError(f"the tensor {node['ref']!r} is missing")
        return self._tensors[node["ref"]]

    def _array(self, node: dict[str, Any], place: Place) -> np.ndarray:
        data = bytearray(self.decode(node["data"], place).numpy().tobytes())
        dtype, shape = numpy_dtype(node["dtype"]), node["shape"]
        return np.frombuffer(data, dtype).reshape(shape) if data else np.empty(shape, dtype)

    def _class(self, node: dict[str, Any], base: type) -> Any:
        cls = self._classes.get(node["class"])
        if cls is None or (base is not object and not issubclass(cls, base)):
            raise ValueError(f"class {node['class']!r} is not among the classes given for reading")
        return cls

    def _dataclass(self, node: dict[str, Any], place: Place) -> Any:
        cls = self._class(node, object)
        known = {field.name for field in dataclasses.fields(cls) if field.init}
        unknown = sorted(set(node["fields"]) - known)
        if unknown:
            raise ValueError(f"{node['class']} has no fields {unknown}")
        return cls(
            **{name: self.decode(item, (*place, name)) for name, item in node["fields"].items()}
        )
