"""Where dropout masks come from: seeded streams for training, and exact masks for comparing
layouts.

`DropoutStreams` draws from two generators: one for activations that are split over the tensor axis,
which differs between tensor ranks, and one for those that every tensor rank holds, which doesn't.
Both are seeded anew by `begin` at each micro-batch's forward from the place in the layout and the
position in training. So a restored run draws the same masks with no generator state in the
checkpoint.

`exact_dropout.py` holds the other kind of source, for comparing layouts.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.sequence import HeldTokens


class Layout(StrEnum):
    """What the dims of an activation are, and so which one the tensor axis splits."""

    HIDDEN = "hidden"
    """(S, B, H); with sequence parallelism S is split, else every tensor rank holds the same."""
    FEATURES = "features"
    """(S, B, F); F is split (inside a column and row pair)."""
    HEADS = "heads"
    """(B, N, S, S) attention probabilities by head, query and key; N is split."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where in training a forward of one micro-batch is."""

    step_index: int = 0
    """Optimizer steps done before."""
    micro_batch_index: int = 0
    """Micro-batches of this step that this data rank did before."""
    sample_offset: int = 0
    """Global number, in training, of the micro-batch's first sample."""
    sample_stride: int = 1
    """Distance between the numbers of neighbouring samples of the micro-batch."""
    chunk: int = 0
    """Model chunk of this pipeline rank (virtual stages)."""


class Streams(ABC):
    """Source of dropout masks for one rank. The runtime calls `begin` before each micro-batch's
    forward.
    """

    exact: bool

    def __init__(self, mesh: ParallelMesh, *, seed: int, sequence_parallel: bool) -> None:
        self.mesh = mesh
        self.seed = seed
        self.sequence_parallel = sequence_parallel and mesh.tp.size > 1
        self.position = Position()
        self.held: HeldTokens | None = None
        """Tokens that this context rank holds, before they are split by sequence parallelism; None
        when it holds all of them in order."""

    @property
    def sequence_positions(self) -> Tensor | None:
        """(S/cp,) positions in the global sequence of the tokens held; None when they are all, in
        order, or differ between samples.
        """
        return None if self.held is None else self.held.positions

    def begin(
        self,
        step_index: int,
        micro_batch_index: int,
        sample_offset: int,
        chunk: int = 0,
        *,
        sample_stride: int = 1,
        held: HeldTokens | None = None,
    ) -> None:
        """Set the position in training (see `Position`), and which tokens are seen there."""
        self.position = Position(
            step_index=step_index,
            micro_batch_index=micro_batch_index,
            sample_offset=sample_offset,
            sample_stride=sample_stride,
            chunk=chunk,
        )
        self.held = held

    def is_split(self, layout: Layout) -> bool:
        """True when tensor ranks hold different parts of such an activation."""
        return self.mesh.tp.size > 1 and (layout is not Layout.HIDDEN or self.sequence_parallel)

    def sequence_rows(self, local: int, layout: Layout, device: torch.device) -> Tensor | None:
        """Positions in the global sequence of the `local` rows of an activation, (local,) int64;
        None where context ranks hold parts that were not told to `begin`.
        """
        places = self.sample_rows(local, layout, device)
        return places[0] if places is not None and len(places) == 1 else None

    def sample_rows(self, local: int, layout: Layout, device: torch.device) -> Tensor | None:
        """(1 or B, local) int64 places in their samples of the `local` rows of an activation; None
        where context ranks hold parts that were not told to `begin`.
        """
        split = self.sequence_parallel and layout is Layout.HIDDEN
        whole = local * (self.mesh.tp.size if split else 1)
        if self.held is not None:
            places = self.held.places
        elif self.mesh.cp.size > 1:
            return None
        else:
            places = torch.arange(whole, device=device).unsqueeze(0)
        if places.shape[1] != whole:
            raise ValueError(
                f"{places.shape[1]} sequence positions were given for {whole} tokens of this"
                " context rank"
            )
        start = self.mesh.tp.rank * local if split else 0
        return places[:, start : start + local].to(device=device, dtype=torch.int64)

    def __deepcopy__(self, memo: dict[int, Any]) -> Streams:
        """A copied network (weight averaging makes some) draws from the same source."""
        return self

    @abstractmethod
    def draw(
        self, shape: torch.Size, p: float, *, site: str, layout: Layout, device: torch.device
    ) -> Tensor:
        """Bool mask of the local activation's shape; True with probability `p`, where an element is
        dropped.
        """

    @abstractmethod
    def uniform(
        self, shape: torch.Size, *, site: str, layout: Layout, device: torch.device
    ) -> Tensor:
        """Float32 numbers of (0, 1) of the local activation's shape (noise instead of a mask)."""

    @abstractmethod
    def as_default(self, layout: Layout, device: torch.device) -> AbstractContextManager[None]:
        """Let torch's default generator be the stream for `layout` meanwhile (fused kernels draw
        from it).
        """

    def generators(self) -> tuple[torch.Generator, ...]:
        """What is drawn from, besides torch's default generator."""
        return ()

    @abstractmethod
    def snapshot(self) -> Any:
        """What `restored` needs to draw again what is drawn next."""

    @abstractmethod
    def restored(self, snapshot: Any) -> AbstractContextManager[None]:
        """Draw from `snapshot` on meanwhile, then go on where it was: for recomputed regions."""

    def recompute_contexts(
        self,
    ) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """`context_fn` for `torch.utils.checkpoint`: the recomputed forward draws what the first
        one drew.
        """
        taken: list[Any] = []

        @contextmanager
        def first() -> Iterator[None]:
            taken[:] = [self.snapshot()]
            yield

        @contextmanager
        def again() -> Iterator[None]:
            with self.restored(taken[0]):
                yield

        return first(), again()


