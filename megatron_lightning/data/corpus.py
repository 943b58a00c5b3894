"""What a data module has to know about its corpora before any sample is read: do the files exist,
and which vocabulary were they made with. Everything is reported as a list of explained errors, so
that a caller can show all of them at once.
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

from megatron_lightning.data.card import DataCard, read_card
from megatron_lightning.data.files import file_size
from megatron_lightning.data.indexed import missing_files
from megatron_lightning.data.tokenizer import Tokenizer, load_tokenizer


class Vocabulary(NamedTuple):
    """The token ids of a run, as far as they are known."""

    vocab_size: int | None
    """Number of ids."""
    eod_id: int | None
    """End-of-document token."""
    digest: str | None = None
    """Identity of the vocabulary, see `Tokenizer.digest`."""


def read_vocabulary(paths: Sequence[str], tokenizer: str | os.PathLike[str] | None) -> Vocabulary:
    """Returns the vocabulary by the tokenizer if one is given, else by the first data card.

    Raises:
        ValueError: a tokenizer or card that cannot be read.
        FileNotFoundError: the tokenizer file is missing.
    """
    source: Tokenizer | DataCard | None
    if tokenizer is not None:
        source = load_tokenizer(tokenizer)
    else:
        source = next((card for path in paths if (card := read_card(path)) is not None), None)
    if source is None:
        return Vocabulary(None, None)
    digest = source.tokenizer_digest if isinstance(source, DataCard) else source.digest
    return Vocabulary(source.vocab_size, source.eod_id, digest)


def corpus_errors(paths: Sequence[str], tokenizer: str | os.PathLike[str] | None) -> list[str]:
    """Returns what is wrong with the corpora: missing files, cards that contradict the files or
    each other, and a tokenizer that is not the one the data was made with.
    """
    errors: list[str] = []
    first: tuple[str, str] | None = None  # who said first what the vocabulary is
    if tokenizer is not None:
        try:
            first = (f"tokenizer={os.fspath(tokenizer)}", load_tokenizer(tokenizer).digest)
        except (OSError, ValueError) as error:
            errors.append(f"tokenizer: {error}")
    for path in paths:
        if missing := missing_files(path):
            errors.append(
                f"paths: no {', '.join(missing)}: give the path of a .bin/.idx pair without suffix"
            )
            continue
        try:
            card = read_card(path)
        except ValueError as error:
            errors.append(f"paths: {error}")
            continue
        if card is None:
            continue
        size = file_size(f"{path}.bin")
        if size != card.bin_bytes:
            errors.append(
                f"paths: {path}.bin has {size} bytes, {path}.card.json describes "
                f"{card.bin_bytes}: the card belongs to another corpus"
            )
        said = (f"{path}.card.json", card.tokenizer_digest)
        if first is not None and first[1] != said[1]:
            errors.append(
                f"tokenizer: {said[0]} says the data was made with {card.tokenizer} ({said[1]}), "
                f"but {first[0]} is {first[1]}: use the same tokenizer or preprocess again"
            )
        first = first or said
    return errors
