"""Noise of stochastic rounding as a function of the place in the global tensor.

Each element of an output's gradient gets 16 random bits by (seed, layer, batch, sample, position in
the sequence, feature), so that it is rounded alike in every layout and in a resumed run. Rows that
are no samples' positions, as those of an expert, count by micro-batch and place in it instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lightning.parallel.philox import Key, philox
from megatron_lightning.parallel.streams import Position, Streams

_PER_COUNTER = 8


@dataclass(frozen=True, kw_only=True)
class RoundingNoise:
    """Source for one layer."""

    key: Key
    streams: Streams | None
    """Knows the position in training; None: always the first."""
    features: Tensor
    """(N,) int64: global numbers of the output features held; of eight neighbours, aligned."""
    sequence_dim: int = 0
    """Dim of the layer's input that is the sequence; the other leading dim counts samples."""

    def __call__(
        self, input_shape: torch.Size, shape: torch.Size, device: torch.device
    ) -> Callable[[], Tensor]:
        """Noise for the gradient's matrix `shape` (T, N) of a layer whose input had `input_shape`,
        at the position of this forward pass.
        """
        position = Position() if self.streams is None else self.streams.position
        held = None if self.streams is None else self.streams.sequence_positions

        def draw() -> Tensor:
            places, samples = self._rows(input_shape, position, held, device)
            return self._uniform(places, samples, position, shape, device)

        return draw

    def _rows(
        self, shape: torch.Size, position: Position, held: Tensor | None, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """(T,) position in the sequence and global sample of each row."""
        leading = shape[:-1]
        if len(leading) != 2:  # rows of no known structure
            count = math.prod(leading)
            # Tensor ranks of experts may be of several data ranks, whose samples differ.
            return torch.arange(count, device=device), torch.tensor([position.micro_batch_index])
        length, samples = leading[self.sequence_dim], leading[1 - self.sequence_dim]
        known = held is not None and len(held) == length
        places = held.to(device) if known and held is not None else torch.arange(length)
        numbers = position.sample_offset + position.sample_stride * torch.arange(samples)
        views = [(-1, 1), (1, -1)] if self.sequence_dim == 0 else [(1, -1), (-1, 1)]
        places, numbers = places.to(device).view(views[0]), numbers.to(device).view(views[1])
        return tuple(x.reshape(-1) for x in torch.broadcast_tensors(places, numbers))  # type: ignore[return-value]

    def _uniform(
        self,
        places: Tensor,
        samples: Tensor,
        position: Position,
        shape: torch.Size,
        device: torch.device,
    ) -> Tensor:
        missing = -len(self.features) % _PER_COUNTER
        features = self.features.to(device)
        if missing:
            features = torch.cat((features, features[-1] + 1 + torch.arange(missing).to(device)))
        groups = features.view(-1, _PER_COUNTER)[:, 0] // _PER_COUNTER
        batch = torch.tensor(position.step_index & 0xFFFFFFFF, device=device)
        words = torch.stack(
            philox(
                [groups[None, :], places[:, None], samples.to(device)[:, None], batch.view(1, 1)],
                self.key,
            ),
            dim=-1,
        )  # (T, N / 8, 4)
        halves = torch.stack((words & 0xFFFF, words >> 16), dim=-1).flatten(1)
        return (halves[:, : shape[1]].float() + 0.5).mul_(2.0**-16)
