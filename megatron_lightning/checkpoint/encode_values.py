"""Values that are not JSON by themselves, each with a tag: how it is written and read back.

A kind is chosen by the exact type of a value, so that a subclass with more state is refused, not
silently reduced. Reading builds objects of the types listed here and nothing else.
"""

import base64
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any

import numpy as np
import torch

from megatron_lightning.checkpoint.files import flatten
from megatron_lightning.checkpoint.index import DTYPES, dtype_name

TAG = "$"
"""The key that marks a tagged value; its value is the name of the kind."""
Place = tuple[Any, ...]
"""The keys that lead from the root of a tree to a value."""
FACTORIES: dict[str, Callable[[], Any] | None] = {
    "None": None,
    **{
        kind.__name__: kind for kind in (list, dict, set, tuple, int, float, str, bool, OrderedDict)
    },
}
"""What a defaultdict may make, by name."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How values of some types are written: `{"$": tag, "v": to_json(value)}`."""

    tag: str
    types: tuple[type, ...]
    to_json: Callable[[Any], Any]
    from_json: Callable[[Any], Any]


def bytes_to_text(data: bytes) -> str:
    """Base64."""
    return base64.b64encode(data).decode("ascii")


def text_to_bytes(text: str) -> bytes:
    """The inverse of `bytes_to_text`; raises ValueError for anything else."""
    return base64.b64decode(text, validate=True)


def numpy_dtype(name: str) -> np.dtype:
    """A numpy dtype of plain memory: bool, number, string, bytes or time. Raises ValueError for
    objects and records.
    """
    dtype = np.dtype(name)
    if dtype.kind not in "biufcUSmM":
        raise ValueError(f"numpy dtype {name!r} is not plain memory")
    return dtype


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}")
    return DTYPES[name]


def _timedelta(parts: list[int]) -> timedelta:
    days, seconds, microseconds = parts
    return timedelta(days=days, seconds=seconds, microseconds=microseconds)


def _float(text: str) -> float:
    if text not in ("inf", "-inf", "nan"):
        raise ValueError(f"{text!r} is not inf, -inf or nan")
    return float(text)


KINDS: tuple[Kind, ...] = (
    Kind("float", (), repr, _float),  # only inf and nan; the encoder sends them here
    Kind("bytes", (bytes,), bytes_to_text, text_to_bytes),
    Kind(
        "bytearray",
        (bytearray,),
        lambda v: bytes_to_text(bytes(v)),
        lambda v: bytearray(text_to_bytes(v)),
    ),
    Kind(
        "complex",
        (complex,),
        lambda v: [v.real.hex(), v.imag.hex()],
        lambda v: complex(*map(float.fromhex, v)),
    ),
    Kind("path", (PosixPath, WindowsPath), str, Path),
    Kind("pure_posix_path", (PurePosixPath,), str, PurePosixPath),
    Kind("pure_windows_path", (PureWindowsPath,), str, PureWindowsPath),
    Kind("fraction", (Fraction,), lambda v: [v.numerator, v.denominator], lambda v: Fraction(*v)),
    Kind("decimal", (Decimal,), str, Decimal),
    Kind(
        "datetime", (datetime,), lambda v: [v.isoformat(), v.fold], lambda v: _moment(datetime, v)
    ),
    Kind("time", (time,), lambda v: [v.isoformat(), v.fold], lambda v: _moment(time, v)),
    Kind("date", (date,), date.isoformat, date.fromisoformat),
    Kind("timedelta", (timedelta,), lambda v: [v.days, v.seconds, v.microseconds], _timedelta),
    Kind("range", (range,), lambda v: [v.start, v.stop, v.step], lambda v: range(*v)),
    Kind("torch.dtype", (torch.dtype,), dtype_name, _dtype),
    Kind("torch.device", (torch.device,), str, torch.device),
    Kind("torch.Size", (torch.Size,), list, torch.Size),
)


def scalar_to_json(value: np.generic) -> dict[str, Any]:
    """A numpy scalar with its exact bits."""
    dtype = numpy_dtype(value.dtype.str)
    return {TAG: "numpy", "dtype": dtype.str, "v": bytes_to_text(value.tobytes())}


def scalar_from_json(node: dict[str, Any]) -> np.generic:
    """The inverse of `scalar_to_json`."""
    dtype, data = numpy_dtype(node["dtype"]), text_to_bytes(node["v"])
    if dtype.itemsize == 0:  # an empty string has no bytes to read from
        return dtype.type()
    (value,) = np.frombuffer(data, dtype)
    return value


def tensor_to_json(tensor: torch.Tensor) -> dict[str, Any]:
    """A small tensor with its exact bits."""
    data = flatten(tensor.cpu()).view(torch.uint8).numpy().tobytes()
    return {
        TAG: "tensor",
        "dtype": dtype_name(tensor.dtype),
        "shape": list(tensor.shape),
        "v": bytes_to_text(data),
    }


def tensor_from_json(node: dict[str, Any]) -> torch.Tensor:
    """The inverse of `tensor_to_json`, on the CPU."""
    dtype, shape = _dtype(node["dtype"]), [int(size) for size in node["shape"]]
    data = text_to_bytes(node["v"])
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes cannot be a tensor of {dtype} and shape {shape}")
    tensor = torch.empty(math.prod(shape), dtype=dtype)
    if data:
        tensor.view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return tensor.reshape(shape)


def _moment(kind: type, parts: list[Any]) -> Any:
    text, fold = parts
    return kind.fromisoformat(text).replace(fold=fold)


def class_name(cls: type) -> str:
    """The name under which a class is stored."""
    return f"{cls.__module__}.{cls.__qualname__}"


def path_text(place: Place) -> str:
    """A place as text: the owner (the first key) and the path of keys in it."""
    return (str(place[0]) + "".join(f"[{key!r}]" for key in place[1:])) if place else "the root"
