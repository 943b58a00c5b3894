"""How a network may be cut: the split table for tensor parallelism and the stage names for
pipelining.

Pure data, no torch.distributed. A `ParallelPlan` is written once per model family
(`models/plans.py`) or by the user for an own network. It names what is split, never how the
mathematics changes: the layers stay those of one GPU.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase


class Role(StrEnum):
    """What a split of a parameter means for the module that owns it."""

    COLUMN = "column"
    """Output features are split; the module receives the whole input."""
    ROW = "row"
    """Input features are split; partial outputs are summed over the tensor axis."""
    VOCABULARY = "vocabulary"
    """Rows are token ids; lookups outside the own rows give zero and are summed over the axis."""
    FOLLOWS = "follows"
    """Split along with its module (a column-split module's bias); it brings no communication of
    its own."""
    REPLICATED = "replicated"
    """Every tensor rank holds the whole parameter."""
    EXPERT = "expert"
    """Dim 0 counts experts and is split over the expert axis; a further dim may be split over the
    expert tensor axis. The token dispatcher brings the communication."""


class Gradient(StrEnum):
    """What a tensor rank's gradient of a replicated parameter is."""

    WHOLE = "whole"
    """The same full gradient on every rank: nothing to reduce."""
    SEQUENCE = "sequence"
    """Only the own part of the sequence when sequence parallelism is on, else whole."""
    PARTIAL = "partial"
    """Always a part, since the parameter is shared by heads or columns that are split (query/key
    norms)."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """One row of the table: what tensor parallelism does to the parameters of a name glob."""

    role: Role
    """What becomes of the parameters: column, row, vocabulary, experts, replicated..."""
    dim: int | None = None
    """Dim of the global tensor that is split over the tensor axis (of experts: over the expert
    tensor axis); None when replicated."""
    gradient: Gradient = Gradient.WHOLE
    """For replicated parameters: what each rank's gradient is before it is reduced."""
    gather_output: bool = False
    """COLUMN only: all-gather the output's last dim, so that the caller sees the whole of it."""
    parts: int = 0
    """COLUMN only: equal parts of the dim, such as attention heads, that no rank may cut; the size
    of the tensor axis must divide their number. 0: any place will do."""

    def __post_init__(self) -> None:
        if self.parts < 0 or (self.parts and self.role is not Role.COLUMN):
            raise ValueError(
                f"Split(role={self.role.value!r}, parts={self.parts}): a number of equal parts, at"
                " least 1, is for column() alone; leave it out"
            )
        if self.role is Role.EXPERT:
            if self.dim == 0:
                raise ValueError(
                    "Split(role='expert', dim=0): dim 0 counts experts and is split over the expert"
                    " axis; name the dim that the expert tensor axis splits, or None"
                )
        elif (self.role is Role.REPLICATED) != (self.dim is None):
            raise ValueError(
                f"Split(role={self.role.value!r}, dim={self.dim}): a replicated parameter has no "
                f"dim and every other one"
                " needs it; use column(), row(), vocabulary(), follows() or replicated()"
            )


def column(dim: int = 0, *, gather_output: bool = False, parts: int = 0) -> Split:
    """Split output features (dim 0 of a plain weight, dim 1 of a gated [2, F, H] one), between its
    `parts` (heads) where they are given.
    """
    return Split(role=Role.COLUMN, dim=dim, gather_output=gather_output, parts=parts)


def row(dim: int = 1) -> Split:
    """Split input features (the last dim of a weight)."""
    return Split(role=Role.ROW, dim=dim)


def vocabulary() -> Split:
    """Split token rows of an embedding table."""
    return Split(role=Role.VOCABULARY, dim=0)


def follows(dim: int = 0) -> Split:
    """Split like the module's weight, with no communication of its own (biases of column-split
    layers).
    """
    return Split(role=Role.FOLLOWS, dim=dim)


def replicated(gradient: Gradient = Gradient.WHOLE) -> Split:
    """Keep the whole parameter on every tensor rank."""
    return Split(role=Role.REPLICATED, gradient=gradient)


def experts(dim: int | None = None) -> Split:
    """Split stacked experts: dim 0 over the expert axis, `dim` over the expert tensor axis.

    `dim` counts in the global tensor: fc1 [E, F, H] 1, gated fc1 [E, 2, F, H] 2, fc2 [E, H, F] 2,
    biases [E, F] 1 and [E, 2, F] 2. None: whole on every expert tensor rank, each of which then has
    its whole gradient (fc2's bias [E, H]).
    """
    return Split(role=Role.EXPERT, dim=dim)


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """The split table and the stage names of one model family."""

    splits: Mapping[str, Split] = field(default_factory=dict)
    """Glob over parameter names relative to the network -> split. Every parameter must match
    exactly one row."""
    layers: str | None = None
    """Path of the ModuleList or ModuleDict whose entries the pipeline deals out; None: the network
    can't be pipelined."""
    first: tuple[str, ...] = ()
    """Paths of modules that live on the first stage only (embeddings)."""
    last: tuple[str, ...] = ()
    """Paths of modules that live on the last stage only (final norm, head)."""
    further_layers: tuple[str, ...] = ()
    """Paths of containers in modules of `last` whose entries are layers as well: recomputed,
    compiled and sharded one by one, but not dealt out by the pipeline."""
    tied: tuple[tuple[str, str], ...] = ()
    """Pairs (owner, user) of parameter names that are one parameter; the user's stage holds a copy
    of it."""
    sequence_dim: int = 0
    """Dim of the hidden activation that sequence parallelism scatters: 0 for (S, B, H), 1 for (B,
    S, H)."""

    @property
    def has_experts(self) -> bool:
        """Whether any row is of experts."""
        return any(split.role is Role.EXPERT for split in self.splits.values())

    def unused_rows(self, names: Iterable[str]) -> list[str]:
        """Globs that match none of the parameter `names` of the whole network (misspelt rows)."""
        known = list(names)
        return [glob for glob in self.splits if not any(fnmatchcase(n, glob) for n in known)]

    def split_of(self, name: str) -> Split:
        """Return the one row that matches parameter `name`; ValueError when none or several
        match.
        """
        hits = [glob for glob in self.splits if fnmatchcase(name, glob)]
        if len(hits) == 1:
            return self.splits[hits[0]]
        if not hits:
            raise ValueError(
                f"plan.splits: no row matches parameter {name!r}; add one, e.g. {name!r}: "
                f"replicated()"
            )
        raise ValueError(f"plan.splits: parameter {name!r} matches {hits}; make the globs disjoint")


@dataclass(frozen=True, kw_only=True)
class ParameterInfo:
    """What one parameter is and which box of its global tensor this rank holds. One table per
    rank, keyed by name.
    """

    name: str
    """Canonical name: that of the LightningModule's state dict in one process, whatever the
    layout."""
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Where this rank's box begins in the global tensor."""
    sizes: tuple[int, ...]
    """Extent of the box. The local tensor may be longer along the split dim (vocabulary
    padding)."""
    split: Split
    tied_copy: bool = False
    """True on the stage that holds only a copy of a tied parameter; its owner is on another
    stage."""
    expert: bool = False
    """True for expert parameters, which live on the expert view of the mesh."""

    @property
    def numel(self) -> int:
        """Elements of the box that this rank holds."""
        return math.prod(self.sizes)


CHUNKS = "pipeline_chunks"
"""Attribute under which a network cut into pipeline stages holds its chunks."""
_CHUNK = re.compile(rf"(^|\.){CHUNKS}\.\d+\.")


def canonical_name(name: str) -> str:
    """Name of a parameter in one process, from its name in the state dict of a module cut into
    pipeline chunks.

    `network.pipeline_chunks.1.decoder.layers.3.weight` -> `network.decoder.layers.3.weight`; other
    names stay.
    """
    return _CHUNK.sub(r"\1", name)
