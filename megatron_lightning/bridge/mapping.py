"""Two-way rules between the parameters of our networks and the tensors of another program's file.

A rule pairs a name here with one or several names there; its form says where each element of the
one lies in the others. Forms move elements and never compute with values, so a rule read in either
direction is bitwise the inverse of the other. All of it is index arithmetic on boxes: a rank that
holds a box of our tensor learns which boxes of which tensors there it is made of, and nothing is
read or copied for it.

    Rule("decoder.layers.{layer}.mlp.linear_fc1.weight",
         ("layers.{layer}.mlp.gate_proj.weight", "layers.{layer}.mlp.up_proj.weight"), Stacked())

Forms can be put into each other: `Transposed(Fused(PackedQKV(config)))` is GPT-2's `c_attn`.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from megatron_lightning.checkpoint import Box
from megatron_lightning.config.model import GPTConfig

Shape = tuple[int, ...]
_WORD = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of our tensor that is a box of one tensor there, its dims reordered."""

    ours: Box
    source: int
    """Which of the tensors there."""
    theirs: Box
    dims: tuple[int | None, ...]
    """For each dim here the dim there that it is; None for a dim of size 1 that isn't there. Every
    dim there is named once."""
    view: Shape | None = None
    """Shape in which the tensor there is seen by `theirs` and `dims`, some of its dims being taken
    apart; None: its own."""

    def cut(self, box: Box) -> Piece | None:
        """The part of this piece in `box`, a box of our tensor; None where they don't meet."""
        common = self.ours.intersect(box)
        if common is None:
            return None
        offsets, sizes = list(self.theirs.offsets), list(self.theirs.sizes)
        for here, there in enumerate(self.dims):
            if there is not None:
                offsets[there] += common.offsets[here] - self.ours.offsets[here]
                sizes[there] = common.sizes[here]
        return replace(self, ours=common, theirs=Box(tuple(offsets), tuple(sizes)))

    def to_ours(self, values: Tensor) -> Tensor:
        """Values of the box there, as a view with the shape of the box here."""
        order = [there for there in self.dims if there is not None]
        return values.permute(order).reshape(self.ours.sizes)

    def to_theirs(self, values: Tensor) -> Tensor:
        """Values of the box here, as a view with the shape of the box there."""
        order = [there for there in self.dims if there is not None]
        values = values.reshape([self.theirs.sizes[there] for there in order])
        return values.permute([order.index(there) for there in range(len(order))])


class Form(ABC):
    """How the elements of our tensor lie in those of the tensors there."""

    @abstractmethod
    def shapes(self, ours: Shape) -> list[Shape]:
        """Shapes of the tensors there for one of shape `ours` here."""

    @abstractmethod
    def pieces(self, ours: Shape) -> list[Piece]:
        """Disjoint pieces that are together all of our tensor, and all of those there."""


@dataclass(frozen=True)
class Same(Form):
    """The same tensor."""

    def shapes(self, ours: Shape) -> list[Shape]:
        """One of the same shape."""
        return [ours]

    def pieces(self, ours: Shape) -> list[Piece]:
        """One piece."""
        return [Piece(Box.whole(ours), 0, Box.whole(ours), tuple(range(len(ours))))]


@dataclass(frozen=True)
class Stacked(Form):
    """The entries of dim 0 here, (count, F, ...), are tensors of their own there, (F, ...) each; or
    what `inner` makes of them, the tensors of one entry after those of the other.
    """

    count: int = 2
    inner: Form = Same()  # noqa: RUF009 - frozen

    def shapes(self, ours: Shape) -> list[Shape]:
        """Those of one entry, for each."""
        return self.inner.shapes(ours[1:]) * self.count

    def pieces(self, ours: Shape) -> list[Piece]:
        """Those of every entry."""
        tensors = len(self.inner.shapes(ours[1:]))
        pieces = self.inner.pieces(ours[1:])
        return [
            replace(
                piece,
                ours=Box((i, *piece.ours.offsets), (1, *piece.ours.sizes)),
                source=i * tensors + piece.source,
                dims=(None, *piece.dims),
            )
            for i in range(self.count)
            for piece in pieces
        ]


@dataclass(frozen=True)
class Rearranged(Form):
    """One tensor there with the dims of ours in another order, some of them joined into one.

    `there` names for each dim there the dims here that it consists of, the outer first:
    ((0,), (3,), (2, 1)) are experts [E, 2, F, H] as [E, H, 2F] with gate and up in turns.
    """

    there: tuple[tuple[int, ...], ...]

    def shapes(self, ours: Shape) -> list[Shape]:
        """One, with products of our sizes."""
        return [tuple(math.prod(ours[dim] for dim in joined) for joined in self.there)]

    def pieces(self, ours: Shape) -> list[Piece]:
        """One, of the tensor with its dims taken apart."""
        order = [dim for joined in self.there for dim in joined]
        view = tuple(ours[dim] for dim in order)
        dims = tuple(order.index(dim) for dim in range(len(ours)))
        return [Piece(Box.whole(ours), 0, Box.whole(view), dims, view)]


