"""Sources that are data sets of the `datasets` library, from a local folder or the hub.

`datasets` is imported when such a source is opened. A data set that is loaded can be cut into
parts at any row; one that is streamed is read from its beginning to its end.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_lightning.data.card import file_digest
from megatron_lightning.data.preprocessing.parquet_files import columns_of
from megatron_lightning.data.preprocessing.records import Block, TableBlock

_ROWS = 256  # handed to a worker at a time
_SAVED = ("dataset_info.json", "dataset_dict.json", "state.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetName:
    """A data set of the `datasets` library."""

    path: str
    """Folder (of files, or written by `save_to_disk`), or id on the hub."""
    config: str | None = None
    """Name of the configuration, for data sets with several."""
    split: str = "train"
    """Which split; slices such as "train[:1%]" are understood when it is not streamed."""
    revision: str | None = None
    """Commit, tag or branch on the hub."""
    streaming: bool = False
    """Read while downloading, without a copy on the disk."""


class DatasetSource:
    """A data set that is on the disk.

    Args:
        name: which one.
        fields: the fields that will be read.

    Raises:
        ValueError: there is no such data set, split or column.
    """

    def __init__(self, name: DatasetName, fields: Sequence[str]) -> None:
        self._name, self.name = name, f"{name.path} ({name.split})"
        self._data = _load(name)
        columns = columns_of(fields, self._data.column_names, self.name)
        self._data = self._data.select_columns(columns)
        self._rows = len(self._data)
        self.size = max(int(self._data.data.nbytes), self._rows)

    def blocks(self, begin: int, end: int) -> Iterator[Block]:
        """Yields the rows that begin there, taking all rows to be of the same size."""
        rows = range(self._row_at(begin), self._row_at(end))
        yield from _row_blocks(self._data.select(rows), rows.start, self.size, self._rows)

    def _row_at(self, position: int) -> int:
        """Returns the first row that begins at a position or behind it."""
        return -(-position * self._rows // max(self.size, 1))

    def place(self, begin: int, number: int) -> str:
        """Returns data set and row, counted from 0."""
        return f"{self.name}, row {number}"

    def fingerprint(self, begin: int, end: int) -> str:
        """Returns the library's fingerprint of the data set."""
        return str(self._data._fingerprint)

    def describe(self) -> list[dict[str, Any]]:
        """Returns the files of a local folder; else name, rows and fingerprint."""
        folder = Path(self._name.path)
        if folder.is_dir():
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            return [
                {"path": str(path), "bytes": path.stat().st_size, "sha256": file_digest(path)}
                for path in files
            ]
        entry = {"bytes": int(self._data.data.nbytes), "rows": self._rows}
        return [_named(self._name) | entry | {"fingerprint": self.fingerprint(0, self.size)}]


class StreamedSource:
    """A data set that is read while it is downloaded; only a whole one can be processed."""

    size = 1

    def __init__(self, name: DatasetName, fields: Sequence[str]) -> None:
        self._name, self.name = name, f"{name.path} ({name.split})"
        self._data = _load(name)
        known = self._data.column_names
        if known is not None:  # not every stream knows them beforehand
            self._data = self._data.select_columns(columns_of(fields, known, self.name))
        self._rows = 0

    def blocks(self, begin: int, end: int) -> Iterator[Block]:
        """Yields all rows if the beginning is asked for."""
        if begin == 0:
            self._rows = 0
            for block in _row_blocks(self._data, 0, 0, 1):  # its length is not known
                self._rows += block.rows
                yield block

    def place(self, begin: int, number: int) -> str:
        """Returns data set and row, counted from 0."""
        return f"{self.name}, row {number}"

    def fingerprint(self, begin: int, end: int) -> str:
        """Nothing is known of a stream before it was read.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{self.name} is streamed and cannot be processed in parts")

    def describe(self) -> list[dict[str, Any]]:
        """Returns name and number of rows."""
        info = self._data.info
        return [_named(self._name) | {"bytes": info.download_size or 0, "rows": self._rows}]


def open_dataset(name: DatasetName, fields: Sequence[str]) -> DatasetSource | StreamedSource:
    """Opens a data set.

    Raises:
        ValueError: there is no such data set, split or column.
    """
    return (StreamedSource if name.streaming else DatasetSource)(name, fields)


def _load(name: DatasetName) -> Any:
    from datasets import DatasetDict, IterableDatasetDict, load_dataset, load_from_disk
    from datasets.exceptions import DatasetsError

    folder = Path(name.path)
    try:
        if any((folder / file).is_file() for file in _SAVED):
            data = load_from_disk(name.path)
            if isinstance(data, DatasetDict):
                if name.split not in data:
                    raise ValueError(f"it has the splits {', '.join(map(str, data))}")
                data = data[name.split]
            if name.streaming:
                data = data.to_iterable_dataset()
        else:
            data = load_dataset(
                name.path,
                name.config,
                split=name.split,
                revision=name.revision,
                streaming=name.streaming,
            )
    except (DatasetsError, OSError, ValueError) as error:
        raise ValueError(f"data set {name.path}, split {name.split}: {error}") from error
    assert not isinstance(data, DatasetDict | IterableDatasetDict)  # a split was chosen
    return data.with_format(None)  # plain Python values, whatever it was saved with


def _row_blocks(data: Any, first: int, size: int, total: int) -> Iterator[TableBlock]:
    """Yields rows; each has `size / total` of the length of the source."""
    for batch in data.iter(_ROWS):
        columns = {key: list(values) for key, values in batch.items()}
        rows = len(next(iter(columns.values())))
        yield TableBlock(columns, rows, first, size * rows // total)
        first += rows


def _named(name: DatasetName) -> dict[str, Any]:
    entries = {key: value for key, value in dataclasses.asdict(name).items() if key != "streaming"}
    return {key: value for key, value in entries.items() if value is not None}
