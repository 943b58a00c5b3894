"""Merging and cutting finished corpora, data cards included.

Everything is written aside and appears at the end. A merged corpus has a card when all its parts
have one; parts of one have a card each when it has one.
"""

import dataclasses
import os
from collections.abc import Sequence
from contextlib import ExitStack

from megatron_lightning.data.card import (
    DataCard,
    card_path,
    file_digest,
    read_card,
    write_card,
)
from megatron_lightning.data.indexed.format import bin_path, idx_path
from megatron_lightning.data.indexed.reader import IndexedDataset
from megatron_lightning.data.indexed.writer import IndexedDatasetWriter
from megatron_lightning.data.splits import share_ranges


def merge(prefixes: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> None:
    """Writes the documents of all `prefixes`, in order, as the pair `out`.

    Raises:
        ValueError: nothing to merge, a damaged pair, token types or tokenizers differ, or `out` is
            one of the inputs.
    """
    if not prefixes:
        raise ValueError("prefixes is empty: name at least one .bin/.idx pair")
    _check_targets([out], prefixes)
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    cards = [read_card(prefix) for prefix in prefixes]
    known = [card for card in cards if card is not None]
    _check_tokenizers(prefixes, cards)
    with IndexedDatasetWriter(out, datasets[0].dtype) as writer:
        for dataset in datasets:
            writer.add_dataset(dataset)
        card_path(out).unlink(missing_ok=True)  # it describes the pair that is replaced
    if len(known) == len(cards):
        _write_card(
            out,
            dataclasses.replace(
                known[0],
                sources=[source for card in known for source in card.sources],
                arguments={"merged": [os.fspath(prefix) for prefix in prefixes]}
                | {"arguments": [card.arguments for card in known]},
                skipped_lines=sum(card.skipped_lines for card in known),
            ),
        )


def split_documents(
    prefix: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    documents: int | None = None,
    shares: Sequence[float] | None = None,
) -> list[str]:
    """Cuts a corpus into runs of consecutive documents, written as `out`-00000, `out`-00001, ...

    Args:
        prefix: the corpus.
        out: path of the parts without number and suffix.
        documents: documents in each part (the last may have fewer), or
        shares: share of the documents of each part; they are normalised.

    Returns:
        The prefixes of the parts.

    Raises:
        ValueError: a damaged pair, an argument out of range, or a part that would have no document.
    """
    dataset, card = IndexedDataset(prefix), read_card(prefix)
    runs = _runs(dataset, documents, shares)
    names = [f"{os.fspath(out)}-{number:05d}" for number in range(len(runs))]
    _check_targets(names, [prefix])
    with ExitStack() as stack:
        writers = [stack.enter_context(IndexedDatasetWriter(name, dataset.dtype)) for name in names]
        for writer, run in zip(writers, runs, strict=True):
            writer.add_dataset(dataset, run)
        for name in names:
            card_path(name).unlink(missing_ok=True)
    if card is not None:
        for name, run in zip(names, runs, strict=True):
            part = {"part_of": os.fspath(prefix), "documents": [run.start, run.stop]}
            _write_card(name, dataclasses.replace(card, arguments=part | card.arguments))
    return names


def _runs(
    dataset: IndexedDataset, documents: int | None, shares: Sequence[float] | None
) -> list[range]:
    count = len(dataset.document_indices) - 1
    if (documents is None) == (shares is None):
        raise ValueError("documents, shares: give one of them")
    if shares is not None:
        runs = share_ranges(shares, count)
    else:
        if documents is None or documents < 1:
            raise ValueError(f"documents={documents} must be at least 1")
        starts = range(0, count, documents)
        runs = [range(at, min(at + documents, count)) for at in starts]
    empty = [number for number, run in enumerate(runs) if not len(run)]
    if empty or not runs:
        raise ValueError(
            f"{dataset.prefix} has {count} documents: part {(empty or [0])[0]} of "
            f"{max(len(runs), 1)} would have none; ask for fewer parts or larger shares"
        )
    return runs


def _check_targets(
    targets: Sequence[str | os.PathLike[str]], inputs: Sequence[str | os.PathLike[str]]
) -> None:
    taken = {os.path.realpath(prefix) for prefix in inputs}
    for target in targets:
        if os.path.realpath(target) in taken:
            raise ValueError(f"out={os.fspath(target)} is one of the inputs: choose another name")


def _check_tokenizers(
    prefixes: Sequence[str | os.PathLike[str]], cards: Sequence[DataCard | None]
) -> None:
    """Refuses to mix ids of different vocabularies, as far as the cards know."""
    known = [(prefix, card) for prefix, card in zip(prefixes, cards, strict=True) if card]
    for prefix, card in known[1:]:
        first_prefix, first = known[0]
        if card.tokenizer_digest != first.tokenizer_digest or card.eod_id != first.eod_id:
            raise ValueError(
                f"{card_path(prefix)} says tokenizer {card.tokenizer} ({card.tokenizer_digest}, "
                f"end of document {card.eod_id}), {card_path(first_prefix)} says "
                f"{first.tokenizer} ({first.tokenizer_digest}, {first.eod_id}): their ids do not "
                "mean the same; preprocess one of them again"
            )


def _write_card(prefix: str | os.PathLike[str], card: DataCard) -> None:
    """Writes a card with the counts and digests of the pair as it is."""
    data = IndexedDataset(prefix)
    bounds = data.document_indices
    write_card(
        prefix,
        dataclasses.replace(
            card,
            documents=len(bounds) - 1,
            sequences=len(data),
            tokens=data.num_tokens,
            empty_documents=int((bounds[1:] == bounds[:-1]).sum()),
            dtype=data.dtype.name,
            bin_bytes=bin_path(prefix).stat().st_size,
            idx_bytes=idx_path(prefix).stat().st_size,
            bin_sha256=file_digest(bin_path(prefix)),
            idx_sha256=file_digest(idx_path(prefix)),
        ),
    )
