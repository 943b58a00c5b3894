"""What a checkpoint folder says of itself, as one dictionary of plain values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Rows = Iterator[tuple[str, str]]


def describe_checkpoint(path: Path) -> dict[str, Any]:
    """Everything that the tables of a checkpoint hold. Raises CheckpointError; reads no tensor."""
    from megatron_lightning.checkpoint import load_metadata, read_manifest
    from megatron_lightning.checkpoint.config_codec import CODEC
    from megatron_lightning.checkpoint.encode import OBJECT_TENSORS
    from megatron_lightning.checkpoint.preflight import read_tables

    manifest, tables = read_manifest(path), read_tables(path)
    created = datetime.fromtimestamp(manifest.created_unix_ns / 1e9, UTC)
    samples, tokens = _progress(tables.objects)
    return {
        "checkpoint": str(path),
        "written": created.isoformat(timespec="seconds"),
        "format_version": manifest.format_version,
        "megatron_lightning": manifest.program_version,
        "torch": manifest.torch_version,
        **{name: _plain(value) for name, value in load_metadata(path, codec=CODEC).items()},
        "samples": samples,
        "tokens": tokens,
        "tokenizer_digest": tables.objects.get("tokenizer_digest"),
        "files": {name: entry.size for name, entry in manifest.files.items()},
        "objects": sorted(tables.objects),
        "hyper_parameters": _hyper_parameters(tables.objects),
        "tensors": {
            name: {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "bytes": math.prod(tensor.shape) * tensor.dtype.itemsize,
                "files": sorted({stored.file for stored in tensor.boxes}),
            }
            for name, tensor in sorted(tables.index.items())
            if not name.startswith(OBJECT_TENSORS)
        },
    }


def checkpoint_rows(found: Mapping[str, Any], *, with_tensors: bool) -> Rows:
    """The same as lines of text."""
    yield "checkpoint", found["checkpoint"]
    yield "written", found["written"]
    yield "versions", f"megatron_lightning {found['megatron_lightning']}, torch {found['torch']}"
    own = ("checkpoint", "written", "format_version", "megatron_lightning", "torch", "files")
    own += ("objects", "hyper_parameters", "tensors", "samples", "tokens")
    for name, value in found.items():
        if name not in own and value is not None:
            yield name, str(value)
    for name in ("samples", "tokens"):
        if found[name] is not None:
            yield f"{name} trained on", f"{found[name]:,}"
    yield "size", f"{sum(found['files'].values()):,} bytes in {len(found['files'])} files"
    tensors = found["tensors"]
    for kind in sorted({name.partition(".")[0] for name in tensors}):
        members = [entry for name, entry in tensors.items() if name.startswith(f"{kind}.")]
        elements = sum(math.prod(entry["shape"]) for entry in members)
        dtypes = ", ".join(sorted({entry["dtype"] for entry in members}))
        yield f"{kind} tensors", f"{len(members)} of {dtypes}, {elements:,} elements"
    yield "objects", ", ".join(found["objects"])
    for name, value in found["hyper_parameters"].items():
        if isinstance(value, Mapping):
            for field, entry in value.items():
                yield f"{name}.{field}", str(entry)
        elif value is not None:
            yield name, str(value)
    if with_tensors:
        for name, entry in tensors.items():
            yield name, f"{entry['dtype']} {entry['shape']}"


def _progress(objects: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Samples by the data module, tokens by the `TokenLedger`; None where nothing says it."""
    loaders = [value.get("loader") for value in objects.values() if isinstance(value, Mapping)]
    counts = [
        one["consumed_samples"]
        for one in loaders
        if isinstance(one, Mapping) and isinstance(one.get("consumed_samples"), int)
    ]
    callbacks = objects.get("callbacks")
    tokens = None
    for name, state in callbacks.items() if isinstance(callbacks, Mapping) else ():
        if name.startswith("TokenLedger") and "tokens" in state.get("fields", ()):
            column = state["fields"].index("tokens") + 2  # after source and epoch
            tokens = sum(row[column] for row in state["rows"])
    return (counts[0] if counts else None), tokens


def _hyper_parameters(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the module; of configs the fields that are not at their defaults."""
    from megatron_lightning.checkpoint import CheckpointError
    from megatron_lightning.checkpoint.config_codec import CODEC

    encoded = objects.get("hyper_parameters") or {}
    try:
        arguments = CODEC.decode(encoded, where="hyper_parameters")
    except CheckpointError:  # classes of the user's own: shown as they are stored
        arguments = encoded
    return {name: _plain(value) for name, value in dict(arguments).items()}


def _plain(value: Any) -> Any:
    """Values that JSON knows."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: _plain(entry) for name, entry in _differences(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _differences(config: Any) -> Iterator[tuple[str, Any]]:
    """The fields of a config that are not at their defaults."""
    for field in dataclasses.fields(config):
        value, made = getattr(config, field.name), field.default_factory
        default = made() if made is not dataclasses.MISSING else field.default
        if value != default:
            yield field.name, value
