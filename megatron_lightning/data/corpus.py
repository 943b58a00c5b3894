"""What a data module has to know about its corpora before any sample is read: do the files exist,
and which vocabulary were they made with. Everything is reported as a list of explained errors, so
that a caller can show all of them at once.
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

from megatron_lightning.data.card import (
    DataCard,
    card_errors,
    read_card,
    same_vocabulary,
    tokenizer_errors,
)
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
    given: Tokenizer | None = None
    first: tuple[str, DataCard] | None = None  # who said first what the vocabulary is
    if tokenizer is not None:
        try:
            given = load_tokenizer(tokenizer)
        except (OSError, ValueError, ImportError) as error:
            errors.append(f"tokenizer: {error}")
    for path in paths:
        try:
            missing = missing_files(path)
        except (ImportError, OSError, ValueError) as error:  # of a remote file system
            errors.append(f"paths: {path}: {error}")
            continue
        if missing:
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
        errors += [f"paths: {error}" for error in card_errors(path, card)]
        if given is not None:
            name = f"tokenizer={given.name}"
            errors += [f"tokenizer: {error}" for error in tokenizer_errors(path, card, given, name)]
        elif first is not None and not same_vocabulary(first[1], card):
            errors.append(
                f"tokenizer: {path}.card.json says the data was made with {card.tokenizer} "
                f"({card.tokenizer_digest}), but {first[0]}.card.json is {first[1].tokenizer} "
                f"({first[1].tokenizer_digest}): use the same tokenizer or preprocess again"
            )
        first = first or (path, card)
    return errors
