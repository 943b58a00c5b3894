"""Compares weights, gradients and updates, which ranks hold as boxes of the whole tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.cli.verify_findings import Judge
from megatron_lightning.cli.verify_tolerances import Limits

Record = Mapping[str, Any]


def assemble(records: Sequence[Record], kind: str) -> dict[str, Tensor]:
    """Whole tensors from the boxes of all ranks; of replicas, the first rank's."""
    whole: dict[str, Tensor] = {}
    for record in reversed(records):
        for name, (shape, boxes) in record[kind].items():
            target = whole.setdefault(name, torch.zeros(shape))
            for offsets, local in boxes:
                _slice_of(target, offsets, local).copy_(local)
    return whole


def _slice_of(whole: Tensor, offsets: Sequence[int], local: Tensor) -> Tensor:
    return whole[tuple(slice(o, o + s) for o, s in zip(offsets, local.shape, strict=True))]


def _box_errors(
    records: Sequence[Record], kind: str, reference: Mapping[str, Tensor]
) -> Iterator[tuple[str, int, float, float]]:
    """(name, rank, norm of the difference in its boxes, norm of the whole), by name."""
    for name, want in reference.items():
        scale = float(want.double().norm())
        for record in records:
            if name not in record[kind]:
                continue
            shape, boxes = record[kind][name]
            if tuple(shape) != tuple(want.shape):
                yield name, record["place"]["rank"], float("inf"), scale
                continue
            squares = [
                float((local.double() - _slice_of(want, offsets, local).double()).square().sum())
                for offsets, local in boxes
            ]
            yield name, record["place"]["rank"], sum(squares) ** 0.5, scale


def compare_initial(candidate: Sequence[Record], baseline: Sequence[Record], judge: Judge) -> None:
    """Initial weights: bitwise equality."""
    signal, kind = "initial weights", "initial"
    reference = assemble(baseline, kind)
    for name, rank, difference, _ in _box_errors(candidate, kind, reference):
        judge.note(signal, name, rank, float(difference > 0 or difference != difference), 0.0)
    missing = reference.keys() - {name for record in candidate for name in record[kind]}
    for name in sorted(missing):
        judge.note(signal, name, 0, 1.0, 0.0, detail="no rank holds it")


def compare_gradients(
    candidate: Sequence[Record], baseline: Sequence[Record], judge: Judge, limits: Limits
) -> None:
    """In the order of the backward pass: head, layers from the last on, embedding."""
    reference = dict(reversed(assemble(baseline, "gradients").items()))
    norm = baseline[0]["steps"][0]["gradient_norm"]
    for name, rank, difference, scale in _box_errors(candidate, "gradients", reference):
        limit = limits.gradient
        if scale <= limits.zero_gradient * norm:
            scale, limit = norm, limits.zero_gradient
        judge.note("gradient", name, rank, difference / (scale or 1.0), limit)
    missing = reference.keys() - {name for record in candidate for name in record["gradients"]}
    for name in sorted(missing):
        judge.note("gradient", name, 0, 1.0, limits.gradient, detail="no rank has one")


def compare_updates(
    candidate: Sequence[Record], baseline: Sequence[Record], judge: Judge, limits: Limits
) -> None:
    """Changes of what the optimizer updates, where the gradient is not lost in rounding: elsewhere
    Adam's step is the sign of an error. And every rank's weights, which must be just that.
    """
    _compare_changes(candidate, baseline, judge, limits, "first", limits.first_update)
    _compare_copies(candidate, judge, "first")
    _compare_changes(candidate, baseline, judge, limits, "final", limits.update)
    _compare_copies(candidate, judge, "final")


def _compare_changes(
    candidate: Sequence[Record],
    baseline: Sequence[Record],
    judge: Judge,
    limits: Limits,
    when: str,
    limit: float,
) -> None:
    signal = "first update" if when == "first" else "update over all steps"
    gradients, initial = assemble(baseline, "gradients"), assemble(baseline, "initial_masters")
    norm = baseline[0]["steps"][0]["gradient_norm"]
    for name, final in assemble(baseline, f"{when}_masters").items():
        if name not in gradients:
            continue
        if float(gradients[name].double().norm()) <= limits.zero_gradient * norm:
            continue
        live = _live(gradients[name], limits)
        want = final.double() - initial[name].double()
        change = float((want * live).norm())
        if change == 0.0:
            continue
        for record in candidate:
            squares = 0.0
            for (offsets, local), (_, begun) in zip(
                record[f"{when}_masters"].get(name, ((), ()))[1],
                record["initial_masters"].get(name, ((), ()))[1],
                strict=True,
            ):
                error = local.double() - begun.double() - _slice_of(want, offsets, local)
                squares += float((error * _slice_of(live, offsets, local)).square().sum())
            judge.note(signal, name, record["place"]["rank"], squares**0.5 / change, limit)


def _compare_copies(candidate: Sequence[Record], judge: Judge, when: str) -> None:
    """Every rank's copy of the weights: bitwise what was updated, in the dtype of the weights."""
    updated = assemble(candidate, f"{when}_masters")
    for record in candidate:
        for name, (_, boxes) in record[f"{when}_weights"].items():
            if name not in updated:
                continue
            dtype = getattr(torch, record["dtypes"][name])
            wrong = any(
                not torch.equal(local, _slice_of(updated[name], offsets, local).to(dtype).float())
                for offsets, local in boxes
            )
            judge.note("weights after the step", name, record["place"]["rank"], float(wrong), 0.0)


def _live(gradient: Tensor, limits: Limits) -> Tensor:
    """1.0 where an element's gradient is at least a hundred times what rounding may do to it."""
    spread = float(gradient.double().square().mean().sqrt())
    return (gradient.abs() > min(1.0, 100 * limits.gradient) * spread).double()
