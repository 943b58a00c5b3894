"""Dropout masks that are the same in every layout, for tests and verification.

Each mask is a pure function of (seed, module name, global sample, sequence position, feature, or
head and key), drawn by the counter-based generator of `philox.py`. Slow, and only for attention
that makes its probabilities in the open.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_lightning.parallel import philox
from megatron_lightning.parallel.sequence import HeldTokens
from megatron_lightning.parallel.streams import Layout, Position, Streams


class ExactDropout(Streams):
    """Masks by global position."""

    exact = True

    def draw(
        self, shape: torch.Size, p: float, *, site: str, layout: Layout, device: torch.device
    ) -> Tensor:
        """See `Streams.draw`. Counter: (last dim // 4, sequence position, sample, head)."""
        key = philox.make_key("dropout", self.seed, site)
        values = torch.stack(self._words(shape, key, layout, device), dim=-1).flatten(-2)
        return self._own(values, shape, layout) < round(p * 2**32)

    def uniform(
        self, shape: torch.Size, *, site: str, layout: Layout, device: torch.device
    ) -> Tensor:
        """See `Streams.uniform`. The counter is that of `draw`."""
        key = philox.make_key("noise", self.seed, site)
        values = philox.uniform(self._words(shape, key, layout, device)).flatten(-2)
        return self._own(values, shape, layout).to(torch.float32)

    def _words(
        self, shape: torch.Size, key: philox.Key, layout: Layout, device: torch.device
    ) -> list[Tensor]:
        last, offset = shape[-1], self.mesh.tp.rank * shape[-1] if layout is Layout.FEATURES else 0
        group = torch.arange(offset // 4, (offset + last + 3) // 4, device=device)
        samples = shape[0] if layout is Layout.HEADS else shape[1]
        sample = (
            self.position.sample_offset
            + torch.arange(samples, device=device) * self.position.sample_stride
        )
        sample &= 0xFFFFFFFF
        if layout is Layout.HEADS:
            heads, queries = shape[1], self._sequence(shape[2], layout, device)
            head = torch.arange(heads, device=device) + (self.mesh.tp.rank * heads)
            counter = [group, queries[:, None], sample[:, None, None, None], head[:, None, None]]
        else:
            sequence = self._sequence(shape[0], layout, device)
            counter = [group, sequence[:, None, None], sample[:, None], torch.zeros_like(group)]
        return philox.philox(counter, key)

    def _own(self, values: Tensor, shape: torch.Size, layout: Layout) -> Tensor:
        """Of whole groups of four, the local features."""
        offset = self.mesh.tp.rank * shape[-1] if layout is Layout.FEATURES else 0
        begin = offset - offset // 4 * 4
        return values[..., begin : begin + shape[-1]]

    def _sequence(self, local: int, layout: Layout, device: torch.device) -> Tensor:
        rows = self.sequence_rows(local, layout, device)
        if rows is None:
            raise ValueError(
                f"exact dropout with context_parallel_size={self.mesh.cp.size} needs"
                " samples that are cut alike, told to begin()"
            )
        return rows

    @contextmanager
    def as_default(self, layout: Layout, device: torch.device) -> Iterator[None]:
        """Always a ValueError: a fused kernel's mask has no global positions."""
        raise ValueError(
            "exact dropout can't be used with a fused attention kernel, whose masks depend on the"
            " layout; use the reference attention, or set attention_dropout=0"
        )
        yield

    def snapshot(self) -> tuple[Position, HeldTokens | None]:
        """See `Streams.snapshot`."""
        return self.position, self.held

    @contextmanager
    def restored(self, snapshot: tuple[Position, HeldTokens | None]) -> Iterator[None]:
        """See `Streams.restored`."""
        kept = self.snapshot()
        self.position, self.held = snapshot
        try:
            yield
        finally:
            self.position, self.held = kept
