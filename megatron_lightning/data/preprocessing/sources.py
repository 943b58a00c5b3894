"""From what the user names to sources, and from sources to parts of about equal size."""

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from megatron_lightning.data.preprocessing.compressed import (
    is_compressed,
    missing_library,
    zstandard,
)
from megatron_lightning.data.preprocessing.files import (
    CompressedLineFile,
    LineFile,
    Source,
    TextFile,
)
from megatron_lightning.data.preprocessing.parquet_files import ParquetFile
from megatron_lightning.data.preprocessing.records import Complaint, texts_of

Format = Literal["auto", "jsonl", "parquet", "text", "text-lines"]
PART_BYTES = 2 << 30
"""Input of a part when the number of parts is not given."""
_FORMATS: dict[str, Format] = {".parquet": "parquet", ".txt": "text"}


class Stretch(NamedTuple):
    """A stretch of a source, see `Source.blocks`."""

    source: int
    begin: int
    end: int


def find_files(patterns: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Returns the files in the order given; those of a pattern with * ? [ are sorted by name.

    Raises:
        FileNotFoundError: a file is missing, or a pattern matches none; all are named.
    """
    files: list[Path] = []
    missing: list[str] = []
    for entry in patterns:
        pattern = os.fspath(entry)
        found = [pattern] if Path(pattern).is_file() else []
        if not found and glob.has_magic(pattern):
            found = [
                name for name in sorted(glob.glob(pattern, recursive=True)) if os.path.isfile(name)
            ]
        if not found:
            missing.append(pattern)
        files += map(Path, found)
    if missing:
        raise FileNotFoundError(f"no input file {', '.join(missing)}")
    return files


def open_files(
    patterns: Sequence[str | os.PathLike[str]], file_format: Format, fields: Sequence[str]
) -> list[Source]:
    """Opens files as sources.

    Args:
        patterns: files and patterns.
        file_format: "auto" goes by the names: .parquet is a table, .txt is one document, everything
            else is JSON lines; .gz and .zst behind these are unpacked.
        fields: the fields that will be read.

    Raises:
        ValueError: no file, a file that is no Parquet or lacks a column, or fields of plain text.
        FileNotFoundError: a file is missing.
        ImportError: a .zst file and nothing installed that reads it.
    """
    if file_format not in get_args(Format):
        raise ValueError(
            f'file_format="{file_format}" must be one of {", ".join(get_args(Format))}'
        )
    files = find_files(patterns)
    if not files:
        raise ValueError("inputs is empty: name at least one file")
    return [_open(path, file_format, fields) for path in files]


def cut(sources: Sequence[Source], parts: int) -> list[list[Stretch]]:
    """Cuts the sources, laid end to end, into parts of equal length; some may be empty."""
    total = sum(source.size for source in sources)
    bounds = [total * part // parts for part in range(parts + 1)]
    cuts: list[list[Stretch]] = []
    for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
        stretches, at = [], 0
        for number, source in enumerate(sources):
            first, last = max(begin - at, 0), min(end - at, source.size)
            if first < last:
                stretches.append(Stretch(number, first, last))
            at += source.size
        cuts.append(stretches)
    return cuts


def texts(sources: Sequence[Source], fields: Sequence[str]) -> Iterator[str]:
    """Yields all readable texts of all sources, to train a tokenizer on."""
    for source in sources:
        for block in source.blocks(0, source.size):
            for _, record in block.records():
                for field in fields:
                    found = texts_of(record, field)
                    if not isinstance(found, Complaint):
                        yield from found


def _open(path: Path, file_format: Format, fields: Sequence[str]) -> Source:
    packed = is_compressed(path)
    if path.suffix == ".zst" and zstandard() is None:
        raise ImportError(missing_library(path))
    if file_format == "auto":
        suffix = Path(path.stem).suffix if packed else path.suffix
        file_format = _FORMATS.get(suffix, "jsonl")
    if file_format == "parquet":
        return ParquetFile(path, fields)
    if file_format != "jsonl" and len(fields) > 1:
        raise ValueError(f"{path} is plain text and has no fields {', '.join(fields)}")
    if file_format == "text":
        return TextFile(path)
    json = file_format == "jsonl"
    return CompressedLineFile(path, json=json) if packed else LineFile(path, json=json)
