"""How a user writes a mixture of corpora, and several sets of them.

A blend is one path; a list of paths; `{path: weight}`; Megatron's list `weight path weight path
...`, also as one string. Several sets are `{name: blend}`.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_lightning.data.blend import check_weights, parse_blend

# In this order, and with Path in place of os.PathLike: config files take the first that fits.
BlendLike = Mapping[str, float] | Sequence[str | float] | str | Path
SetsLike = Mapping[str, float] | Mapping[str, BlendLike] | Sequence[str | float] | str | Path


class Blend(NamedTuple):
    """Corpora and their weights."""

    paths: list[str]
    """Paths of `.bin`/`.idx` pairs without suffix."""
    weights: list[float] | None
    """None: in proportion to their lengths."""

    @property
    def used(self) -> list[str]:
        """Paths whose weight is not 0."""
        weights = self.weights or [1.0] * len(self.paths)
        return [path for path, weight in zip(self.paths, weights, strict=True) if weight > 0]


def read_blend(value: BlendLike, field: str = "paths") -> Blend:
    """Returns the blend that `value` means.

    Raises:
        ValueError: none of the forms above, or weights from which no share can be made; `field`
            names it.
    """
    if isinstance(value, Mapping):
        wrong = [path for path, weight in value.items() if not _is_weight(weight)]
        if wrong or not value:
            raise ValueError(
                f"{field}={dict(value)}: give a number as the weight of each path"
                + (f", which {wrong[0]!r} lacks" if wrong else "")
            )
        weights = [float(weight) for weight in value.values()]
        check_weights(weights)
        return Blend([str(path) for path in value], weights)
    if isinstance(value, str) and len(words := value.split()) > 1 and _as_weight(words[0]):
        value = words
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    try:
        return Blend(*parse_blend(value))
    except ValueError as error:
        raise ValueError(str(error).replace("paths", field, 1)) from error


def read_sets(value: SetsLike, field: str) -> dict[str, Blend]:
    """Returns named blends; a single blend has the name "".

    Raises:
        ValueError: as `read_blend`; or a name that can't be logged.
    """
    if not isinstance(value, Mapping) or all(_is_weight(weight) for weight in value.values()):
        return {"": read_blend(value, field)}  # type: ignore[arg-type]
    if any(_is_weight(weight) for weight in value.values()) or not all(value):
        raise ValueError(
            f"{field}={dict(value)}: give either a weight for every path, or a name (not empty) for"
            " every set"
        )
    return {name: read_blend(blend, f"{field}[{name!r}]") for name, blend in value.items()}  # type: ignore[arg-type]


def _is_weight(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _as_weight(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
