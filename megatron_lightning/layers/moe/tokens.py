"""Which of the rows that a router sees are tokens of samples, and where these stand.

Context parallelism pads samples whose length doesn't divide. Padding travels through the layers,
but must not count: losses, loads and capacity would depend on the layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.streams import Layout, Streams


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutedTokens:
    """A rank's T rows of a micro-batch, t = s * B + b."""

    num_samples: int
    """B."""
    num_tokens: int
    """Tokens on all ranks that hold parts of the micro-batch, without padding."""
    padding: Tensor | None = None
    """(T,) bool, True where there is no token; None: all are."""
    places: Tensor | None = None
    """(T,) int64 where each stands among those of all ranks; None: those of later ranks later."""

    @classmethod
    def of(
        cls,
        hidden: Tensor,
        streams: Streams | None,
        axis: MeshAxis,
        *,
        with_places: bool,
    ) -> RoutedTokens:
        """Of `hidden` (S, B, H), whose sequences go on on the other ranks of `axis`."""
        length, batch = hidden.shape[:2]
        num_tokens = length * batch * axis.size
        held = None if streams is None else streams.held
        is_padded = held is not None and held.is_padded
        rows = None
        if streams is not None and axis.size > 1 and (with_places or is_padded):
            rows = streams.sample_rows(length, Layout.HIDDEN, hidden.device)
        if rows is None:
            return cls(num_samples=batch, num_tokens=num_tokens)
        rows = rows.t().expand(-1, batch)  # (S, B)
        sample = torch.arange(batch, device=rows.device)
        padding = None
        if held is not None and is_padded:
            num_tokens, padding = held.length * batch, (rows >= held.length).flatten()
        return cls(
            num_samples=batch,
            num_tokens=num_tokens,
            padding=padding,
            places=(rows * batch + sample).flatten() if with_places else None,
        )

    def without_padding(self, values: Tensor, fill: float = 0) -> Tensor:
        """(T, ...) with `fill` where there is no token."""
        if self.padding is None:
            return values
        shape = [-1] + [1] * (values.dim() - 1)
        return values.masked_fill(self.padding.view(shape), fill)
