"""Folder of index arrays, keyed by the digest of everything that determines them.

Safe with many ranks, whoever they are, on local and shared disks, and with folders that cannot be
written: an entry is built aside, flushed, and renamed into place in one step; ranks that want the
same entry at the same time wait for the one that builds it where the file system has locks, and
build it as well where not; whoever comes second throws their copy away; without permission or room
the arrays stay in memory. An entry that is damaged is built again. Arrays are read back as memory
maps and never unpickled.
"""

import hashlib
import json
import logging
import os
import shutil
import uuid
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_lightning.data.locks import folder_lock

logger = logging.getLogger(__name__)

Arrays = dict[str, NDArray]

_WAIT_SECONDS = 900.0  # for another rank's build; an index of 10^12 tokens takes minutes
_BLOCK_BYTES, _MOST_BLOCKS = 1 << 20, 64  # of a file that are read to tell whether it is damaged


def array_digest(array: NDArray) -> str:
    """Returns the sha256 of an array's type, shape and content."""
    digest = hashlib.sha256(f"{array.dtype.str}{array.shape}".encode())
    digest.update(np.ascontiguousarray(array).data if array.size else b"")
    return digest.hexdigest()


def key_digest(key: object) -> str:
    """Returns the sha256 of a JSON-able value."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


def cached_arrays(
    cache_dir: str | os.PathLike[str] | None, key: Mapping[str, object], build: Callable[[], Arrays]
) -> Arrays:
    """Returns the arrays of `key` from the cache folder, building (and keeping) them when they are
    not there.

    Args:
        cache_dir: folder of the cache; None builds in memory.
        key: JSON-able fields that determine the arrays completely.
        build: makes the arrays, by name.
    """
    if cache_dir is None:
        return build()
    entry = Path(cache_dir) / key_digest(key)[:32]
    if (found := _load(entry)) is not None:
        return found
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return _in_memory(entry.parent, error, build())
    with folder_lock(entry.with_name(f".{entry.name}.lock"), _WAIT_SECONDS):
        if (found := _load(entry)) is not None:  # another rank has built it meanwhile
            return found
        arrays = build()
        try:
            _store(entry, key, arrays)
        except OSError as error:
            return _in_memory(entry.parent, error, arrays)
    return _load(entry) or arrays


def _in_memory(folder: Path, error: OSError, arrays: Arrays) -> Arrays:
    logger.info("index cache %s cannot be written (%s); kept in memory", folder, error)
    return arrays


def _store(entry: Path, key: Mapping[str, object], arrays: Arrays) -> None:
    aside = entry.with_name(f".{entry.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}")
    aside.mkdir()
    try:
        for name, array in arrays.items():
            with (aside / f"{name}.npy").open("wb") as file:
                np.save(file, array, allow_pickle=False)
                _flush(file.fileno(), file.flush)
        described = {name: _checksum(aside / f"{name}.npy") for name in sorted(arrays)}
        with (aside / "key.json").open("w", encoding="utf-8") as out:
            json.dump({"key": key, "arrays": described}, out)
            _flush(out.fileno(), out.flush)
        _replace(aside, entry)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _replace(aside: Path, entry: Path) -> None:
    """Renames a finished entry into place. A good one of another rank stays, a damaged one goes."""
    for _ in range(3):
        try:
            aside.rename(entry)
            return
        except OSError:
            if not entry.is_dir():  # not because there is one: read-only, or no room
                raise
        if _load(entry) is not None:
            return
        damaged = entry.with_name(f".{entry.name}.damaged-{uuid.uuid4().hex[:8]}")
        with suppress(FileNotFoundError):  # another rank has moved it away
            entry.rename(damaged)
        shutil.rmtree(damaged, ignore_errors=True)


def _load(entry: Path) -> Arrays | None:
    """Returns the arrays of an entry; None when there is none, or a damaged one."""
    path = entry / "key.json"
    if not path.is_file():
        return None
    arrays: Arrays = {}
    try:
        for name, checksum in json.loads(path.read_text(encoding="utf-8"))["arrays"].items():
            path = entry / f"{name}.npy"
            if _checksum(path) != checksum:
                raise ValueError("its content has changed")
            arrays[name] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError) as error:
        logger.warning("index cache: %s is damaged (%s); it is built again", path, error)
        return None
    return arrays


def _checksum(path: Path) -> list[int]:
    """Returns size and CRC of a file: of all of it up to 64 MiB, of 64 blocks spread evenly over a
    larger one, so that opening stays cheap.
    """
    size = path.stat().st_size
    blocks = -(-size // _BLOCK_BYTES)
    chosen = range(blocks) if blocks <= _MOST_BLOCKS else _spread(blocks)
    crc = 0
    with path.open("rb") as file:
        for number in chosen:
            file.seek(number * _BLOCK_BYTES)
            crc = zlib.crc32(file.read(_BLOCK_BYTES), crc)
    return [size, crc]


def _spread(blocks: int) -> list[int]:
    return [number * (blocks - 1) // (_MOST_BLOCKS - 1) for number in range(_MOST_BLOCKS)]


def _flush(descriptor: int, flush: Callable[[], None]) -> None:
    flush()
    os.fsync(descriptor)
