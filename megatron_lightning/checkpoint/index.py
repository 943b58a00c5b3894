"""The table of contents of a checkpoint: which box of which tensor lies where. Kept as JSON in
`metadata.json`.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron_lightning.checkpoint.boxes import Box
from megatron_lightning.checkpoint.errors import CheckpointError

METADATA_FILE = "metadata.json"
FORMAT_VERSION = 1
"""Version of the whole format (docs/checkpoint.md); readers refuse a newer one."""

_NOT_PLAIN = re.compile(r"torch\.(q|bits|u?int[1-7]$)")  # quantised, or without operations
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not _NOT_PLAIN.match(str(dtype))
}
"""Every torch dtype that is plain memory, by its name without `torch.`."""


@dataclass(frozen=True, slots=True)
class StoredBox:
    """One box in a data file, row-major, little-endian."""

    box: Box
    file: str
    """Path relative to the checkpoint folder."""
    start: int
    """Position of the first byte in the file."""
    length: int
    """Bytes."""
    crc32: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A global tensor and its disjoint boxes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[StoredBox, ...]


def dtype_name(dtype: torch.dtype) -> str:
    """The name under which a dtype is stored; raises ValueError for quantised and other packed
    dtypes.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(
            f"dtype {dtype} cannot be stored; convert the tensor to one of {sorted(DTYPES)}"
        )
    return name


def index_to_json(index: Mapping[str, StoredTensor], *, part: bool = False) -> bytes:
    """The contents of `metadata.json`: one line a tensor, sorted by name. A `part` holds what one
    rank holds of the tensors.
    """
    lines = []
    for name in sorted(index):
        tensor = index[name]
        boxes = [
            {
                "offsets": stored.box.offsets,
                "sizes": stored.box.sizes,
                "file": stored.file,
                "start": stored.start,
                "length": stored.length,
                "crc32": f"{stored.crc32:08x}",
            }
            for stored in sorted(tensor.boxes, key=lambda stored: stored.box.offsets)
        ]
        entry = {"dtype": dtype_name(tensor.dtype), "shape": tensor.shape, "boxes": boxes}
        lines.append(f"{json.dumps(name)}: {json.dumps(entry)}")
    table = ",\n".join(lines)
    kind = '"part": true, ' if part else ""
    return f'{{"format_version": {FORMAT_VERSION}, {kind}"tensors": {{\n{table}\n}}}}\n'.encode()


def index_from_json(data: bytes, where: str) -> dict[str, StoredTensor]:
    """Read `metadata.json`, checking every entry; raises CheckpointError naming `where` and the
    tensor.
    """
    try:
        table = json.loads(data)
        version, tensors = table["format_version"], table["tensors"]
        items, part = list(tensors.items()), table.get("part") is True
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{where} is not a table of tensors: {error}") from error
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{where} has format version {version!r}; this program reads {FORMAT_VERSION}"
        )
    index = {}
    for name, entry in items:
        try:
            index[name] = _tensor_from_json(entry, part=part)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{where}: the entry of tensor {name!r} is damaged: {error!r}"
            ) from error
    return index


def _tensor_from_json(entry: Mapping[str, Any], *, part: bool) -> StoredTensor:
    dtype, shape = DTYPES[entry["dtype"]], tuple(map(int, entry["shape"]))
    boxes = []
    for row in entry["boxes"]:
        box = Box(tuple(map(int, row["offsets"])), tuple(map(int, row["sizes"])))
        stored = StoredBox(
            box, str(row["file"]), int(row["start"]), int(row["length"]), int(row["crc32"], 16)
        )
        if len(box.offsets) != len(shape) or len(box.sizes) != len(shape):
            raise ValueError(f"{box} has not the dims of shape {shape}")
        if box.numel and not Box.whole(shape).contains(box):
            raise ValueError(f"{box} reaches beyond shape {shape}")
        if stored.length != box.numel * dtype.itemsize or stored.start < 0:
            raise ValueError(
                f"{box} of {entry['dtype']} cannot have {stored.length} bytes at {stored.start}"
            )
        if not _is_inside(stored.file):
            raise ValueError(f"file {stored.file!r} is not inside the checkpoint")
        boxes.append(stored)
    if not part and sum(stored.box.numel for stored in boxes) != math.prod(shape):
        raise ValueError(f"its boxes do not cover shape {shape}")
    return StoredTensor(dtype, shape, tuple(boxes))


def _is_inside(file: str) -> bool:
    parts = file.split("/")
    return "\\" not in file and all(part not in ("", ".", "..") for part in parts)
