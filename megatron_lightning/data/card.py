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

from megatron_lightning.data.files import is_file, read_text

CARD_VERSION = 1


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


def file_digest(path: str | os.PathLike[str]) -> str:
    """Returns the sha256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
