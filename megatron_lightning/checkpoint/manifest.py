"""The manifest: the last file written into a checkpoint and the first one read.

A folder is a checkpoint if and only if it holds a `manifest.json`, which lists every other file
with its size and checksum. All reading starts here, so that incomplete, damaged or foreign folders
are refused by name, and no pickle is ever opened: files of that kind are recognised by their first
bytes only.
"""

import json
import os
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_lightning import __version__
from megatron_lightning.checkpoint.errors import CheckpointError
from megatron_lightning.checkpoint.index import FORMAT_VERSION

MANIFEST_FILE = "manifest.json"
_FORMAT = "megatron_lightning checkpoint"
_PICKLE_BEGINNINGS = {
    b"PK\x03\x04": "a zip archive, as torch.save writes",
    b"\x80\x02": "a pickle",
    b"\x80\x03": "a pickle",
    b"\x80\x04": "a pickle",
    b"\x80\x05": "a pickle",
}


@dataclass(frozen=True, slots=True)
class FileEntry:
    """What the manifest says about one file."""

    size: int
    """Bytes."""
    crc32: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What is in a checkpoint folder, and who wrote it."""

    files: Mapping[str, FileEntry]
    """All files except the manifest itself, by path relative to the folder."""
    metadata: Any
    """What the caller of `save` added, encoded."""
    format_version: int = FORMAT_VERSION
    program_version: str = __version__
    torch_version: str = field(default_factory=lambda: str(torch.__version__))
    created_unix_ns: int = field(default_factory=time.time_ns)
    """When the manifest was made, in nanoseconds since 1970."""

    def to_json(self) -> bytes:
        """The contents of `manifest.json`, which end with a checksum of themselves."""
        body = {
            "format": _FORMAT,
            "format_version": self.format_version,
            "program_version": self.program_version,
            "torch_version": self.torch_version,
            "created_unix_ns": self.created_unix_ns,
            "metadata": self.metadata,
            "files": {
                n: {"size": e.size, "crc32": f"{e.crc32:08x}"} for n, e in self.files.items()
            },
        }
        return (
            json.dumps({**body, "crc32": _self_crc32(body)}, indent=1, allow_nan=False) + "\n"
        ).encode()


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read and check the manifest of the checkpoint at `path`.

    Raises CheckpointError if there is no checkpoint, or its manifest is damaged or of a newer
    format.
    """
    folder = local_path(path)
    file = folder / MANIFEST_FILE
    if not folder.is_dir() or not file.is_file():
        raise CheckpointError(_why_not(folder))
    data = file.read_bytes()
    try:
        body = json.loads(data)
        kind, format_version = body["format"], body["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged{pickle_note(data)}: {error}") from error
    if kind != _FORMAT:
        raise CheckpointError(f"{file} describes {kind!r}, not a {_FORMAT}")
    if format_version != FORMAT_VERSION:
        raise CheckpointError(
            f"{folder} has format version {format_version!r}; this program reads {FORMAT_VERSION}:"
            " use a newer one"
        )
    try:
        if body.pop("crc32") != _self_crc32(body):
            raise ValueError("its checksum differs")
        files = {
            n: FileEntry(int(e["size"]), int(e["crc32"], 16)) for n, e in body["files"].items()
        }
        return Manifest(
            files=files,
            metadata=body["metadata"],
            format_version=format_version,
            program_version=str(body["program_version"]),
            torch_version=str(body["torch_version"]),
            created_unix_ns=int(body["created_unix_ns"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error


def read_checked(folder: Path, manifest: Manifest, file: str) -> bytes:
    """The contents of a small file of the checkpoint, after its checksum has been compared."""
    if file not in manifest.files:
        raise CheckpointError(
            f"{folder / MANIFEST_FILE} does not list {file}; the checkpoint is damaged"
        )
    data = (folder / file).read_bytes()
    if zlib.crc32(data) != manifest.files[file].crc32:
        raise CheckpointError(
            f"{folder / file} is damaged{pickle_note(data)}: its checksum differs from the manifest"
        )
    return data


def local_path(path: str | os.PathLike[str]) -> Path:
    """`path` as a Path. Raises ValueError for the address of an object store, which would become a
    strange folder.
    """
    if "://" in os.fspath(path):
        raise ValueError(
            f"path={os.fspath(path)!r}: checkpoints are saved in a file system; give a plain path"
        )
    return Path(path)


def _why_not(path: Path) -> str:
    if path.is_file():
        with open(path, "rb") as file:
            note = pickle_note(file.read(4))
        return f"{path} is a file, not a checkpoint folder{note}"
    if not path.exists():
        return f"{path} does not exist"
    if (path / ".metadata").is_file():
        return (
            f"{path} is a checkpoint in the distributed format of torch"
            f" ({path / '.metadata'} is a pickle and was not read)"
        )
    if (path / "config.json").is_file():
        return (
            f"{path} is a Hugging Face folder, not a checkpoint: `megatron-lightning convert`"
            " makes one of it, and GPTModel.from_hf begins a training from it"
        )
    return f"{path} is not a complete checkpoint: it has no {MANIFEST_FILE}"


def pickle_note(beginning: bytes) -> str:
    """A remark for a message if a file begins like a pickle or an archive of torch.save; else
    empty.
    """
    for signature, kind in _PICKLE_BEGINNINGS.items():
        if beginning.startswith(signature):
            return f" (it looks like {kind}; such files are never loaded, as that can run any code)"
    return ""


def _self_crc32(body: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(body, sort_keys=True, allow_nan=False).encode()):08x}"
