"""Putting a checkpoint in place so that a crash at any instant leaves a valid one.

A checkpoint `NAME` is written into the hidden folder `.staging-NAME-<token>` beside it, which no
pattern for checkpoints matches. When all is on disk and the manifest is written, the staged folder
is renamed to `NAME`; an older `NAME` changes places with it, is renamed to `.replaced-NAME-<token>`
and deleted. Renames within a folder are atomic. `recover` finishes or undoes whatever was
interrupted: a staged folder with a complete manifest is finished, any other is deleted.
"""

import contextlib
import ctypes
import logging
import os
import re
import secrets
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_lightning.checkpoint.checks import is_checkpoint
from megatron_lightning.checkpoint.errors import CheckpointError
from megatron_lightning.checkpoint.files import sync_folder, write_file
from megatron_lightning.checkpoint.manifest import (
    MANIFEST_FILE,
    Manifest,
    local_path,
    read_manifest,
)

_Role = Literal["staging", "replaced", "removing"]
_log = logging.getLogger(__name__)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_HIDDEN = re.compile(r"\.(staging|replaced|removing)-(.+)-([0-9a-f]{8})")


def begin(path: str | os.PathLike[str]) -> Path:
    """Make an empty staging folder for a checkpoint that will be called `path`.

    Raises ValueError if `path` is something that a checkpoint must not replace.
    """
    target = local_path(path).absolute()
    _check_replaceable(target)
    _make_folder(target.parent)
    staging = _beside(target, "staging", secrets.token_hex(4))
    staging.mkdir()
    return staging


def publish(
    staging: Path,
    path: str | os.PathLike[str],
    manifest: Manifest,
    delete: Callable[[Path], None] | None = None,
) -> None:
    """Write the manifest into the staged folder and put it in place as `path`.

    All files of the manifest must be on disk already. When this returns, the checkpoint survives a
    power cut. `delete` is given an older one, hidden by then, in place of deleting it here.
    """
    for name, entry in manifest.files.items():
        file = staging / name
        if not file.is_file() or file.stat().st_size != entry.size:
            raise CheckpointError(
                f"{file} is not there with {entry.size} bytes although a rank wrote it;"
                " all ranks must see the same file system"
            )
    for folder in sorted({(staging / name).parent for name in manifest.files}):
        sync_folder(folder)
    partial = staging / f"{MANIFEST_FILE}.partial"
    write_file(partial, manifest.to_json())
    os.rename(partial, staging / MANIFEST_FILE)
    sync_folder(staging)
    _swap(staging, local_path(path).absolute(), delete or delete_folder)


def discard(staging: Path) -> None:
    """Delete a staged folder that will not be published."""
    shutil.rmtree(staging, ignore_errors=True)


def remove(path: str | os.PathLike[str], delete: Callable[[Path], None] | None = None) -> None:
    """Delete a checkpoint; it is hidden by a rename first, so that none is seen half deleted.
    `delete` is given the hidden folder in place of deleting it here.
    """
    target = local_path(path)
    hidden = _beside(target, "removing", secrets.token_hex(4))
    os.rename(target, hidden)
    sync_folder(target.parent)
    (delete or delete_folder)(hidden)


def is_interrupted(folder: str | os.PathLike[str], beginning: str = "") -> bool:
    """Whether `recover` has something to do in `folder`."""
    parent = local_path(folder)
    return parent.is_dir() and any(_hidden_folders(parent, beginning).values())


