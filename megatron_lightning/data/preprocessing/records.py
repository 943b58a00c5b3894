"""From a piece of input to records, and from a record to its texts. This runs in the workers.

A record that cannot be used is a `Complaint`: it says what is wrong, and the caller knows where.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

_BOM = "\ufeff"


class Complaint(NamedTuple):
    """Why a record has no readable text."""

    reason: str


class PlainText(NamedTuple):
    """A record without fields."""

    text: str


class Block(Protocol):
    """A run of records as it was read, small enough to be sent to a worker."""

    @property
    def length(self) -> int:
        """How much of its source it is, see `Source.size`."""
        ...

    def records(self) -> Iterator[tuple[int, Any]]:
        """Yields number and value of each record: what a line of JSON or a row of a table holds, a
        `PlainText`, or a `Complaint`.
        """
        ...


class LineBlock(NamedTuple):
    """Whole lines of a file."""

    content: bytes
    first: int
    """Number of the first line."""
    json: bool
    """Whether a line is a JSON object, or else a text."""
    length: int

    def records(self) -> Iterator[tuple[int, Any]]:
        """Yields the lines that are not blank."""
        for number, line in enumerate(self.content.split(b"\n"), start=self.first):
            if line and not line.isspace():
                yield number, parse_json(line) if self.json else plain_text(line.rstrip(b"\r"))


class TextBlock(NamedTuple):
    """A file that is one text."""

    content: bytes
    length: int

    def records(self) -> Iterator[tuple[int, Any]]:
        """Yields the text, numbered as line 1."""
        yield 1, plain_text(self.content)


class TableBlock(NamedTuple):
    """Rows of a table, column by column."""

    columns: Mapping[str, Any]
    """Values of each column: a list, or an Arrow array."""
    rows: int
    first: int
    """Number of the first row."""
    length: int

    def records(self) -> Iterator[tuple[int, Any]]:
        """Yields the rows as objects."""
        columns = {name: _values(column) for name, column in self.columns.items()}
        for at in range(self.rows):
            row = {name: values[at] for name, values in columns.items()}
            bad = next((value for value in row.values() if isinstance(value, Complaint)), None)
            yield self.first + at, bad or row


def parse_json(line: bytes) -> Any:
    """Returns the value of a JSON text, or a `Complaint`."""
    text = _decode(line)
    if isinstance(text, Complaint):
        return text
    try:
        return json.loads(text)
    except RecursionError:
        return Complaint("no JSON (nested too deeply)")
    except ValueError as error:
        return Complaint(f"no JSON ({error})")


def plain_text(content: bytes) -> PlainText | Complaint:
    """Returns the record of a text in UTF-8."""
    text = _decode(content)
    return text if isinstance(text, Complaint) else PlainText(text)


def _decode(content: bytes) -> str | Complaint:
    """Returns the text of UTF-8 bytes without a byte order mark, or a `Complaint`."""
    try:
        return content.decode("utf-8").removeprefix(_BOM)
    except UnicodeDecodeError as error:
        return Complaint(f"no text in UTF-8 ({error.reason} at byte {error.start})")


def texts_of(record: Any, field: str) -> list[str] | Complaint:
    """Returns the texts of a field, one a sequence, or what is wrong with the record.

    A plain text has this text for any field.
    """
    if isinstance(record, PlainText):
        return [record.text]
    value = record if isinstance(record, Complaint) else _find(record, field)
    if isinstance(value, Complaint):
        return value
    texts = value if isinstance(value, list) else [value]
    for text in texts:
        if not isinstance(text, str):
            kind = "null" if text is None else f"a {type(text).__name__}"
            return Complaint(f'"{field}" is neither a string nor a list of strings but has {kind}')
        if not text.isascii() and not _encodable(text):
            return Complaint(f'"{field}" has half of a surrogate pair, which is no character')
    return texts


def _find(record: Any, field: str) -> Any:
    if isinstance(record, Mapping):
        if field in record:
            return record[field]
        value: Any = record
        for name in field.split("."):
            if not isinstance(value, Mapping) or name not in value:
                break
            value = value[name]
        else:
            return value
    return Complaint(f'no JSON object with the key "{field}"')


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _values(column: Any) -> Sequence[Any]:
    """Returns a column as Python values; bytes that are no text become a `Complaint`."""
    if isinstance(column, list):
        return column
    try:
        return column.to_pylist()
    except UnicodeDecodeError:  # Parquet files may hold anything where a string should be
        return [_value(entry) for entry in column]


def _value(entry: Any) -> Any:
    try:
        return entry.as_py()
    except UnicodeDecodeError as error:
        return Complaint(f"no text in UTF-8 ({error.reason} at byte {error.start})")
