"""The data card: a JSON file beside a corpus that says where it came from and how it was tokenized.

It lets the tokenizer of a run be checked against the one of the data, tells the vocabulary size
without opening a tokenizer, and carries digests by which a copied corpus can be verified.
"""

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from megatron_lightning.data.files import file_size, is_file, read_text
from megatron_lightning.data.tokenizer import Tokenizer

CARD_VERSION = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataCard:
    """What is recorded of a corpus."""

    sources: list[dict[str, Any]]
    """Input files in order: `path`, `bytes` and `sha256` of each."""
    tokenizer: str
    """Path or name of the tokenizer as it was given."""
    tokenizer_digest: str
    """Identity of the vocabulary, see `Tokenizer.digest`."""
    vocab_size: int
    """Number of token ids."""
    eod_id: int
    """End-of-document token."""
    special_ids: dict[str, int]
    """Ids of special tokens by what they are for, see `Tokenizer.special_ids`."""
    arguments: dict[str, Any]
    """Arguments of the preprocessing call that determine the result."""
    documents: int
    """Documents written."""
    sequences: int
    """Sequences written; less than documents when some are empty."""
    tokens: int
    """Tokens written, end-of-document tokens included."""
    empty_documents: int
    """Documents without any token; their boundary is kept."""
    skipped_lines: int
    """Input lines left out because they could not be read."""
    dtype: str
    """Token type of the `.bin` file."""
    bin_bytes: int
    """Size of the `.bin` file."""
    idx_bytes: int
    """Size of the `.idx` file."""
    bin_sha256: str
    """Digest of the `.bin` file."""
    idx_sha256: str
    """Digest of the `.idx` file."""
    package_version: str
    """Version of megatron_lightning that wrote the corpus."""
    card_version: int = CARD_VERSION
    """Version of this format."""


def card_path(prefix: str | os.PathLike[str]) -> Path:
    """Returns the path of the data card of `prefix`."""
    return Path(f"{os.fspath(prefix)}.card.json")


def write_card(prefix: str | os.PathLike[str], card: DataCard) -> None:
    """Writes the card of `prefix`; the file appears complete or not at all."""
    path = card_path(prefix)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(dataclasses.asdict(card), indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def read_card(prefix: str | os.PathLike[str]) -> DataCard | None:
    """Returns the card of `prefix`, None when there is none.

    Raises:
        ValueError: the file is no data card of a known version.
    """
    path = f"{os.fspath(prefix)}.card.json"
    if not is_file(path):
        return None
    try:
        fields = json.loads(read_text(path))
        if fields["card_version"] != CARD_VERSION:
            raise ValueError(f"version {fields['card_version']}, known is {CARD_VERSION}")
        return DataCard(**fields)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is no data card ({error}): delete it or preprocess again"
        ) from error


def card_errors(prefix: str | os.PathLike[str], card: DataCard) -> list[str]:
    """Returns what in the files of `prefix` is not as its card says: sizes and counts. The files
    are not read; `check_digests` does that.
    """
    name = os.fspath(prefix)
    errors = []
    for suffix, described in ((".bin", card.bin_bytes), (".idx", card.idx_bytes)):
        if (size := file_size(f"{name}{suffix}")) != described:
            errors.append(
                f"{name}{suffix} has {size} bytes, {name}.card.json describes {described}: the "
                "card belongs to another corpus"
            )
    index = 34 + 12 * card.sequences + 8 * (card.documents + 1)
    if not errors and index != card.idx_bytes:
        errors.append(
            f"{name}.card.json counts {card.documents} documents and {card.sequences} sequences, "
            f"which is an index of {index} bytes and not of {card.idx_bytes}: it was changed"
        )
    return errors


def same_vocabulary(one: DataCard, other: DataCard) -> bool:
    """Returns whether the ids of two corpora mean the same."""
    return (one.tokenizer_digest, one.eod_id) == (other.tokenizer_digest, other.eod_id)


def tokenizer_errors(
    prefix: str | os.PathLike[str], card: DataCard, tokenizer: Tokenizer, given: str
) -> list[str]:
    """Returns in what a tokenizer is not the one that a corpus was made with.

    Args:
        prefix: path of the corpus.
        card: its card.
        tokenizer: the tokenizer of the run.
        given: how the user named it.
    """
    place, remedy = f"{os.fspath(prefix)}.card.json", "use the same tokenizer or preprocess again"
    if card.tokenizer_digest != tokenizer.digest:
        return [
            f"{place} says the data was made with {card.tokenizer} ({card.tokenizer_digest}), but "
            f"{given} is {tokenizer.digest}: {remedy}"
        ]
    special = dict(tokenizer.special_ids)
    if card.eod_id != tokenizer.eod_id or card.special_ids != special:
        return [
            f"{place} says the data was made with the special tokens {card.special_ids}, but "
            f"{given} has {special}: {remedy}"
        ]
    return []


def file_digest(path: str | os.PathLike[str]) -> str:
    """Returns the sha256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
