"""Renaming between this package's tensors and those of another program: a table that reads both
ways.

A rule pairs a name here with one or several names there, and says how the values correspond.
`{word}` in a name stands for one part between dots, the same on both sides. A word that only occurs
here is dim 0 of the tensor there (layers stored as one stacked tensor), and one that only occurs
there is dim 0 of the tensor here (each expert by itself).

    Rule(ours="decoder.layers.{layer}.mlp.linear_fc1.weight",
         theirs="decoder.layers.{layer}.mlp.linear_fc1.weight", values=Unflatten(2))
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lightning.checkpoint.convert.lazy import LazyTensor
from megatron_lightning.checkpoint.errors import CheckpointError

_WORD = re.compile(r"\{(\w+)\}")


class Values(ABC):
    """How the values of the tensors there and of the one here correspond."""

    @abstractmethod
    def to_ours(self, theirs: list[LazyTensor]) -> LazyTensor:
        """Our tensor from theirs, read part by part."""

    @abstractmethod
    def to_theirs(self, ours: Tensor) -> list[Tensor]:
        """The inverse, up to padding; must work on the meta device too."""


@dataclass(frozen=True)
class Same(Values):
    """The same values in the same shape."""

    def to_ours(self, theirs: list[LazyTensor]) -> LazyTensor:
        """The only tensor."""
        (tensor,) = theirs
        return tensor

    def to_theirs(self, ours: Tensor) -> list[Tensor]:
        """The only tensor."""
        return [ours]


@dataclass(frozen=True)
class Unflatten(Values):
    """A dim there is `count` equal parts one after the other, a dim of its own here."""

    count: int
    dim: int = 0

    def to_ours(self, theirs: list[LazyTensor]) -> LazyTensor:
        """(..., count * F, ...) -> (..., count, F, ...)."""
        (tensor,) = theirs
        return tensor.unflatten(self.dim, self.count)

    def to_theirs(self, ours: Tensor) -> list[Tensor]:
        """(..., count, F, ...) -> (..., count * F, ...)."""
        return [ours.flatten(self.dim, self.dim + 1)]


@dataclass(frozen=True)
class Stacked(Values):
    """Several equal tensors there are the entries of dim 0 here."""

    count: int

    def to_ours(self, theirs: list[LazyTensor]) -> LazyTensor:
        """`count` times (F, ...) -> (count, F, ...)."""
        return LazyTensor.stack(theirs)

    def to_theirs(self, ours: Tensor) -> list[Tensor]:
        """(count, F, ...) -> `count` times (F, ...)."""
        return list(ours.unbind(0))


@dataclass(frozen=True)
class Rows(Values):
    """The first `count` rows there; what follows is padding, and comes back as zeros."""

    count: int
    padded: int = 0
    """Rows there; 0: no padding."""

    def to_ours(self, theirs: list[LazyTensor]) -> LazyTensor:
        """(padded, ...) -> (count, ...)."""
        (tensor,) = theirs
        return tensor.first(self.count)

    def to_theirs(self, ours: Tensor) -> list[Tensor]:
        """(count, ...) -> (padded, ...)."""
        missing = max(0, self.padded - ours.shape[0])
        return [torch.cat([ours, ours.new_zeros(missing, *ours.shape[1:])]) if missing else ours]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One line of the table."""

    ours: str
    theirs: str | tuple[str, ...]
    values: Values = Same()  # noqa: RUF009 - frozen

    @property
    def names(self) -> tuple[str, ...]:
        """The names there."""
        return (self.theirs,) if isinstance(self.theirs, str) else self.theirs

    @property
    def stacked(self) -> str | None:
        """The word that is dim 0 there."""
        return _only_word(self.ours, self.names[0])

    @property
    def gathered(self) -> str | None:
        """The word that is dim 0 here."""
        return _only_word(self.names[0], self.ours)


def _only_word(one: str, other: str) -> str | None:
    only = [word for word in _WORD.findall(one) if word not in _WORD.findall(other)]
    if len(only) > 1:
        raise ValueError(f"{one!r}: {only} occur on one side only; at most one may")
    return only[0] if only else None


