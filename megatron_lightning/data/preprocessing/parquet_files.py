"""Sources that are Parquet tables; `pyarrow`, which comes with `datasets`, is imported when one is
opened.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_lightning.data.preprocessing.files import LocalFile
from megatron_lightning.data.preprocessing.records import Block, TableBlock

_ROWS = 256  # handed to a worker at a time


class ParquetFile(LocalFile):
    """A Parquet table; a row group belongs to the part in which it begins.

    Args:
        path: the file.
        fields: the fields that will be read, see `PreprocessOptions`.

    Raises:
        ValueError: it is no Parquet file, or lacks the column of a field.
    """

    def __init__(self, path: Path, fields: Sequence[str]) -> None:
        super().__init__(path)
        import pyarrow
        from pyarrow import parquet

        self._errors: tuple[type[Exception], ...] = (pyarrow.ArrowException, OSError)
        try:
            with parquet.ParquetFile(path) as table:
                meta, schema = table.metadata, table.schema_arrow
                rows = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
        except self._errors as error:
            raise ValueError(f"{path} is no Parquet file: {error}") from error
        self._columns = columns_of(fields, schema.names, self.name)
        self._first_rows = [sum(rows[:i]) for i in range(len(rows))]
        self._rows = sum(rows)

    def blocks(self, begin: int, end: int) -> Iterator[Block]:
        """Yields the rows of the row groups that begin there."""
        from pyarrow import parquet

        groups = [
            number
            for number, first in enumerate(self._first_rows)
            if begin <= self.size * first // max(self._rows, 1) < end
        ]
        at = self._first_rows[groups[0]] if groups else 0
        try:
            with parquet.ParquetFile(self.path) as table:
                for batch in table.iter_batches(
                    _ROWS, row_groups=groups, columns=self._columns, use_threads=False
                ):
                    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
                    yield TableBlock(
                        columns, batch.num_rows, at, self.size * batch.num_rows // self._rows
                    )
                    at += batch.num_rows
        except self._errors as error:
            raise ValueError(
                f"{self.name}: it cannot be read from row {at} on ({error})"
            ) from error

    def place(self, begin: int, number: int) -> str:
        """Returns file and row, counted from 0."""
        return f"{self.name}, row {number}"


def columns_of(fields: Sequence[str], known: Sequence[str], name: str) -> list[str]:
    """Returns the columns of a table that hold the fields: of the same name, or its first part.

    Raises:
        ValueError: there is no such column.
    """
    columns = [field if field in known else field.split(".")[0] for field in fields]
    if missing := [f for f, column in zip(fields, columns, strict=True) if column not in known]:
        raise ValueError(
            f'{name} has no column for the field "{missing[0]}"; it has {", ".join(known)}'
        )
    return list(dict.fromkeys(columns))
