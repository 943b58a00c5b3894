"""What `verify` found: signals out of tolerance, with layer and ranks, and the worst of each."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One signal on the ranks on which it left its tolerance."""

    signal: str
    """Kind: "sample ids", "activation", "gradient", ..."""
    name: str
    """Of a field, module or parameter; empty for a number of a step."""
    layer: str
    """Which part of the network: "layer 3", "embedding", "head", or empty."""
    step: int
    """Optimizer step, from 0."""
    ranks: tuple[int, ...]
    error: float
    """Largest relative error; 1 where something is another value that must be exact."""
    limit: float
    detail: str = ""

    def describe(self) -> str:
        """One sentence."""
        where = f" of {self.name}" if self.name else ""
        layer = f" ({self.layer})" if self.layer else ""
        ranks = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        text = f"{self.signal}{where}{layer} at step {self.step} on {ranks}:"
        text += f" error {self.error:.3g}, allowed {self.limit:.3g}"
        return f"{text}; {self.detail}" if self.detail else text


@dataclass(frozen=True, kw_only=True)
class Signal:
    """Worst error of one kind of signal, also where it is within its limit."""

    signal: str
    compared: int
    error: float
    limit: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A candidate against the baseline."""

    findings: tuple[Finding, ...]
    """In the order of a step; the first is where it began."""
    signals: tuple[Signal, ...]

    @property
    def passed(self) -> bool:
        """Whether everything was within its tolerance."""
        return not self.findings


class Judge:
    """Collects errors, and joins ranks that disagree in the same way."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, int], list[tuple[int, float, float, str]]] = {}
        self._worst: dict[str, Signal] = {}

    def note(
        self,
        signal: str,
        name: str,
        rank: int,
        error: float,
        limit: float,
        *,
        step: int = 0,
        detail: str = "",
    ) -> None:
        """One comparison on one rank; NaN is beyond every limit."""
        error = float("inf") if error != error else error
        old = self._worst.get(signal)
        worst = max(error, old.error if old else 0.0)
        count = 1 + (old.compared if old else 0)
        self._worst[signal] = Signal(signal=signal, compared=count, error=worst, limit=limit)
        if error > limit:
            self._found.setdefault((signal, name, step), []).append((rank, error, limit, detail))

    def result(self) -> Comparison:
        """Everything that was noted."""
        findings = [
            Finding(
                signal=signal,
                name=name,
                layer=layer_of(name),
                step=step,
                ranks=tuple(sorted({rank for rank, *_ in rows})),
                error=max(error for _, error, _, _ in rows),
                limit=rows[0][2],
                detail=next((detail for *_, detail in rows if detail), ""),
            )
            for (signal, name, step), rows in self._found.items()
        ]
        return Comparison(findings=tuple(findings), signals=tuple(self._worst.values()))


def layer_of(name: str) -> str:
    """The part of the network that a module's or parameter's name belongs to."""
    found = re.search(r"\.layers\.(\d+)(?:\.|$)", f".{name}")
    if found:
        return f"layer {found[1]}"
    for word, part in (("embedding", "embedding"), ("output_layer", "head"), ("final", "head")):
        if word in name:
            return part
    return ""