@dataclass(frozen=True)
class Renamed:
    """The outcome of a table."""

    tensors: dict[str, LazyTensor]
    left: tuple[str, ...]
    """Names that no rule matched, sorted."""


def to_ours(rules: Sequence[Rule], theirs: Mapping[str, LazyTensor]) -> Renamed:
    """Our tensors from theirs. Of several rules for one name here the first that finds its tensors
    counts.
    """
    made: dict[str, LazyTensor] = {}
    used: set[str] = set()
    for rule in rules:
        gathered: dict[str, dict[int, LazyTensor]] = defaultdict(dict)
        for words in _matches(rule.names[0], theirs):
            names = [name.format(**words) for name in rule.names]
            if any(name not in theirs for name in names):
                continue
            parts = [theirs[name] for name in names]
            if rule.gathered is not None:
                one = rule.values.to_ours(parts)
                gathered[rule.ours.format(**words)][int(words[rule.gathered])] = one
            for ours, selected in _unstacked(rule, words, parts):
                made.setdefault(ours, rule.values.to_ours(selected))
            used.update(names)
        for ours, entries in gathered.items():
            if sorted(entries) != list(range(len(entries))):
                raise CheckpointError(f"{rule.names[0]}: there are only {sorted(entries)} of them")
            made.setdefault(ours, LazyTensor.stack([entries[i] for i in range(len(entries))]))
    return Renamed(made, tuple(sorted(set(theirs) - used)))


def to_theirs(rules: Sequence[Rule], ours: Mapping[str, LazyTensor]) -> Renamed:
    """Their tensors from ours. Of several rules for one name here the first counts."""
    made: dict[str, LazyTensor] = {}
    used: set[str] = set()
    stacks: dict[tuple[str, int], dict[int, LazyTensor]] = defaultdict(dict)
    for rule in rules:
        for found in _matches(rule.ours, ours):
            name = rule.ours.format(**found)
            if name in used:
                continue
            used.add(name)
            for words, tensor in _scattered(rule, found, ours[name]):
                for index, template in enumerate(rule.names):
                    part = LazyTensor.computed([tensor], _entry(rule.values, index))
                    if rule.stacked is None:
                        made[template.format(**words)] = part
                    else:
                        others = {k: v for k, v in words.items() if k != rule.stacked}
                        key = (template.format(**others), index)
                        stacks[key][int(words[rule.stacked])] = part
    for (name, _), layers in stacks.items():
        made[name] = LazyTensor.stack([layers[i] for i in sorted(layers)])
    return Renamed(made, tuple(sorted(set(ours) - used)))


def _scattered(
    rule: Rule, words: dict[str, str], tensor: LazyTensor
) -> list[tuple[dict[str, str], LazyTensor]]:
    """The entries of dim 0, where each is a tensor there."""
    if rule.gathered is None:
        return [(words, tensor)]
    return [({**words, rule.gathered: str(i)}, tensor.select(i)) for i in range(tensor.shape[0])]


class _Entry:
    """Tensor number `index` of several."""

    def __init__(self, values: Values, index: int) -> None:
        self.values, self.index = values, index

    def __call__(self, parts: list[Tensor]) -> Tensor:
        return self.values.to_theirs(parts[0])[self.index]


def _entry(values: Values, index: int) -> _Entry:
    return _Entry(values, index)


def _matches(template: str, names: Iterable[str]) -> list[dict[str, str]]:
    """The words of the template for every name that it matches."""
    pattern = "".join(
        f"(?P<{piece}>[^.]+)" if index % 2 else re.escape(piece)
        for index, piece in enumerate(_WORD.split(template))
    )
    found = (re.fullmatch(pattern, name) for name in names)
    return [match.groupdict() for match in found if match is not None]


def _unstacked(
    rule: Rule, words: Mapping[str, str], parts: list[LazyTensor]
) -> list[tuple[str, list[LazyTensor]]]:
    if rule.gathered is not None:
        return []
    if rule.stacked is None:
        return [(rule.ours.format(**words), parts)]
    count = parts[0].shape[0] if parts[0].shape else 0
    return [
        (rule.ours.format(**words, **{rule.stacked: i}), [part.select(i) for part in parts])
        for i in range(count)
    ]
