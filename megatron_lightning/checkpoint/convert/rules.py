"""Renaming between this package's tensors and those of another program: a table that reads both
ways.

A rule pairs a name here with one or several names there, and says how the values correspond.
`{word}` in a name stands for one part between dots, the same on both sides. A word that only occurs
here is dim 0 of the tensor there (layers stored as one stacked tensor).

    Rule(ours="decoder.layers.{layer}.mlp.linear_fc1.weight",
         theirs="decoder.layers.{layer}.mlp.linear_fc1.weight", values=Unflatten(2))
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_lightning.checkpoint.convert.lazy import LazyTensor

_WORD = re.compile(r"\{(\w+)\}")


class Values(Protocol):
    """How the values of the tensors there and of the one here correspond."""

    def to_ours(self, theirs: list[Tensor]) -> Tensor:
        """Our tensor from theirs; must work on the meta device too."""
        ...

    def to_theirs(self, ours: Tensor) -> list[Tensor]:
        """The inverse, up to padding."""
        ...


@dataclass(frozen=True)
class Same:
    """The same values in the same shape."""

    def to_ours(self, theirs: list[Tensor]) -> Tensor:
        """The only tensor."""
        (tensor,) = theirs
        return tensor

    def to_theirs(self, ours: Tensor) -> list[Tensor]:
        """The only tensor."""
        return [ours]


@dataclass(frozen=True)
class Unflatten:
    """Dim 0 there is `count` equal parts one after the other, a dim of its own here."""

    count: int

    def to_ours(self, theirs: list[Tensor]) -> Tensor:
        """(count * F, ...) -> (count, F, ...)."""
        (tensor,) = theirs
        return tensor.unflatten(0, (self.count, -1))

    def to_theirs(self, ours: Tensor) -> list[Tensor]:
        """(count, F, ...) -> (count * F, ...)."""
        return [ours.flatten(0, 1)]


@dataclass(frozen=True)
class Stacked:
    """Several equal tensors there are the entries of dim 0 here."""

    count: int

    def to_ours(self, theirs: list[Tensor]) -> Tensor:
        """`count` times (F, ...) -> (count, F, ...)."""
        return torch.stack(theirs)

    def to_theirs(self, ours: Tensor) -> list[Tensor]:
        """(count, F, ...) -> `count` times (F, ...)."""
        return list(ours.unbind(0))


@dataclass(frozen=True)
class Rows:
    """The first `count` rows there; what follows is padding, and comes back as zeros."""

    count: int
    padded: int = 0
    """Rows there; 0: no padding."""

    def to_ours(self, theirs: list[Tensor]) -> Tensor:
        """(padded, ...) -> (count, ...)."""
        (tensor,) = theirs
        return tensor[: self.count]

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
        here, there = _WORD.findall(self.ours), _WORD.findall(self.names[0])
        only = [word for word in here if word not in there]
        if len(only) > 1:
            raise ValueError(f"{self.ours!r}: {only} occur on one side only; at most one may")
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
        for words in _matches(rule.names[0], theirs):
            names = [name.format(**words) for name in rule.names]
            if any(name not in theirs for name in names):
                continue
            parts = [theirs[name] for name in names]
            for ours, selected in _unstacked(rule, words, parts):
                made.setdefault(ours, LazyTensor.computed(selected, rule.values.to_ours))
            used.update(names)
    return Renamed(made, tuple(sorted(set(theirs) - used)))


def to_theirs(rules: Sequence[Rule], ours: Mapping[str, LazyTensor]) -> Renamed:
    """Their tensors from ours. Of several rules for one name here the first counts."""
    made: dict[str, LazyTensor] = {}
    used: set[str] = set()
    stacks: dict[tuple[str, int], dict[int, LazyTensor]] = defaultdict(dict)
    for rule in rules:
        for words in _matches(rule.ours, ours):
            name = rule.ours.format(**words)
            if name in used:
                continue
            used.add(name)
            for index, template in enumerate(rule.names):
                part = LazyTensor.computed([ours[name]], _entry(rule.values, index))
                if rule.stacked is None:
                    made[template.format(**words)] = part
                else:
                    others = {k: v for k, v in words.items() if k != rule.stacked}
                    key = (template.format(**others), index)
                    stacks[key][int(words[rule.stacked])] = part
    for (name, _), layers in stacks.items():
        made[name] = LazyTensor.computed([layers[i] for i in sorted(layers)], torch.stack)
    return Renamed(made, tuple(sorted(set(ours) - used)))


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
    if rule.stacked is None:
        return [(rule.ours.format(**words), parts)]
    count = parts[0].shape[0] if parts[0].shape else 0
    return [
        (rule.ours.format(**words, **{rule.stacked: i}), [part.select(i) for part in parts])
        for i in range(count)
    ]
