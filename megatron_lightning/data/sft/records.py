"""Reading examples: JSON lines (plain, .gz, .zst), Parquet files, or a `datasets` data set.

Each record comes with its place (file and line, or number) for messages. A source also tells the
digest of its content, by which what is made of it is cached.
"""

import glob
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_lightning.data.card import file_digest

Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Mapping[str, Any]
"""Paths or patterns of files, the folder of a saved data set, arguments of
`datasets.load_dataset`; or (not from a config file) a data set object.
"""

_LINES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst")
_SUFFIXES = (*_LINES, ".parquet")
_ROWS_AT_ONCE = 1024


class Entry(NamedTuple):
    """A record, or what is wrong with its line."""

    place: str
    record: Mapping[str, Any]
    error: str | None = None


class RecordSource:
    """Records of a `Source`, read from its beginning as often as they are asked for.

    Args:
        source: see `Source`.
        name: the option that it came from, for messages.

    Raises:
        ValueError: a file of unknown kind, or a pattern without a file; the message names it.
        FileNotFoundError: no such file.
    """

    def __init__(self, source: Any, name: str = "train") -> None:
        self._dataset: Any = None
        self._files: list[Path] = []
        if isinstance(source, (str, os.PathLike)):
            source = [source]
        if isinstance(source, Mapping):
            self._dataset = _load(source, name)
        elif isinstance(source, Sequence) and all(
            isinstance(entry, (str, os.PathLike)) for entry in source
        ):
            if len(source) == 1 and (Path(source[0]) / "state.json").is_file():
                from datasets import load_from_disk

                self._dataset = load_from_disk(os.fspath(source[0]))
            else:
                self._files = _matching_files([os.fspath(entry) for entry in source], name)
        elif isinstance(source, Iterable):
            once = iter(source) is source  # a generator, say
            self._dataset = list(source) if once else source
        else:
            raise ValueError(f"{name}={source!r}: give files, or a data set of `datasets`")

    @property
    def digest(self) -> str:
        """Identity of the content."""
        if self._dataset is None:
            parts = [file_digest(path) for path in self._files]
            return hashlib.sha256("\n".join(parts).encode()).hexdigest()
        known = self._dataset._fingerprint if hasattr(self._dataset, "_fingerprint") else None
        if known is not None:
            return f"datasets:{known}"
        digest = hashlib.sha256()
        for record in self._dataset:
            digest.update(json.dumps(record, sort_keys=True, default=repr).encode() + b"\n")
        return digest.hexdigest()

    def __iter__(self) -> Iterator[Entry]:
        """Yields the records in order."""
        if self._dataset is not None:
            for number, record in enumerate(self._dataset):
                yield Entry(f"example {number}", record)
        for path in self._files:
            yield from _rows(path) if path.suffix == ".parquet" else _lines(path)


def _load(arguments: Mapping[str, Any], name: str) -> Any:
    from datasets import load_dataset

    if "path" not in arguments or "split" not in arguments:
        raise ValueError(
            f"{name}={dict(arguments)}: the arguments of datasets.load_dataset need a path and a"
            " split, such as {path: owner/name, split: train}"
        )
    return load_dataset(**arguments)


def _matching_files(patterns: Sequence[str], name: str) -> list[Path]:
    if not patterns:
        raise ValueError(f"{name} names no file")
    files = []
    for pattern in patterns:
        exists = Path(pattern).exists() or not glob.has_magic(pattern)
        found = [pattern] if exists else sorted(glob.glob(pattern, recursive=True))
        if not found:
            raise ValueError(f"{name}: no file matches {pattern}")
        files += [Path(path) for path in found]
    for path in files:
        if not path.name.endswith(_SUFFIXES):
            raise ValueError(
                f"{name}: {path} is none of the kinds that can be read ({', '.join(_SUFFIXES)}, the"
                " folder of a saved data set, or arguments of datasets.load_dataset)"
            )
        if not path.is_file():
            raise FileNotFoundError(f"{name}: no file {path}")
    return files


def _lines(path: Path) -> Iterator[Entry]:
    import pyarrow as pa

    compression = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix)
    try:
        with pa.input_stream(os.fspath(path), compression=compression) as raw:
            for number, line in enumerate(_split_lines(raw), start=1):
                if line.isspace() or not line:
                    continue
                yield _parse(f"{path}:{number}", line)
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error}") from error


def _split_lines(raw: Any) -> Iterator[bytes]:
    rest = b""
    while block := raw.read(1 << 20):
        *whole, rest = (rest + block).split(b"\n")
        yield from whole
    if rest:
        yield rest


def _parse(place: str, line: bytes) -> Entry:
    try:
        record = json.loads(line)
    except ValueError as error:  # also bytes that are not UTF-8
        return Entry(place, {}, f"no JSON ({error})")
    if not isinstance(record, dict):
        return Entry(place, {}, "no JSON object")
    return Entry(place, record)


def _rows(path: Path) -> Iterator[Entry]:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    try:
        number = 0
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(_ROWS_AT_ONCE):
                for record in batch.to_pylist():
                    yield Entry(f"{path}:row {number}", record)
                    number += 1
    except pa.ArrowException as error:
        raise ValueError(f"{path} can't be read: {error}") from error
