"""One safetensors file: a header with names, dtypes, shapes and places, then the bytes.

The format is that of https://github.com/huggingface/safetensors (8 bytes of header length, JSON,
row-major tensors); written here a tensor at a time, since the library takes all tensors at once.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_lightning.checkpoint.boxes import Box
from megatron_lightning.checkpoint.convert.content import MODEL, Content, exact_weights
from megatron_lightning.checkpoint.convert.lazy import LazyTensor
from megatron_lightning.checkpoint.convert.native import pieces
from megatron_lightning.checkpoint.errors import CheckpointError
from megatron_lightning.checkpoint.files import flatten, sync_folder
from megatron_lightning.checkpoint.manifest import pickle_note

SUFFIX = ".safetensors"
_KEY = "megatron_lightning"
"""Entry of the header's metadata with the objects, so that the way back loses nothing but state of
the training."""
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_BLOCK = 16 * 2**20


def read_safetensors(path: Path) -> Content:
    """The weights of a file. Names without `model.` in front are taken for weights too."""
    with open(path, "rb") as file:
        beginning = file.read(4)
    try:
        opened = safe_open(path, framework="pt", device="cpu")
        names = list(opened.keys())
        about = opened.metadata() or {}
        tensors = {name: _lazy(opened, name) for name in names}
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{path} is no safetensors file{pickle_note(beginning)}: {error}"
        ) from error
    try:
        kept = json.loads(about.get(_KEY, "{}"))
        objects, metadata = dict(kept.get("objects", {})), dict(kept.get("metadata", {}))
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: the entry {_KEY!r} of its header is damaged") from error
    return Content(
        origin=str(path),
        tensors={MODEL + name.removeprefix(MODEL): tensor for name, tensor in tensors.items()},
        objects=objects,
        metadata=metadata,
    )


def _lazy(opened: Any, name: str) -> LazyTensor:
    view = opened.get_slice(name)
    shape = tuple(view.get_shape())
    dtype = {text: dtype for dtype, text in _DTYPES.items()}.get(view.get_dtype())
    if dtype is None:
        raise ValueError(f"{name}: its type {view.get_dtype()} is not known")

    def part(box: Box) -> Tensor:
        return view[box.slices()].clone() if shape else opened.get_tensor(name).clone()

    return LazyTensor(shape, dtype, part)


def write_safetensors(path: Path, content: Content) -> None:
    """Write the weights to one file, which appears when it is complete.

    Objects that fit into text (the config among them) go into the header's metadata. At most one
    tensor, or 64 MiB of it, is in memory.
    """
    weights = exact_weights(content)
    header = _header(weights, content)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with open(partial, "xb") as file:
            file.write(len(header).to_bytes(8, "little"))
            file.write(header)
            for name in weights:
                for box in pieces(weights[name]):
                    flat = flatten(weights[name].part(box))
                    for block in flat.split(max(1, _BLOCK // flat.element_size())):
                        file.write(block.view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_folder(path.absolute().parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _header(weights: Mapping[str, LazyTensor], content: Content) -> bytes:
    small = content.weights_only()
    plain = {k: v for k, v in small.objects.items() if not _refers(v)}
    kept = json.dumps({"objects": plain, "metadata": dict(small.metadata)}, allow_nan=False)
    table: dict[str, Any] = {"__metadata__": {"format": "pt", _KEY: kept}}
    position = 0
    for name, tensor in weights.items():
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(
                f"{name} is {tensor.dtype}, which safetensors files do not hold; give --dtype"
            )
        size = Box.whole(tensor.shape).numel * tensor.dtype.itemsize
        table[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + size],
        }
        position += size
    data = json.dumps(table).encode()
    return data + b" " * (-len(data) % 8)


def _refers(tree: Any) -> bool:
    return '"ref"' in json.dumps(tree)
