"""Finds where a layout's run leaves the baseline's, signal by signal in the order of a step.

Everything is compared rank by rank with the part of the baseline that the rank should hold, so that
a finding has a rank; names of modules and parameters give the layer. The order is: samples and
fields, initial weights, activations forward, token losses, loss, gradients backward and their norm,
first update and every rank's weights after it, later steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from megatron_lightning.cli.verify_boxes import (
    Record,
    compare_gradients,
    compare_initial,
    compare_updates,
)
from megatron_lightning.cli.verify_findings import Comparison, Judge
from megatron_lightning.cli.verify_tolerances import Limits

EXACT = 1e-9
"""Relative error of numbers that are computed alike everywhere."""


def compare(candidate: Sequence[Record], baseline: Sequence[Record], limits: Limits) -> Comparison:
    """Compare the records of all ranks of two runs."""
    judge = Judge()
    _compare_batches(candidate, baseline, judge)
    _compare_rows("fields", "field", candidate, baseline, judge, lambda _: 0.0)
    compare_initial(candidate, baseline, judge)
    _compare_rows("forward", "activation", candidate, baseline, judge, _forward_limit(limits))
    _compare_losses(candidate, baseline, judge, limits, steps=range(1))
    compare_gradients(candidate, baseline, judge, limits)
    _compare_norms(candidate, baseline, judge, limits, steps=range(1))
    compare_updates(candidate, baseline, judge, limits)
    later = range(1, len(baseline[0]["steps"]))
    _compare_losses(candidate, baseline, judge, limits, steps=later)
    _compare_norms(candidate, baseline, judge, limits, steps=later)
    return judge.result()


# -------------------------------------------------------------------- data


def _compare_batches(candidate: Sequence[Record], baseline: Sequence[Record], judge: Judge) -> None:
    """Every rank's samples are the baseline's slice for its data rank."""
    reference = _global_batches(baseline)
    for record in candidate:
        place = record["place"]
        for step, fields in enumerate(record["batches"][: len(reference)]):
            for field, hashes in fields.items():
                whole = reference[step].get(field, [])
                first = place["dp"] * len(hashes)
                for row, value in enumerate(hashes):
                    expected = whole[first + row] if first + row < len(whole) else None
                    wrong = float(value != expected)
                    signal = "sample ids" if field in ("tokens", "input_ids") else "batch field"
                    detail = ""
                    if wrong and value in whole:
                        detail = f"sample {first + row} of the batch is sample {whole.index(value)}"
                    judge.note(signal, field, place["rank"], wrong, 0.0, step=step, detail=detail)


def _global_batches(baseline: Sequence[Record]) -> list[dict[str, list[int]]]:
    """Hashes of each global batch, joined over data ranks."""
    by_data_rank = {record["place"]["dp"]: record["batches"] for record in reversed(baseline)}
    joined: list[dict[str, list[int]]] = []
    for step in range(len(baseline[0]["batches"])):
        fields: dict[str, list[int]] = {}
        for data_rank in sorted(by_data_rank):
            for field, hashes in by_data_rank[data_rank][step].items():
                fields.setdefault(field, []).extend(hashes)
        joined.append(fields)
    return joined


# -------------------------------------------------------------------- rows of tokens


def _forward_limit(limits: Limits) -> Callable[[str], float]:
    def limit(name: str) -> float:
        return limits.token_loss if name.endswith("loss") else limits.activation

    return limit


def _compare_rows(
    kind: str,
    signal: str,
    candidate: Sequence[Record],
    baseline: Sequence[Record],
    judge: Judge,
    limit_of: Callable[[str], float],
) -> None:
    """Rows that a rank saw (fields, activations, losses) against those of the baseline, in the
    order in which the baseline made them.
    """
    names = list(dict.fromkeys(name for record in baseline for name in record[kind]))
    for name in names:
        reference = _dense(part for record in baseline for part in record[kind].get(name, ()))
        label = _signal_of(signal, name)
        for record in candidate:
            parts = record[kind].get(name, [])
            if not parts:
                continue
            error = _rows_error(parts, *reference, exact=limit_of(name) == 0.0)
            judge.note(label, name, record["place"]["rank"], error, limit_of(name))


def _signal_of(signal: str, name: str) -> str:
    if signal == "activation" and name.endswith("loss"):
        return "token losses"
    if signal == "activation" and name.endswith("output_layer"):
        return "logits"
    return f"{name} in the step" if signal == "field" else signal


def _dense(parts: Iterable[Record]) -> tuple[Tensor, Tensor]:
    """(values (B, S, K), which rows are there (B, S)) of all samples and positions."""
    held = list(parts)
    samples = 1 + max(int(part["samples"].max()) for part in held)
    length = 1 + max(int(part["positions"].max()) for part in held)
    width = max(part["offset"] + part["values"].shape[-1] for part in held)
    values = torch.zeros(samples, length, width, dtype=held[0]["values"].dtype)
    known = torch.zeros(samples, length, dtype=torch.bool)
    for part in held:
        rows, columns = part["samples"][:, None], part["positions"][None, :]
        offset, own = part["offset"], part["values"].shape[-1]
        values[rows, columns, offset : offset + own] = part["values"]
        known[rows, columns] = True
    return values, known


def _rows_error(parts: Sequence[Record], values: Tensor, known: Tensor, *, exact: bool) -> float:
    """Relative error of one rank's rows; those that the baseline has not (padding) are left out."""
    difference = scale = 0.0
    for part in parts:
        samples, positions = part["samples"], part["positions"]
        fits = positions < values.shape[1]
        positions, got = positions[fits], part["values"][:, fits]
        if int(samples.max()) >= len(values):
            return float("inf")
        rows, columns = samples[:, None], positions[None, :]
        offset = part["offset"]
        want = values[rows, columns, offset : offset + got.shape[-1]].double()
        there = known[rows, columns][..., None]
        delta = torch.where(there, got.double() - want, 0.0)
        difference += float(delta.square().sum())
        scale += float(torch.where(there, want, 0.0).square().sum())
    if exact:
        return float(difference > 0)
    return (difference / scale) ** 0.5 if scale else float(difference > 0)


