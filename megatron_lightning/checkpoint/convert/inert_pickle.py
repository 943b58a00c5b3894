"""Reading the table of contents of torch's distributed checkpoint, a pickle, without running code.

Every class that such a table names is replaced by an inert record that only keeps what it is given;
a name outside of the list below is refused before anything of it is looked up. So no constructor,
no `__setstate__` and no function of any package is ever called.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, NoReturn

from megatron_lightning.checkpoint.errors import CheckpointError
from megatron_lightning.checkpoint.index import DTYPES


class Record:
    """What a pickle says of one object: arguments it was made with, and its state."""

    kind = ""
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any, **_: Any) -> Record:
        """Keep the arguments; calling `__init__` alone would not, when a pickle leaves it out."""
        made = super().__new__(cls)
        made.arguments = arguments
        made.state = {}
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        """Nothing more."""

    def __setstate__(self, state: Any) -> None:
        """Keep the state; that of classes with slots comes as a pair."""
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = {**(state[0] or {}), **state[1]}
        self.state = state

    def field(self, name: str) -> Any:
        """A named part of the state; CheckpointError if there is none."""
        if not isinstance(self.state, dict) or name not in self.state:
            raise CheckpointError(f"a {self.kind} of the table has no field {name!r}")
        return self.state[name]

    def optional(self, name: str) -> Any:
        """A named part of the state; None if there is none."""
        return self.state.get(name) if isinstance(self.state, dict) else None


_DCP, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_MCORE = "megatron.core.dist_checkpointing.strategies.torch"
_RECORDS = {
    (module, name)
    for module, names in {
        _DCP: (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        ),
        _FILES: ("_StorageInfo", "_StoragePrefix"),
        _MCORE: ("MCoreMetadata", "MCoreSavePlan"),
        "torch.distributed._shard.sharded_tensor.metadata": (
            "TensorProperties",
            "MEM_FORMAT_ENCODING",
        ),
        "torch.distributed.checkpoint.planner": (
            "SavePlan",
            "WriteItem",
            "WriteItemType",
            "TensorWriteData",
            "BytesIOWriteData",
        ),
        "torch.serialization": ("_get_layout",),
        "torch": ("device", "memory_format"),
        "builtins": ("getattr",),  # how enums are written by some versions of Python
        "pathlib": ("PosixPath", "Path", "PurePosixPath"),
        "pathlib._local": ("PosixPath", "Path", "PurePosixPath"),
    }.items()
    for name in names
}


class InertUnpickler(pickle.Unpickler):
    """An unpickler that knows records, sizes and dtypes, and nothing else."""

    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(io.BytesIO(data))
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a class; CheckpointError for any other name."""
        if (module, name) in _RECORDS:
            return type(name, (Record,), {"kind": name})
        if (module, name) in (("torch", "Size"), ("builtins", "tuple")):
            return tuple
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        raise CheckpointError(
            f"{self._where} refers to {module}.{name}, which has no place in a table of tensors; "
            f"nothing was run and nothing is loaded"
        )

    def persistent_load(self, pid: Any) -> NoReturn:
        """Refuse references out of the pickle."""
        raise CheckpointError(f"{self._where} refers to {pid!r} outside of itself")


def read_table(data: bytes, where: str) -> Any:
    """The object of a pickle, built of records. Raises CheckpointError naming `where`."""
    try:
        return InertUnpickler(data, where).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        raise CheckpointError(f"{where} is damaged: {type(error).__name__}: {error}") from error


class _AnyRecords(pickle.Unpickler):
    """An unpickler for which every class and function is a record, and every tensor a placeholder:
    nothing is looked up, so nothing of any package can be run.
    """

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a class or function."""
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        return type(name, (Record,), {"kind": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> Record:
        """A placeholder for a tensor's storage."""
        return Record()


def read_values(path: Path) -> Any:
    """The plain values (numbers, text, dicts, lists) that `torch.save` wrote to a file; all else in
    it is a `Record`. Raises CheckpointError if it is damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            (name,) = [n for n in archive.namelist() if n.split("/")[-1] == "data.pkl"]
            return _AnyRecords(io.BytesIO(archive.read(name))).load()
    except Exception as error:  # a damaged pickle can fail in any way
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