@dataclass(frozen=True)
class PackedQKV(Form):
    """Queries (N * D, ...), keys and values (G * D, ...) there; here packed per query group: its
    N / G query heads, its key head, its value head.
    """

    heads: int
    groups: int
    head_dim: int

    @classmethod
    def of(cls, config: GPTConfig) -> PackedQKV:
        """The form for a config's heads."""
        return cls(config.num_attention_heads, config.num_query_groups, config.head_dim)

    def shapes(self, ours: Shape) -> list[Shape]:
        """Those of queries, keys, values."""
        return [(heads * self.head_dim, *ours[1:]) for heads in (self.heads, *2 * [self.groups])]

    def pieces(self, ours: Shape) -> list[Piece]:
        """Three for each group."""
        rest, zeros, dims = ours[1:], (0,) * (len(ours) - 1), tuple(range(len(ours)))
        found, start = [], 0
        for group in range(self.groups):
            for source, heads in enumerate((self.heads // self.groups, 1, 1)):
                rows = heads * self.head_dim
                here, there = Box((start, *zeros), (rows, *rest)), (group * rows, *zeros)
                found.append(Piece(here, source, Box(there, here.sizes), dims))
                start += rows
        return found


@dataclass(frozen=True)
class Fused(Form):
    """The tensors of another form one after the other along dim 0, in one tensor there."""

    inner: Form

    def shapes(self, ours: Shape) -> list[Shape]:
        """One, with the sum of the rows."""
        parts = self.inner.shapes(ours)
        return [(sum(part[0] for part in parts), *parts[0][1:])]

    def pieces(self, ours: Shape) -> list[Piece]:
        """Those of the other form, shifted."""
        starts = [0]
        for part in self.inner.shapes(ours):
            starts.append(starts[-1] + part[0])
        return [
            replace(
                piece,
                source=0,
                theirs=piece.theirs.shift(
                    (starts[piece.source], *(0,) * (len(piece.theirs.sizes) - 1))
                ),
            )
            for piece in self.inner.pieces(ours)
        ]


@dataclass(frozen=True)
class Transposed(Form):
    """Another form with the dims of each tensor there in reverse order."""

    inner: Form = Same()  # noqa: RUF009 - frozen

    def shapes(self, ours: Shape) -> list[Shape]:
        """Those of the other form, reversed."""
        return [shape[::-1] for shape in self.inner.shapes(ours)]

    def pieces(self, ours: Shape) -> list[Piece]:
        """Those of the other form, reversed."""
        return [_reversed(piece) for piece in self.inner.pieces(ours)]


def _reversed(piece: Piece) -> Piece:
    assert piece.view is None, "dims that are taken apart have an order of their own"
    theirs, last = piece.theirs, len(piece.theirs.sizes) - 1
    dims = tuple(None if there is None else last - there for there in piece.dims)
    return replace(piece, theirs=Box(theirs.offsets[::-1], theirs.sizes[::-1]), dims=dims)


@dataclass(frozen=True)
class Rule:
    """One line of a table. `{word}` in a name stands for one part between dots, on both sides."""

    ours: str
    theirs: str | tuple[str, ...]
    form: Form = Same()  # noqa: RUF009 - frozen

    @property
    def names(self) -> tuple[str, ...]:
        """The names there."""
        return (self.theirs,) if isinstance(self.theirs, str) else self.theirs

    def match(self, name: str) -> tuple[str, ...] | None:
        """The names there of our parameter `name`; None if the rule isn't about it."""
        parts = _WORD.split(self.ours)
        pattern = "".join(
            f"(?P<{part}>[^.]+)" if index % 2 else re.escape(part)
            for index, part in enumerate(parts)
        )
        found = re.fullmatch(pattern, name)
        return None if found is None else tuple(n.format(**found.groupdict()) for n in self.names)


@dataclass(frozen=True)
class Entry:
    """One of our parameters: what it is made of."""

    names: tuple[str, ...]
    """Tensors there."""
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class TensorMap:
    """A table of rules applied to the parameters of one network."""

    entries: Mapping[str, Entry]
    """By the name here."""
    theirs: Mapping[str, Shape]
    """Shapes of the tensors there, in the order of our parameters."""


def apply_rules(rules: Sequence[Rule], ours: Mapping[str, Shape]) -> TensorMap:
    """Find each parameter's rule. ValueError names those that have none, since no tensor there
    could hold their values.
    """
    entries: dict[str, Entry] = {}
    theirs: dict[str, Shape] = {}
    without = []
    for name, shape in ours.items():
        hits = [(rule, names) for rule in rules if (names := rule.match(name)) is not None]
        if not hits:
            without.append(name)
            continue
        assert len(hits) == 1, f"{name} has several rules"
        ((rule, names),) = hits
        entries[name] = Entry(names, tuple(rule.form.pieces(shape)))
        for there, its_shape in zip(names, rule.form.shapes(shape), strict=True):
            assert there not in theirs, f"{there} has several rules"
            theirs[there] = its_shape
    if without:
        raise ValueError(
            f"no rule of this architecture holds the values of {without[:5]}"
            f"{' and others' if len(without) > 5 else ''}"
        )
    return TensorMap(entries, theirs)