# -------------------------------------------------------------------- numbers of steps


def _pairs(
    candidate: Sequence[Record], baseline: Sequence[Record], judge: Judge, steps: Iterable[int]
) -> Iterator[tuple[int, int, Record, Record]]:
    """(step, rank, candidate's numbers, baseline's); a step that is missing is noted."""
    for step in steps:
        for record in candidate:
            rank = record["place"]["rank"]
            if step < len(record["steps"]):
                yield step, rank, record["steps"][step], baseline[0]["steps"][step]
            else:
                judge.note("steps", "", rank, 1.0, 0.0, step=step, detail="the step was not made")


def _compare_losses(
    candidate: Sequence[Record],
    baseline: Sequence[Record],
    judge: Judge,
    limits: Limits,
    steps: Iterable[int],
) -> None:
    """Token counts, learning rates, and the losses of a step's batches."""
    numbers = [("token count", "tokens"), ("learning rate", "learning_rate")]
    if not any(record["counts_tokens"] for record in baseline):
        del numbers[0]
    for step, rank, got, want in _pairs(candidate, baseline, judge, steps):
        for signal, key in numbers:
            judge.note(signal, "", rank, _relative(got[key], want[key]), EXACT, step=step)
        for got_loss, want_loss in zip(got["losses"], want["losses"], strict=True):
            judge.note("loss", "", rank, _relative(got_loss, want_loss), limits.loss, step=step)


def _compare_norms(
    candidate: Sequence[Record],
    baseline: Sequence[Record],
    judge: Judge,
    limits: Limits,
    steps: Iterable[int],
) -> None:
    for step, rank, got, want in _pairs(candidate, baseline, judge, steps):
        error = _relative(got["gradient_norm"], want["gradient_norm"])
        judge.note("gradient norm", "", rank, error, limits.gradient_norm, step=step)


def _relative(got: float, want: float) -> float:
    return abs(got - want) / (abs(want) or 1.0)