def recover(folder: str | os.PathLike[str], beginning: str = "") -> list[str]:
    """Finish or undo what was interrupted among the checkpoints in `folder` whose names begin so;
    returns what was done, a sentence each.

    One process must call it, before any other saves there: staged folders of a save in progress
    would be deleted.
    """
    parent = local_path(folder)
    if not parent.is_dir():
        return []
    done: list[str] = []
    hidden = _hidden_folders(parent, beginning)
    for item in hidden["removing"]:
        delete_folder(item.path)
        done.append(f"finished the removal of {item.target}")
    staged = [
        (read_manifest(item.path).created_unix_ns, item)
        for item in hidden["staging"]
        if is_checkpoint(item.path)
    ]
    complete = {item.path for _, item in staged}
    for item in (item for item in hidden["staging"] if item.path not in complete):
        delete_folder(item.path)
        done.append(f"deleted an unfinished save of {item.target}")
    for created, item in sorted(staged, key=lambda pair: pair[0]):
        done.append(_finish(created, item))
    for item in hidden["replaced"]:
        if not _exists(item.target) and is_checkpoint(item.path):
            os.rename(item.path, item.target)
            done.append(f"put back {item.target}")
        else:
            delete_folder(item.path)
            done.append(f"finished the replacement of {item.target}")
    if done:
        sync_folder(parent)
    return done


@dataclass(frozen=True, slots=True)
class _Hidden:
    path: Path
    target: Path


def _hidden_folders(parent: Path, beginning: str) -> dict[str, list[_Hidden]]:
    found: dict[str, list[_Hidden]] = defaultdict(list)
    for path in sorted(parent.iterdir()):
        match = _HIDDEN.fullmatch(path.name)
        if match and match[2].startswith(beginning):
            found[match[1]].append(_Hidden(path, parent / match[2]))
    return found


def _finish(created: int, item: _Hidden) -> str:
    with contextlib.suppress(CheckpointError):
        if read_manifest(item.target).created_unix_ns >= created:
            delete_folder(item.path)
            return f"deleted a save of {item.target} older than the one in place"
    _swap(item.path, item.target, delete_folder)
    return f"finished the save of {item.target}"


def _swap(staging: Path, target: Path, delete: Callable[[Path], None]) -> None:
    _check_replaceable(target)
    match = _HIDDEN.fullmatch(staging.name)
    assert match is not None
    older = _beside(target, "replaced", match[3])
    replaces = _exists(target)
    exchanged = replaces and _exchange(staging, target)
    if not exchanged:
        _replace(staging, target, older if replaces else None)
    sync_folder(target.parent)
    if replaces:
        try:
            if exchanged:
                os.rename(staging, older)
            delete(older)
        except OSError as error:  # the new checkpoint is in place; `recover` deletes the rest
            _log.warning("could not delete %s, which a newer checkpoint replaced: %s", older, error)


def _replace(staging: Path, target: Path, older: Path | None) -> None:
    """Two renames, between which `target` is not there for an instant."""
    if older is not None:
        os.rename(target, older)
        sync_folder(target.parent)
    try:
        os.rename(staging, target)
    except OSError:
        if older is not None:
            os.rename(older, target)
        raise


def _exchange(one: Path, other: Path) -> bool:
    """Let two paths change places at once; False where system or file system can't."""
    if sys.platform != "linux":
        return False
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # an old C library
        return False
    result = rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    return result == 0


def _check_replaceable(target: Path) -> None:
    if not target.name or _HIDDEN.fullmatch(target.name):
        raise ValueError(
            f"path={str(target)!r} cannot name a checkpoint; give a name such as 'step=10.ckpt'"
        )
    if target.is_symlink() or not target.exists():
        return  # a link is replaced itself, never what it points to
    if not target.is_dir():
        raise ValueError(
            f"path={str(target)!r} is a file; remove it or choose another name for the checkpoint"
        )
    if not (target / MANIFEST_FILE).is_file() and any(target.iterdir()):
        raise ValueError(
            f"path={str(target)!r} is a folder with other contents than a checkpoint of ours; it is"
            " not deleted: remove it or choose another name for the checkpoint"
        )


def _beside(target: Path, role: _Role, token: str) -> Path:
    return target.with_name(f".{role}-{target.name}-{token}")


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def _exists(path: Path) -> bool:
    return os.path.lexists(path)


def delete_folder(path: Path) -> None:
    """Delete a hidden folder, or the link in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
