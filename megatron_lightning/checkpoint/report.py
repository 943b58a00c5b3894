"""What a load found: names asked for, names in the checkpoint, and how they differ."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from megatron_lightning.checkpoint.boxed_tensor import BoxedTensor
from megatron_lightning.checkpoint.encode import OBJECT_TENSORS
from megatron_lightning.checkpoint.errors import CheckpointError
from megatron_lightning.checkpoint.index import StoredTensor

Strictness = Literal["all", "missing_ok", "unexpected_ok", "none"]
_TOLERATED: dict[str, frozenset[str]] = {
    "all": frozenset(),
    "missing_ok": frozenset({"missing"}),
    "unexpected_ok": frozenset({"unexpected"}),
    "none": frozenset({"missing", "unexpected", "mismatched"}),
}
_SHOWN = 10  # names listed in a message


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor in a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The outcome of a load over all ranks, names sorted."""

    missing: tuple[str, ...]
    """Asked for by some rank, not in the checkpoint; left as they were."""
    unexpected: tuple[str, ...]
    """In the checkpoint, asked for by no rank."""
    mismatched: Mapping[str, str]
    """Name and how its shape or dtype differs; left as they were."""
    converted: Mapping[str, str]
    """Name and the floating dtypes between which its values were converted."""

    def describe(self) -> str:
        """The report as text, a line a finding; empty if all names and dtypes matched."""
        mismatched = [f"{name} ({how})" for name, how in self.mismatched.items()]
        converted = [f"{name} ({how})" for name, how in self.converted.items()]
        findings = {
            "missing in the checkpoint": self.missing,
            "unexpected in the checkpoint": self.unexpected,
            "of another shape or dtype": mismatched,
            "converted": converted,
        }
        return "\n".join(
            f"{what} ({len(names)}): {_shorten(names)}" for what, names in findings.items() if names
        )


@dataclass(slots=True)
class Comparison:
    """The findings of one rank."""

    asked: set[str]
    missing: list[str]
    mismatched: dict[str, str]
    converted: dict[str, str]


def compare(index: Mapping[str, StoredTensor], tensors: Mapping[str, BoxedTensor]) -> Comparison:
    """Compare what this rank asks for with the contents of the checkpoint."""
    found = Comparison(set(tensors), [name for name in tensors if name not in index], {}, {})
    for name, tensor in tensors.items():
        if name not in index:
            continue
        stored = index[name]
        if tuple(tensor.shape) != stored.shape:
            found.mismatched[name] = (
                f"saved with shape {list(stored.shape)}, here {list(tensor.shape)}"
            )
        elif tensor.dtype != stored.dtype:
            how = f"saved as {stored.dtype}, here {tensor.dtype}"
            both_floating = tensor.dtype.is_floating_point and stored.dtype.is_floating_point
            (found.converted if both_floating else found.mismatched)[name] = how
    return found


def summarize(
    folder: Path,
    index: Mapping[str, StoredTensor],
    answers: list[Comparison],
    strict: Strictness,
    scope: str | tuple[str, ...],
) -> LoadReport:
    """The report over all ranks. Raises CheckpointError for findings that `strict` does not
    tolerate.
    """
    if strict not in _TOLERATED:
        raise ValueError(f"strict={strict!r}: give one of {', '.join(map(repr, _TOLERATED))}")
    asked = set().union(*(answer.asked for answer in answers))
    in_scope = {
        name for name in index if name.startswith(scope) and not name.startswith(OBJECT_TENSORS)
    }
    report = LoadReport(
        missing=tuple(sorted({name for answer in answers for name in answer.missing})),
        unexpected=tuple(sorted(in_scope - asked)),
        mismatched=_merge([answer.mismatched for answer in answers]),
        converted=_merge([answer.converted for answer in answers]),
    )
    findings = {
        "missing": report.missing,
        "unexpected": report.unexpected,
        "mismatched": report.mismatched,
    }
    if any(names and kind not in _TOLERATED[strict] for kind, names in findings.items()):
        raise CheckpointError(
            f"{folder} does not fit (strict={strict!r}):\n{report.describe()}\nnothing was loaded"
        )
    return report


def _merge(parts: list[dict[str, str]]) -> dict[str, str]:
    merged = {name: how for part in parts for name, how in part.items()}
    return dict(sorted(merged.items()))


def _shorten(names: tuple[str, ...] | list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