class DropoutStreams(Streams):
    """Two generators, seeded at each micro-batch; see the module's text."""

    exact = False

    def __init__(
        self,
        mesh: ParallelMesh,
        *,
        seed: int,
        sequence_parallel: bool,
        seed_default_generator: bool = True,
    ) -> None:
        """`seed_default_generator`: `begin` seeds torch's default generator too, so that a user's
        own `F.dropout` agrees on all tensor ranks and is restored as well. It is seeded alike on
        all ranks: samplers that shuffle draw from it, and must not come to differ.
        """
        super().__init__(mesh, seed=seed, sequence_parallel=sequence_parallel)
        self.seed_default_generator = seed_default_generator
        self._whole = torch.Generator(mesh.device)
        self._split = torch.Generator(mesh.device)
        self._seed()

    def begin(
        self,
        step_index: int,
        micro_batch_index: int,
        sample_offset: int,
        chunk: int = 0,
        *,
        sample_stride: int = 1,
        held: HeldTokens | None = None,
    ) -> None:
        """See `Streams.begin`."""
        super().begin(
            step_index,
            micro_batch_index,
            sample_offset,
            chunk,
            sample_stride=sample_stride,
            held=held,
        )
        self._seed()
        if self.seed_default_generator:
            _seed_default(
                _hash_seed("default", self.seed, step_index, micro_batch_index), self.mesh.device
            )

    def _seed(self) -> None:
        mesh, position = self.mesh, self.position
        place = (self.seed, mesh.dp.rank, mesh.cp.rank, mesh.pp.rank, position.chunk)
        when = (position.step_index, position.micro_batch_index, position.sample_offset)
        self._whole.manual_seed(_hash_seed("whole", *place, *when))
        self._split.manual_seed(_hash_seed("split", *place, *when, mesh.tp.rank))

    def draw(
        self, shape: torch.Size, p: float, *, site: str, layout: Layout, device: torch.device
    ) -> Tensor:
        """See `Streams.draw`."""
        mask = torch.empty(shape, dtype=torch.bool, device=device)
        return mask.bernoulli_(p, generator=self._generator(layout))

    def uniform(
        self, shape: torch.Size, *, site: str, layout: Layout, device: torch.device
    ) -> Tensor:
        """See `Streams.uniform`."""
        return torch.rand(shape, generator=self._generator(layout), device=device)

    @contextmanager
    def as_default(self, layout: Layout, device: torch.device) -> Iterator[None]:
        """See `Streams.as_default`."""
        stream, default = self._generator(layout), _default_generator(device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            shared = default.graphsafe_get_state()  # a graph records from which one to draw
            default.graphsafe_set_state(stream.graphsafe_get_state())
            try:
                yield
            finally:
                default.graphsafe_set_state(shared)
            return
        kept = default.get_state()
        default.set_state(stream.get_state())
        try:
            yield
        finally:
            stream.set_state(default.get_state())
            default.set_state(kept)

    def generators(self) -> tuple[torch.Generator, ...]:
        """See `Streams.generators`."""
        return self._whole, self._split

    def snapshot(self) -> tuple[Tensor, Tensor, HeldTokens | None]:
        """See `Streams.snapshot`."""
        return self._whole.get_state(), self._split.get_state(), self.held

    @contextmanager
    def restored(self, snapshot: tuple[Tensor, Tensor, HeldTokens | None]) -> Iterator[None]:
        """See `Streams.restored`."""
        kept = self.snapshot()
        self._set(snapshot)
        try:
            yield
        finally:
            self._set(kept)

    def _set(self, states: tuple[Tensor, Tensor, HeldTokens | None]) -> None:
        self._whole.set_state(states[0])
        self._split.set_state(states[1])
        self.held = states[2]

    def _generator(self, layout: Layout) -> torch.Generator:
        return self._split if self.is_split(layout) else self._whole


def _hash_seed(*parts: int | str) -> int:
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _seed_default(seed: int, device: torch.device) -> None:
    """`torch.manual_seed` for what a rank draws from: that function tells each kind of accelerator,
    and keeps the call stack as a text for those that are not in use, which takes milliseconds.
    """
    if device.type not in ("cpu", "cuda"):
        torch.manual_seed(seed)
        return
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        _default_generator(device).manual_seed(seed)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator
