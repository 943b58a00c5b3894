"""What the rows of a micro-batch are made of: the documents that are packed into them.

Attention stays within a document and positions count from its beginning. Lengths live on the host,
since kernels are chosen and cut by them. They are those of the whole rows, also on a context rank
that holds a part of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lightning.parallel.context.plan import to_device


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldTokens:
    """Which tokens of a micro-batch's samples a context rank holds."""

    places: Tensor
    """(1 or B, S/cp) int64: where each stands in its sample; padding stands behind all tokens.
    One row where samples are cut alike."""
    length: int
    """Tokens S of a sample, without padding."""
    is_padded: bool
    """Whether any rank holds padding."""

    @property
    def positions(self) -> Tensor | None:
        """(S/cp,) places where they are those of every sample; else None."""
        return self.places[0] if len(self.places) == 1 else None


@dataclass(unsafe_hash=True)  # not frozen: torch.compile would guard every field, every length
class SequenceInfo:
    """Lengths of the documents of each sample, in tokens; those of every sample add up to S."""

    lengths: tuple[tuple[int, ...], ...]

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor) -> SequenceInfo:
        """From `cu_seqlens` (B, documents + 1): where each document begins, then where the last
        one ends, repeated to the width of the tensor. ValueError when a row isn't of that form.
        """
        if cu_seqlens.dim() != 2:
            raise ValueError(
                f"cu_seqlens of shape {tuple(cu_seqlens.shape)}: give one row a sample, (B,"
                " documents + 1), padded at the end with the sequence length"
            )
        rows = cu_seqlens.tolist()
        for row in rows:
            ascending = all(a <= b for a, b in zip(row, row[1:], strict=False))
            if row[0] != 0 or not ascending or row[-1] != rows[0][-1]:
                raise ValueError(
                    f"cu_seqlens row {row}: it must begin with 0, ascend, and end with the"
                    f" sequence length, which other rows give as {rows[0][-1]}"
                )
        return cls(tuple(_lengths(row) for row in rows))

    def cu_seqlens(self, device: torch.device | str = "cpu") -> Tensor:
        """The same as a tensor, (B, documents + 1) int32."""
        width = max(len(row) for row in self.lengths)
        rows = [
            [0, *torch.tensor(row).cumsum(0).tolist()] + [sum(row)] * (width - len(row))
            for row in self.lengths
        ]
        return torch.tensor(rows, dtype=torch.int32, device=device)

    @property
    def flat(self) -> tuple[int, ...]:
        """Lengths of the documents of all samples, one sample after the other."""
        return tuple(length for row in self.lengths for length in row)

    def pieces(self, contiguous: bool) -> tuple[int, ...]:
        """Lengths of what context ranks share out one by one: documents, or whole samples where
        each rank holds a slice of them.
        """
        return tuple(sum(row) for row in self.lengths) if contiguous else self.flat

    @property
    def is_uniform(self) -> bool:
        """True when all samples are packed alike."""
        return len(set(self.lengths)) == 1

    def documents(self, device: torch.device | str = "cpu") -> Tensor:
        """Number of the document, within its sample, of each token: (B, S) int64."""
        rows = [
            torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row))
            for row in self.lengths
        ]
        return to_device(torch.stack(rows), torch.int64, torch.device(device))

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """Position of each token within its document: (B, S) int64."""
        rows = [torch.cat([torch.arange(length) for length in row]) for row in self.lengths]
        return to_device(torch.stack(rows), torch.int64, torch.device(device))


def _lengths(row: Sequence[int]) -> tuple[int, ...]:
    return tuple(b - a for a, b in zip(row, row[1:], strict=False) if b > a)
