"""Folder of index arrays, keyed by the digest of everything that determines them.

Safe with many ranks and with folders that cannot be written: an entry is built aside and renamed
into place in one step; whoever comes second throws their copy away; without permission the arrays
stay in memory. Arrays are read back as memory maps and never unpickled.
"""

import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

Arrays = dict[str, NDArray]


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

    Raises:
        ValueError: an entry of the cache is damaged; the message names the file.
    """
    if cache_dir is None:
        return build()
    entry = Path(cache_dir) / key_digest(key)[:32]
    if not entry.is_dir():
        arrays = build()
        try:
            _store(entry, key, arrays)
        except OSError as error:
            logger.info("index cache %s cannot be written (%s); kept in memory", cache_dir, error)
            return arrays
    return _load(entry)


def _store(entry: Path, key: Mapping[str, object], arrays: Arrays) -> None:
    aside = entry.with_name(f".{entry.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}")
    aside.mkdir(parents=True)
    try:
        for name, array in arrays.items():
            np.save(aside / f"{name}.npy", array, allow_pickle=False)
        names = sorted(arrays)
        (aside / "key.json").write_text(json.dumps({"key": key, "arrays": names}))
        try:
            aside.rename(entry)
        except OSError:
            if not entry.is_dir():  # else another rank was faster, with the same content
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _load(entry: Path) -> Arrays:
    arrays: Arrays = {}
    path = entry / "key.json"
    try:
        for name in json.loads(path.read_text())["arrays"]:
            path = entry / f"{name}.npy"
            arrays[name] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); delete the folder {entry}") from error
    return arrays
