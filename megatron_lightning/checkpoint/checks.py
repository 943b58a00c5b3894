"""Checking a checkpoint: all files there, of their sizes, unchanged, and no pickle among them."""

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from megatron_lightning.checkpoint.errors import CheckpointError
from megatron_lightning.checkpoint.files import file_crc32
from megatron_lightning.checkpoint.index import METADATA_FILE, index_from_json
from megatron_lightning.checkpoint.manifest import (
    MANIFEST_FILE,
    Manifest,
    local_path,
    pickle_note,
    read_checked,
    read_manifest,
)


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a complete checkpoint of ours: a folder with a readable manifest and all
    files of their sizes.
    """
    try:
        open_checkpoint(path)
    except (CheckpointError, OSError):
        return False
    return True


def open_checkpoint(path: str | os.PathLike[str]) -> Manifest:
    """The manifest, after a check that costs little: every file is there with its size, and no
    pickle lies beside them.

    Raises CheckpointError naming the file.
    """
    folder = local_path(path)
    manifest = read_manifest(folder)
    problems = [*_size_problems(folder, manifest), *_foreign_pickles(folder, manifest)]
    if problems:
        raise CheckpointError(_listing(folder, problems))
    return manifest


def verify(path: str | os.PathLike[str], *, digests: bool = True) -> Manifest:
    """Check a checkpoint and return its manifest.

    With `digests` every byte is read and the damaged files and tensors are named; without, only the
    presence and sizes of files are compared. Raises CheckpointError with all problems found.
    """
    folder = local_path(path)
    manifest = open_checkpoint(folder)
    if digests:
        problems = [
            problem
            for file in manifest.files
            for problem in _digest_problems(folder, manifest, file)
        ]
        if problems:
            raise CheckpointError(_listing(folder, problems))
    return manifest


def _size_problems(folder: Path, manifest: Manifest) -> Iterator[str]:
    for name, entry in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            yield f"{name} is missing"
            continue
        if size != entry.size:
            with open(folder / name, "rb") as file:
                note = pickle_note(file.read(4))
            yield f"{name} has {size} bytes, not {entry.size}{note}"


def _foreign_pickles(folder: Path, manifest: Manifest) -> Iterator[str]:
    for root, _, names in os.walk(folder):
        for name in names:
            file = Path(root, name)
            relative = file.relative_to(folder).as_posix()
            if relative in manifest.files or relative == MANIFEST_FILE or not file.is_file():
                continue
            with open(file, "rb") as opened:
                note = pickle_note(opened.read(4))
            if note:
                yield f"{relative} does not belong here{note}"


def _digest_problems(folder: Path, manifest: Manifest, name: str) -> Iterator[str]:
    if file_crc32(folder / name) == manifest.files[name].crc32:
        return
    tensors = _damaged_tensors(folder, manifest, name)
    where = f" (in tensors {', '.join(tensors)})" if tensors else ""
    yield f"{name} is damaged: its checksum differs from the manifest{where}"


def _damaged_tensors(folder: Path, manifest: Manifest, name: str) -> list[str]:
    if not name.startswith("data/"):
        return []
    index = index_from_json(
        read_checked(folder, manifest, METADATA_FILE), str(folder / METADATA_FILE)
    )
    damaged = []
    with open(folder / name, "rb") as file:
        for tensor_name, tensor in index.items():
            for stored in tensor.boxes:
                if (
                    stored.file == name
                    and _range_crc32(file.fileno(), stored.start, stored.length) != stored.crc32
                ):
                    damaged.append(f"{tensor_name} at {list(stored.box.offsets)}")
    return damaged


def _range_crc32(descriptor: int, start: int, length: int) -> int:
    crc = 0
    while length > 0:
        block = os.pread(descriptor, min(length, 2**24), start)
        if not block:
            break
        crc, start, length = zlib.crc32(block, crc), start + len(block), length - len(block)
    return crc


def _listing(folder: Path, problems: list[str]) -> str:
    shown = "".join(f"\n  {problem}" for problem in problems[:20])
    more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
    return f"{folder} is not usable:{shown}{more}"
