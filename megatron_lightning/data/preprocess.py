"""From JSON lines to an indexed corpus: one document a line, tokenized in order.

The pair and its data card appear complete or not at all, and do not depend on the number of
workers. A text may be a string (one sequence) or a list of strings (a sequence each, for
sentence-wise corpora). What yields no token gives no sequence; the boundary of an empty document is
kept, without an end-of-document token.
"""

import json
import multiprocessing
import os
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_lightning import __version__
from megatron_lightning.data.card import DataCard, card_path, file_digest, write_card
from megatron_lightning.data.indexed import (
    IndexedDatasetWriter,
    best_dtype,
    bin_path,
    idx_path,
)
from megatron_lightning.data.tokenizer import Tokenizer, load_tokenizer

_CHUNK_BYTES = 1 << 20  # text handed to a worker at a time
_CHUNKS_AHEAD = 4  # chunks a worker may be ahead of the writer, which bounds memory


class Line(NamedTuple):
    """A line of an input file."""

    place: str
    """File and line number, for errors."""
    content: bytes


class Document(NamedTuple):
    """A tokenized line, or what is wrong with it."""

    tokens: NDArray[np.int32]
    lengths: list[int]
    error: str | None = None


def preprocess_jsonl(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    output_prefix: str | os.PathLike[str],
    tokenizer: Tokenizer | str | os.PathLike[str],
    *,
    json_key: str = "text",
    append_eod: bool = True,
    workers: int = 1,
    on_bad_line: Literal["fail", "skip"] = "fail",
) -> DataCard:
    """Writes `output_prefix.bin`, `.idx` and `.card.json` from files of JSON lines.

    Args:
        inputs: the files, read in order.
        output_prefix: path of the corpus without suffix; an existing one is replaced.
        tokenizer: the tokenizer, or what `load_tokenizer` takes.
        json_key: key of the text in each line's object.
        append_eod: end each document that is not empty with the end-of-document token.
        workers: processes that tokenize.
        on_bad_line: "fail" stops at a line without readable text, "skip" leaves it out and counts
            it. Blank lines are passed over.

    Returns:
        The data card, which holds all counts.

    Raises:
        ValueError: a bad line (named with file and number), a bad argument, or no document at all.
        FileNotFoundError: an input file is missing.
    """
    paths = [Path(inputs)] if isinstance(inputs, (str, os.PathLike)) else [Path(p) for p in inputs]
    _check_arguments(paths, workers, on_bad_line)
    vocabulary = (
        load_tokenizer(tokenizer) if isinstance(tokenizer, (str, os.PathLike)) else tokenizer
    )
    dtype = best_dtype(vocabulary.vocab_size)
    encode = partial(_encode_lines, vocabulary, json_key, append_eod)
    documents = empty = skipped = tokens = sequences = 0
    with IndexedDatasetWriter(output_prefix, dtype) as writer:
        for document in _encode_all(encode, _chunks(paths), workers):
            if document.error is not None:
                if on_bad_line == "fail":
                    raise ValueError(f'{document.error}; on_bad_line="skip" leaves such lines out')
                skipped += 1
                continue
            writer.add_document(document.tokens, document.lengths)
            documents += 1
            empty += not document.lengths
            sequences += len(document.lengths)
            tokens += len(document.tokens)
        if documents == 0:
            raise ValueError(
                f"no document in {', '.join(map(str, paths))} ({skipped} lines skipped)"
            )
        card_path(output_prefix).unlink(missing_ok=True)  # it describes the pair that is replaced
    card = DataCard(
        sources=[
            {"path": str(path), "bytes": path.stat().st_size, "sha256": file_digest(path)}
            for path in paths
        ],
        tokenizer=vocabulary.name,
        tokenizer_digest=vocabulary.digest,
        vocab_size=vocabulary.vocab_size,
        eod_id=vocabulary.eod_id,
        arguments={"json_key": json_key, "append_eod": append_eod, "on_bad_line": on_bad_line},
        documents=documents,
        sequences=sequences,
        tokens=tokens,
        empty_documents=empty,
        skipped_lines=skipped,
        dtype=dtype.name,
        bin_bytes=bin_path(output_prefix).stat().st_size,
        bin_sha256=file_digest(bin_path(output_prefix)),
        idx_sha256=file_digest(idx_path(output_prefix)),
        package_version=__version__,
    )
    write_card(output_prefix, card)
    return card


def _check_arguments(paths: list[Path], workers: int, on_bad_line: str) -> None:
    if not paths:
        raise ValueError("inputs is empty: name at least one file of JSON lines")
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise FileNotFoundError(f"no input file {', '.join(missing)}")
    if workers < 1:
        raise ValueError(f"workers={workers} must be at least 1")
    if on_bad_line not in ("fail", "skip"):
        raise ValueError(f'on_bad_line="{on_bad_line}" must be "fail" or "skip"')


def _chunks(paths: list[Path]) -> Iterator[list[Line]]:
    """Yields the lines of all files in order, about `_CHUNK_BYTES` at a time, without the blank
    ones.
    """
    chunk: list[Line] = []
    size = 0
    for path in paths:
        with path.open("rb") as file:
            for number, content in enumerate(file, start=1):
                if content.isspace():
                    continue
                chunk.append(Line(f"{path}:{number}", content))
                size += len(content)
                if size >= _CHUNK_BYTES:
                    yield chunk
                    chunk, size = [], 0
    if chunk:
        yield chunk


def _encode_all(
    encode: "partial[list[Document]]", chunks: Iterator[list[Line]], workers: int
) -> Iterator[Document]:
    """Yields the documents in order, tokenized here or by worker processes."""
    if workers == 1:
        for chunk in chunks:
            yield from encode(chunk)
        return
    # A forked worker needs no import of its own; tokenizers has no threads running at this point.
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    with multiprocessing.get_context(method).Pool(workers) as pool:
        pending: deque = deque()
        for chunk in chunks:
            pending.append(pool.apply_async(encode, (chunk,)))
            if len(pending) >= workers * _CHUNKS_AHEAD:
                yield from pending.popleft().get()
        while pending:
            yield from pending.popleft().get()


def _encode_lines(
    tokenizer: Tokenizer, json_key: str, append_eod: bool, lines: list[Line]
) -> list[Document]:
    """Tokenizes the lines of a chunk in one call of the tokenizer."""
    parsed = [_texts(line, json_key) for line in lines]
    flat = [text for texts in parsed if isinstance(texts, list) for text in texts]
    encoded = iter(tokenizer.encode_batch(flat))
    documents = []
    for texts in parsed:
        if isinstance(texts, str):
            documents.append(Document(np.empty(0, np.int32), [], texts))
            continue
        sequences = [ids for ids in (next(encoded) for _ in texts) if ids]
        if sequences and append_eod:
            sequences[-1] = [*sequences[-1], tokenizer.eod_id]
        tokens = np.array([i for ids in sequences for i in ids], np.int32)
        documents.append(Document(tokens, [len(ids) for ids in sequences]))
    return documents


def _texts(line: Line, json_key: str) -> list[str] | str:
    """Returns the texts of a line, one a sequence; or, as a string, what is wrong with it."""
    try:
        entry = json.loads(line.content)
    except ValueError as error:  # also bytes that are not UTF-8
        return f"{line.place}: no JSON ({error})"
    if not isinstance(entry, dict) or json_key not in entry:
        return f'{line.place}: no JSON object with the key "{json_key}"'
    text = entry[json_key]
    texts = text if isinstance(text, list) else [text]
    if not all(isinstance(part, str) for part in texts):
        return f'{line.place}: "{json_key}" is neither a string nor a list of strings'
    return texts
