"""One export between its beginning and its end: a folder beside its place in which all tensors have
their places; every rank writes (and reads back) the bytes of its own boxes, then the folder gets
its name.
"""

from __future__ import annotations

import functools
import os
import secrets
import shutil
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_lightning.bridge.card import CARD
from megatron_lightning.bridge.folder import CONFIG
from megatron_lightning.bridge.mapping import Entry, Piece, TensorMap
from megatron_lightning.bridge.placing import FileSet, write_json
from megatron_lightning.bridge.progress import Bar
from megatron_lightning.bridge.safetensors_files import write_box
from megatron_lightning.bridge.tokenizer_files import Companions
from megatron_lightning.checkpoint import Box
from megatron_lightning.checkpoint.files import sync_folder, write_file
from megatron_lightning.checkpoint.ranks import RankGroup

Shares = Mapping[str, list[Box]]
"""The boxes that a rank writes, by the parameter's name relative to the network."""


class Held(Protocol):
    """Values of a network's parameters, by their names relative to it."""

    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Dtypes of those that are here."""
        ...

    def share(self, ranks: RankGroup) -> Shares:
        """The boxes that this rank writes; over all ranks each element once."""
        ...

    def values(self, name: str, box: Box) -> Tensor:
        """Values of one of these boxes."""
        ...


class Abandoned(Exception):  # noqa: N818 - no error: it was asked for
    """Raised out of `Export.write` when the export was given up meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """The same on every rank but for `mine`."""

    path: Path
    """Where the folder will be."""
    files: FileSet
    """Where it is now, and where its tensors lie."""
    table: TensorMap
    names: Mapping[str, str]
    """Names in the files of the table's tensors there."""
    mine: Shares
    """What this rank writes."""
    given_up: threading.Event = field(default_factory=threading.Event)

    @property
    def num_bytes(self) -> int:
        """Of this rank's share in the files."""
        return sum(
            self.files.tensors[self.names[entry.names[piece.source]]].dtype.itemsize
            * piece.ours.numel
            for _, _, entry, piece in self.parts()
        )

    def dtype_of(self, ours: str) -> torch.dtype:
        """In which values of a parameter lose nothing that the files keep."""
        sources = self.table.entries[ours].names
        dtypes = [self.files.tensors[self.names[source]].dtype for source in sources]
        return functools.reduce(torch.promote_types, dtypes)

    def parts(self) -> Iterator[tuple[str, Box, Entry, Piece]]:
        """(parameter, box of this rank, its entry, a piece of the box)."""
        for ours, share in self.mine.items():
            entry = self.table.entries[ours]
            for box in share:
                for piece in (part for p in entry.pieces if (part := p.cut(box)) is not None):
                    yield ours, box, entry, piece

    def write(self, held: Held, bar: Bar | None = None) -> None:
        """Write this rank's share. Takes part in no collective."""
        last: tuple[str, Box] | None = None
        values = torch.empty(0)
        with self.files.opened() as descriptor_of:
            for ours, box, entry, piece in self.parts():
                if self.given_up.is_set():
                    raise Abandoned(f"{self.path} was given up")
                if (ours, box) != last:
                    values, last = held.values(ours, box), (ours, box)
                stored = self.files.tensors[self.names[entry.names[piece.source]]]
                inside = values[piece.ours.shift(box.offsets, sign=-1).slices()]
                descriptor = descriptor_of(stored.file)
                seen = stored.seen_as(piece.view)
                write_box(descriptor, seen, piece.theirs, piece.to_theirs(inside))
                if bar is not None:
                    bar.update(piece.ours.numel * stored.dtype.itemsize)

    def describe(self, fields: Mapping[str, Any], companions: Companions, card: str) -> None:
        """Write what is small: index, config.json, files of the tokenizer, model card."""
        folder = self.files.folder
        self.files.write_index()
        write_json(folder / CONFIG, fields)
        write_file(folder / CARD, card.encode())
        companions.write(folder)

    def put_in_place(self, *, replace: bool = False) -> None:
        """Give the folder its name; with `replace`, in place of one that has it."""
        folder, path = self.files.folder, self.path
        sync_folder(folder)
        old = path.with_name(f"{folder.name}.old")
        if replace and path.is_dir():
            os.replace(path, old)
        elif path.is_dir():
            path.rmdir()  # it is empty
        os.replace(folder, path)
        sync_folder(path.absolute().parent)
        shutil.rmtree(old, ignore_errors=True)

    def abandon(self) -> None:
        """Remove what was written; on the first rank alone."""
        self.given_up.set()
        shutil.rmtree(self.files.folder, ignore_errors=True)


def begin_folder(path: Path, *, replace: bool = False) -> Path:
    """Make the folder beside `path` in which an export is written. ValueError where something is
    at `path`.
    """
    if not replace and path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} exists already; give a new folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    partial.mkdir()
    return partial
