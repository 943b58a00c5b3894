"""What is in a corpus, from its index and data card; no token is read."""

import dataclasses
import os

import numpy as np

from megatron_lightning.data.card import DataCard, file_digest, read_card
from megatron_lightning.data.files import is_remote
from megatron_lightning.data.indexed.reader import IndexedDataset


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusInfo:
    """Counts of a corpus."""

    prefix: str
    """Path without suffix."""
    dtype: str
    """Type of the tokens."""
    documents: int
    """Documents, empty ones included."""
    empty_documents: int
    """Documents without a sequence."""
    sequences: int
    """Sequences."""
    tokens: int
    """Tokens of all sequences."""
    shortest: int
    """Tokens of the shortest sequence; 0 without any."""
    median: float
    """Tokens of the sequence in the middle; 0 without any."""
    longest: int
    """Tokens of the longest sequence; 0 without any."""
    bin_bytes: int
    """Size of the token file."""
    idx_bytes: int
    """Size of the index file."""
    card: DataCard | None
    """The data card, if there is one."""

    def rows(self) -> list[tuple[str, str]]:
        """Returns a name and a text for each line of a report."""
        rows = [
            ("corpus", f"{self.prefix}.bin, {self.prefix}.idx"),
            ("documents", f"{self.documents:,}"),
            ("sequences", f"{self.sequences:,}"),
            ("tokens", f"{self.tokens:,}, {self.dtype}"),
            ("size", f"{self.bin_bytes:,} bytes and an index of {self.idx_bytes:,}"),
        ]
        if self.empty_documents:
            rows.insert(2, ("empty documents", f"{self.empty_documents:,}"))
        if self.sequences:
            mean = self.tokens / self.sequences
            text = (
                f"{self.shortest:,} to {self.longest:,}, mean {mean:,.1f}, median {self.median:,g}"
            )
            rows.append(("tokens a sequence", text))
        return rows + _card_rows(self.card)


def corpus_info(prefix: str | os.PathLike[str]) -> CorpusInfo:
    """Returns the counts of a corpus.

    Raises:
        ValueError: a damaged pair or card.
        FileNotFoundError: a file is missing.
    """
    data, card = IndexedDataset(prefix), read_card(prefix)
    lengths, bounds = data.sequence_lengths, data.document_indices
    return CorpusInfo(
        prefix=data.prefix,
        dtype=data.dtype.name,
        documents=len(bounds) - 1,
        empty_documents=int((bounds[1:] == bounds[:-1]).sum()),
        sequences=len(data),
        tokens=data.num_tokens,
        shortest=int(lengths.min()) if len(data) else 0,
        median=float(np.median(lengths)) if len(data) else 0.0,
        longest=int(lengths.max()) if len(data) else 0,
        bin_bytes=data.num_tokens * data.dtype.itemsize,
        idx_bytes=data.index_bytes,
        card=card,
    )


def check_digests(prefix: str | os.PathLike[str]) -> None:
    """Reads both files whole and compares them with the data card.

    Raises:
        ValueError: there is no card, the pair is remote, or a digest differs.
    """
    name = os.fspath(prefix)
    if is_remote(name):
        raise ValueError(f"{name}: digests are compared for local files only; copy the corpus")
    card = read_card(prefix)
    if card is None:
        raise ValueError(f"{name}: there is no data card, and so no digest to compare with")
    for suffix, expected in ((".bin", card.bin_sha256), (".idx", card.idx_sha256)):
        if file_digest(f"{name}{suffix}") != expected:
            raise ValueError(
                f"{name}{suffix}: its digest is not the one of the data card; copy the corpus "
                "again, or preprocess again"
            )


def _card_rows(card: DataCard | None) -> list[tuple[str, str]]:
    if card is None:
        return [("data card", "none: vocabulary and origin are unknown")]
    return [
        ("tokenizer", f"{card.tokenizer}, {card.vocab_size:,} ids, end of document {card.eod_id}"),
        ("tokenizer digest", card.tokenizer_digest),
        *(("source", f"{source['path']}, {source['bytes']:,} bytes") for source in card.sources),
        ("lines skipped", f"{card.skipped_lines:,}"),
        ("made by", f"megatron_lightning {card.package_version}, {card.arguments}"),
    ]
