"""Dropout whose masks come from an injected source, so that they are right, and restored, in every
layout.

Outside a parallel run a `Dropout` draws from torch's default generator like `nn.Dropout`.
`apply_random` gives every one a `Streams` object (see `parallel/streams.py`) and its site, the
module's name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lightning.parallel.exact_dropout import ExactDropout
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.streams import DropoutStreams, Layout, Streams


class Dropout(nn.Module):
    """Zero elements with probability p in training and scale the others by 1 / (1 - p)."""

    stream: Streams | None = None
    """Source of masks; None: torch's default generator."""
    site: str = ""
    """Name of this module in the whole network, the same in every layout."""

    def __init__(self, p: float, layout: Layout = Layout.HIDDEN) -> None:
        """`p` in [0, 1]. `layout`: what the activation's dims are (hidden states, split features,
        or heads).
        """
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"dropout p={p}: must be in [0, 1]")
        self.p = p
        self.layout = layout

    def forward(self, x: Tensor) -> Tensor:
        """Any activation of the module's `layout` -> the same shape."""
        if not self.training or self.p == 0.0:
            return x
        if self.stream is None:
            return F.dropout(x, self.p)
        if self.p == 1.0:
            return x * 0.0
        dropped = self.stream.draw(
            x.shape, self.p, site=self.site, layout=self.layout, device=x.device
        )
        return (x * (1.0 / (1.0 - self.p))).masked_fill(dropped, 0.0)

    @property
    def draws(self) -> bool:
        """Whether anything is drawn in training."""
        return self.p > 0.0

    @contextmanager
    def fused(self, device: torch.device) -> Iterator[float]:
        """For a kernel that drops inside: yields the probability to give it, while the default
        generator is the stream.

        `with dropout.fused(q.device) as p: F.scaled_dot_product_attention(q, k, v, dropout_p=p)`.
        ValueError in the exact mode, unless nothing is dropped.
        """
        p = self.p if self.training else 0.0
        if p == 0.0 or self.stream is None:
            yield p
            return
        with self.stream.as_default(self.layout, device):
            yield p

    def extra_repr(self) -> str:
        """Settings."""
        return f"p={self.p}, layout={self.layout.value}"


class Jitter(nn.Module):
    """Multiply by uniform noise of [1 - amount, 1 + amount] in training (routers' inputs, arXiv
    2101.03961).
    """

    stream: Streams | None = None
    """As of `Dropout`."""
    site: str = ""
    """As of `Dropout`."""

    def __init__(self, amount: float, layout: Layout = Layout.HIDDEN) -> None:
        """`amount` in [0, 1)."""
        super().__init__()
        self.amount = amount
        self.layout = layout

    def forward(self, x: Tensor) -> Tensor:
        """Any activation of the module's `layout` -> the same shape."""
        if not self.training or not self.draws:
            return x
        if self.stream is None:
            noise = torch.rand(x.shape, device=x.device)
        else:
            noise = self.stream.uniform(
                x.shape, site=self.site, layout=self.layout, device=x.device
            )
        return x * (1.0 - self.amount + 2.0 * self.amount * noise).to(x.dtype)

    @property
    def draws(self) -> bool:
        """Whether anything is drawn in training."""
        return self.amount > 0.0

    def extra_repr(self) -> str:
        """Settings."""
        return f"amount={self.amount}"


def apply_random(
    network: nn.Module,
    mesh: ParallelMesh,
    *,
    seed: int,
    exact: bool = False,
    sequence_parallel: bool = False,
    streams: Streams | None = None,
) -> Streams:
    """Give every `Dropout` and `Jitter` of the network its site and one source of masks and noise,
    and return that.

    `network`'s module names must be those of the whole network (global layer numbers). `streams`:
    those of an earlier call, for a further model chunk of the same rank. ValueError in the exact
    mode when the network holds a dropout of torch's own, whose masks can't be exact.
    """
    if exact:
        _refuse_plain(network)
    if streams is None:
        make = ExactDropout if exact else DropoutStreams
        streams = make(mesh, seed=seed, sequence_parallel=sequence_parallel)
    for name, module in network.named_modules():
        if isinstance(module, (Dropout, Jitter)):
            module.stream, module.site = streams, name
    return streams


def _refuse_plain(network: nn.Module) -> None:
    plain = (
        nn.Dropout,
        nn.Dropout1d,
        nn.Dropout2d,
        nn.Dropout3d,
        nn.AlphaDropout,
        nn.FeatureAlphaDropout,
    )
    names = [
        name
        for name, module in network.named_modules()
        if isinstance(module, plain) and module.p > 0
    ]
    if names:
        raise ValueError(
            f"exact dropout: {names} are torch's own dropout modules, whose masks depend on the"
            " layout; use megatron_lightning.layers.Dropout, or set p=0"
        )
