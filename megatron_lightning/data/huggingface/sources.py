"""Opening a data set of the `datasets` library, and its rows as tokens.

`datasets` is imported when a data set is opened, not before.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_lightning.data.cache import cached_arrays
from megatron_lightning.data.tokenizer import Tokenizer

_ROWS_AT_ONCE = 1024


def open_dataset(source: Any, field: str) -> Any:
    """Returns the data set that `source` means: itself, a folder of `save_to_disk`, or arguments of
    `datasets.load_dataset`.

    Raises:
        ValueError: it is none of these, or more than one split; `field` names it.
    """
    from datasets import Dataset, IterableDataset, load_dataset, load_from_disk

    if isinstance(source, (str, os.PathLike)):
        if not (Path(source) / "state.json").is_file():
            raise ValueError(
                f"{field}={os.fspath(source)!r}: no folder of a saved data set; for files or the "
                f"hub give arguments of datasets.load_dataset, such as {field}={{path: json, "
                "data_files: ..., split: train}"
            )
        source = load_from_disk(os.fspath(source))
    elif isinstance(source, Mapping) and "path" in source:
        if "split" not in source:
            raise ValueError(f"{field}={dict(source)}: name a split, such as split: train")
        source = load_dataset(**source)
    if not isinstance(source, (Dataset, IterableDataset)):
        raise ValueError(
            f"{field}: {type(source).__name__} is no data set; give a datasets.Dataset or "
            "IterableDataset, one split of it, the folder of a saved one, or arguments of "
            "datasets.load_dataset"
        )
    return source


def is_stream(dataset: Any) -> bool:
    """Whether a data set has no length and is read from its beginning on."""
    from datasets import IterableDataset

    return isinstance(dataset, IterableDataset)


class RowTokens:
    """Makes tokens of rows: of their text, or of the tokens that they have already.

    Args:
        columns: columns of the data set; None if it does not tell.
        tokenizer: for text; not needed where there is a column of tokens.
        text_column: column of the text.
        tokens_column: column of token ids; where a data set has it, its text is not looked at.
        append_eod: end each text with the end-of-document token. Rows of tokens are taken as they
            are.

    Raises:
        ValueError: neither column is there, or no tokenizer for text.
    """

    def __init__(
        self,
        columns: Sequence[str] | None,
        tokenizer: Tokenizer | None,
        text_column: str,
        tokens_column: str,
        *,
        append_eod: bool,
    ) -> None:
        self.tokenized = columns is not None and tokens_column in columns
        if columns is None:  # a stream that does not tell
            self.tokenized = tokenizer is None
        self.column = tokens_column if self.tokenized else text_column
        if columns is not None and self.column not in columns:
            raise ValueError(
                f"text_column={text_column!r}, tokens_column={tokens_column!r}: the data set has "
                f"the columns {list(columns)}; name the one with the text, or the one with token "
                "ids"
            )
        if not self.tokenized and tokenizer is None:
            raise ValueError(
                f"tokenizer=None: column {self.column!r} holds text; name a tokenizer, or the "
                "tokens_column of a data set that has been tokenized"
            )
        self._tokenizer = tokenizer
        self._append_eod = append_eod
        self.identity = [
            self.column,
            append_eod,
            None if self.tokenized or tokenizer is None else tokenizer.digest,
        ]
        """What the tokens depend on, apart from the data set."""

    def __call__(self, values: Sequence[Any]) -> list[NDArray[np.int64]]:
        """Returns the tokens of some values of the column; an empty text has none."""
        if self.tokenized:
            return [np.asarray(value, np.int64) for value in values]
        assert self._tokenizer is not None
        found = self._tokenizer.encode_batch([value or "" for value in values])
        end = [self._tokenizer.eod_id] if self._append_eod else []
        return [np.array(ids + end if ids else ids, np.int64) for ids in found]


class DatasetTokens:
    """The rows of a map-style data set as a store of token sequences, for `GPTDataset`.

    Text is tokenized once, and kept in the cache folder; rows of tokens are read where they lie.

    Args:
        dataset: a `datasets.Dataset`.
        rows: makes its tokens.
        cache_dir: folder that keeps the tokens; None keeps them in memory.
    """

    def __init__(
        self, dataset: Any, rows: RowTokens, cache_dir: str | os.PathLike[str] | None
    ) -> None:
        self.prefix = "the data set"
        self._rows = rows
        self._table = dataset.select_columns([rows.column]).with_format("arrow")
        self._tokens: NDArray[np.int32] | None = None
        key = {"what": "rows", "version": 1, "data": fingerprint(dataset), "rows": rows.identity}
        arrays = cached_arrays(cache_dir, key, self._build)
        self.sequence_lengths: NDArray[np.int32] = arrays["lengths"]
        if "tokens" in arrays:
            self._tokens = arrays["tokens"]
            self._starts = np.cumsum(self.sequence_lengths, dtype=np.int64) - self.sequence_lengths

    def _build(self) -> dict[str, NDArray]:
        lengths: list[NDArray] = [np.zeros(0, np.int32)]
        tokens: list[NDArray] = [np.zeros(0, np.int32)]
        for table in self._table.iter(_ROWS_AT_ONCE):
            column = table[self._rows.column]
            if self._rows.tokenized:
                for chunk in column.chunks:
                    lengths.append(np.diff(chunk.offsets.to_numpy()).astype(np.int32))
                continue
            found = self._rows(column.to_pylist())
            lengths.append(np.array([len(ids) for ids in found], np.int32))
            tokens += [ids.astype(np.int32) for ids in found]
        arrays = {"lengths": np.concatenate(lengths)}
        return arrays if self._rows.tokenized else arrays | {"tokens": np.concatenate(tokens)}

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.sequence_lengths)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray[np.integer]:
        """Returns `length` tokens of a row (None: the rest) from `offset` on."""
        if self._tokens is None:
            whole = self._table[index][self._rows.column][0].values.to_numpy(zero_copy_only=False)
        else:
            start = int(self._starts[index])
            whole = self._tokens[start : start + int(self.sequence_lengths[index])]
        return whole[offset : None if length is None else offset + length]


def fingerprint(dataset: Any) -> str:
    """Returns the identity of a map-style data set's content and order."""
    return str(dataset._fingerprint)
