"""Writing a tree of objects as tagged JSON (see `codec.py`), and saying what cannot be written."""

import dataclasses
import enum
import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.data import AttributeDict

from megatron_lightning.checkpoint.encode_values import (
    FACTORIES,
    KINDS,
    TAG,
    Place,
    class_name,
    numpy_dtype,
    path_text,
    scalar_to_json,
    tensor_to_json,
)
from megatron_lightning.checkpoint.index import dtype_name

OBJECT_TENSORS = "objects/"
"""Reserved beginning of the names of tensors taken out of the objects."""
_INLINE_BYTES = 4096
_MAX_DEPTH = 200


@dataclass(frozen=True, slots=True)
class Encoded:
    """A tree ready to be written."""

    tree: Any
    """JSON."""
    tensors: dict[str, torch.Tensor]
    """Tensors that the tree refers to by name, detached but not copied."""


class Encoder:
    """Writes one tree; `classes` are the dataclasses and enums that may occur in it."""

    def __init__(self, classes: Iterable[type]) -> None:
        self.problems: list[str] = []
        """What cannot be written, a sentence each."""
        self.tensors: dict[str, torch.Tensor] = {}
        """What was taken out, by name."""
        self._classes = frozenset(classes)
        self._open: set[int] = set()  # containers being written, to find cycles
        self._kinds = {kind_type: kind for kind in KINDS for kind_type in kind.types}
        self._containers: dict[type, Callable[[Any, Place], Any]] = {
            list: self._items,
            tuple: lambda value, place: {TAG: "tuple", "v": self._items(value, place)},
            set: lambda value, place: {TAG: "set", "v": self._items(_ordered(value), place)},
            frozenset: lambda value, place: {
                TAG: "frozenset",
                "v": self._items(_ordered(value), place),
            },
            deque: lambda value, place: {
                TAG: "deque",
                "v": self._items(value, place),
                "maxlen": value.maxlen,
            },
            dict: self._dict,
            OrderedDict: lambda value, place: {
                TAG: "OrderedDict",
                "items": self._pairs(value, place),
            },
            AttributeDict: lambda value, place: {
                TAG: "AttributeDict",
                "items": self._pairs(value, place),
            },
            defaultdict: self._defaultdict,
        }

    def encode(self, value: Any, place: Place) -> Any:
        """JSON for the value at `place`; None, and an entry in `problems`, if there is none."""
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {TAG: "float", "v": repr(value)}
        try:
            if kind in self._kinds:
                return {TAG: self._kinds[kind].tag, "v": self._kinds[kind].to_json(value)}
            if isinstance(value, np.generic):
                return scalar_to_json(value)
            if isinstance(value, torch.Tensor):
                return self._tensor(value, place)
            if kind is np.ndarray:
                return self._array(value, place)
            if isinstance(value, enum.Enum) and kind in self._classes:
                return self._enum(value, place)
        except ValueError as error:
            return self._problem(place, str(error))
        if kind in self._containers:
            return self._nested(self._containers[kind], value, place)
        if kind in self._classes:
            return self._nested(self._dataclass, value, place)
        return self._problem(place, _remedy(value))

    def _nested(self, write: Callable[[Any, Place], Any], value: Any, place: Place) -> Any:
        if id(value) in self._open:
            return self._problem(place, "contains itself")
        if len(place) >= _MAX_DEPTH:
            return self._problem(place[:3], f"is nested more than {_MAX_DEPTH} deep")
        self._open.add(id(value))
        result = write(value, place)
        self._open.discard(id(value))
        return result

    def _items(self, values: Iterable[Any], place: Place) -> list[Any]:
        return [self.encode(value, (*place, i)) for i, value in enumerate(values)]

    def _dict(self, value: dict[Any, Any], place: Place) -> dict[str, Any]:
        if all(type(key) is str for key in value) and TAG not in value:
            return {key: self.encode(item, (*place, key)) for key, item in value.items()}
        return {TAG: "dict", "items": self._pairs(value, place)}

    def _pairs(self, value: Mapping[Any, Any], place: Place) -> list[Any]:
        return [
            [self.encode(k, (*place, k)), self.encode(item, (*place, k))]
            for k, item in value.items()
        ]

    def _defaultdict(self, value: defaultdict[Any, Any], place: Place) -> Any:
        names = [name for name, factory in FACTORIES.items() if factory is value.default_factory]
        if not names:
            return self._problem(
                place, f"is a defaultdict of {value.default_factory!r}; use a plain dict"
            )
        return {TAG: "defaultdict", "factory": names[0], "items": self._pairs(value, place)}

    def _enum(self, value: enum.Enum, place: Place) -> Any:
        if value.name not in type(value).__members__:
            return self._problem(place, f"is a combination of flags ({value!r}); store its number")
        return {TAG: "enum", "class": class_name(type(value)), "v": value.name}

    def _dataclass(self, value: Any, place: Place) -> dict[str, Any]:
        names = [field.name for field in dataclasses.fields(value) if field.init]
        fields = {name: self.encode(getattr(value, name), (*place, name)) for name in names}
        return {TAG: "dataclass", "class": class_name(type(value)), "fields": fields}

    def _tensor(self, tensor: torch.Tensor, place: Place) -> Any:
        if (
            type(tensor) not in (torch.Tensor, torch.nn.Parameter)
            or tensor.layout is not torch.strided
        ):
            kind = type(tensor).__name__
            return self._problem(
                place,
                f"is a {kind} ({tensor.layout}), part of a global tensor; save it as a tensor",
            )
        if tensor.device.type == "meta":
            return self._problem(place, "is a tensor without values (on the meta device)")
        dtype_name(tensor.dtype)
        if tensor.numel() * tensor.element_size() < _INLINE_BYTES:
            return tensor_to_json(tensor)
        return {TAG: "tensor", "ref": self._take_out(tensor.detach(), place)}

    def _array(self, array: np.ndarray, place: Place) -> Any:
        node = {
            TAG: "ndarray",
            "dtype": numpy_dtype(array.dtype.str).str,
            "shape": list(array.shape),
        }
        data = (
            torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8)
            if array.nbytes
            else torch.empty(0)
        )
        return {**node, "data": self._tensor(data, place)}

    def _take_out(self, tensor: torch.Tensor, place: Place) -> str:
        name = OBJECT_TENSORS + "/".join(map(str, place))
        while name in self.tensors:
            name += "'"
        self.tensors[name] = tensor
        return name

    def _problem(self, place: Place, reason: str) -> None:
        self.problems.append(f"{path_text(place)}: {reason}")


def _ordered(values: Iterable[Any]) -> list[Any]:
    """A set in an order that does not depend on hashes, so that equal states give equal files."""
    return sorted(values, key=lambda value: (type(value).__name__, repr(value)))


def _remedy(value: Any) -> str:
    kind = type(value)
    if isinstance(value, type) or callable(value):
        return f"is the function or class {value!r}; store its name"
    if dataclasses.is_dataclass(value) or isinstance(value, enum.Enum):
        return f"is of the class {class_name(kind)}; give it to the codec, or store a dict or text"
    return f"is of the type {class_name(kind)}; store plain values (numbers, text, lists, dicts)"
