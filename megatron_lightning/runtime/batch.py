"""From a Lightning batch to micro-batches.

A batch is what one data-parallel rank consumes in one `training_step` of the Trainer. Its samples
lie on a dim that a field table names; a batch that needs no cutting is never looked into.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Hashable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron_lightning.runtime.context_batch import ContextPart

BATCH_DIMS: Mapping[str, int] = {
    "tokens": 0,
    "labels": 0,
    "loss_mask": 0,
    "position_ids": 0,
    "input_ids": 0,
    "attention_mask": 0,
    "token_type_ids": 0,
    "cu_seqlens": 0,
    "padding_mask": 0,
    "decoder_tokens": 0,
    "decoder_padding_mask": 0,
    "is_random": 0,
    "truncated": 0,
}
"""Batch dim of the fields that this package's data sets and Hugging Face collators produce."""


class MicroBatches(list[Any]):
    """A batch that its loader or collate function has already cut: each entry is one
    micro-batch.

    Their means weigh by their samples where fields with a known batch dim (or tensors that agree on
    dim 0) tell these, else equally.
    """


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One forward's worth of data."""

    data: Any
    num_samples: int
    share: float
    """Part of the batch's samples that it holds; the shares of a batch add up to 1."""
    num_loss_tokens: Tensor | None = None
    """Tokens that its loss is a mean over, on all context ranks; None: it is a plain mean, or not
    known."""
    context: ContextPart | None = None
    """What of its sequence this rank holds under context parallelism; None: all of it."""

    def signature(self) -> tuple[Hashable, ...]:
        """Shapes and dtypes of all tensors: equal on all pipeline ranks, since they read the same
        batch.
        """
        return tuple((tuple(leaf.shape), leaf.dtype) for leaf in _tensors(self.data))


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested mappings, sequences and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _tensors(entry)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))


def batch_size_of(batch: Any, batch_dims: Mapping[str, int]) -> int | None:
    """Number of samples in `batch`, or None when nothing in it says so."""
    if isinstance(batch, (Tensor, np.ndarray)):
        return batch.shape[0] if batch.ndim else None
    if isinstance(batch, Mapping):
        known = [
            value.shape[batch_dims[key]]
            for key, value in batch.items()
            if key in batch_dims and _is_array(value)
        ]
        rest = [value for key, value in batch.items() if key not in batch_dims]
        return known[0] if known else batch_size_of(rest, batch_dims)
    if isinstance(batch, (list, tuple)):
        found = (batch_size_of(value, batch_dims) for value in batch)
        return next((size for size in found if size is not None), None)
    return None


def split_batch(
    batch: Any,
    *,
    micro_batch_size: int | None,
    pipeline_size: int,
    batch_dims: Mapping[str, int] = BATCH_DIMS,
) -> list[MicroBatch]:
    """Cut `batch` into micro-batches of `micro_batch_size` samples; the last may hold fewer.

    Without a size, a pipeline of P stages gets P micro-batches (single samples if P does not
    divide the batch) and one stage gets the whole batch. Raises ValueError naming a field whose
    batch dim is unknown or doesn't agree.
    """
    if isinstance(batch, MicroBatches):
        if not batch:
            raise ValueError(
                "the batch was cut into no micro-batches at all; MicroBatches and split_micro_batch"
                " give at least one"
            )
        counts = [_samples_of(data, batch_dims) for data in batch]
        known = [count for count in counts if count is not None]
        known = known if len(known) == len(batch) else [1] * len(batch)
        return _shares(list(zip(batch, known, strict=True)))
    if micro_batch_size is None and pipeline_size == 1:
        return [
            MicroBatch(data=batch, num_samples=batch_size_of(batch, batch_dims) or 1, share=1.0)
        ]
    size = batch_size_of(batch, batch_dims)
    if size is None:
        raise ValueError(
            f"batch of type {type(batch).__name__}: no tensor in it tells the number of samples, "
            f"so it can't be cut into"
            " micro-batches; give the LightningModule a hook split_micro_batch(batch, "
            "micro_batch_size) -> list"
        )
    step = micro_batch_size or (size // pipeline_size if size % pipeline_size == 0 else 1)
    if size == 0:
        raise ValueError("the batch holds no samples; leave such batches out of the loader")
    if step >= size:
        return [MicroBatch(data=batch, num_samples=size, share=1.0)]
    bounds = [(start, min(start + step, size)) for start in range(0, size, step)]
    return _shares([(_narrow(batch, a, b, size, batch_dims, "batch"), b - a) for a, b in bounds])


def _shares(parts: Sequence[tuple[Any, int]]) -> list[MicroBatch]:
    total = sum(count for _, count in parts)
    return [
        MicroBatch(data=data, num_samples=count, share=count / total if total else 1 / len(parts))
        for data, count in parts
    ]


def _samples_of(part: Any, batch_dims: Mapping[str, int]) -> int | None:
    """Samples of a micro-batch that was cut elsewhere; None where its tensors don't agree."""
    if isinstance(part, Mapping) and not any(key in batch_dims for key in part):
        sizes = {tensor.shape[0] for tensor in _tensors(part) if tensor.ndim}
        return sizes.pop() if len(sizes) == 1 else None
    return batch_size_of(part, batch_dims)


def _is_array(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0


def _narrow(
    value: Any, start: int, stop: int, size: int, batch_dims: Mapping[str, int], path: str
) -> Any:
    """Samples start..stop of `value`; values that hold no samples (numbers, strings, 0-dim
    tensors) are shared.
    """
    if isinstance(value, Mapping):
        cut = {}
        for key, entry in value.items():
            if key in batch_dims and _is_array(entry):
                cut[key] = _slice(entry, batch_dims[key], start, stop, size, f"{path}[{key!r}]")
            elif _is_array(entry):
                raise ValueError(
                    f"{path}[{key!r}] of shape {tuple(entry.shape)}: its batch dim is not known; "
                    f"pass"
                    f" MegatronStrategy(batch_dims={{{key!r}: 0}}) or give the LightningModule a "
                    f"split_micro_batch hook"
                )
            else:
                cut[key] = _narrow(entry, start, stop, size, batch_dims, f"{path}[{key!r}]")
        return _like(value, cut)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(
            *(_narrow(v, start, stop, size, batch_dims, f"{path}.{i}") for i, v in enumerate(value))
        )
    if isinstance(value, (list, tuple)):
        if len(value) == size and next(_tensors(value), None) is None:
            return type(value)(value[start:stop])  # one entry a sample: texts, numbers
        return type(value)(
            _narrow(v, start, stop, size, batch_dims, f"{path}[{i}]") for i, v in enumerate(value)
        )
    return _slice(value, 0, start, stop, size, path) if _is_array(value) else value


def _like(mapping: Mapping[Any, Any], entries: dict[Any, Any]) -> Mapping[Any, Any]:
    """`entries` in a mapping of the same kind where that can be had (Hugging Face's encodings)."""
    if type(mapping) is dict or not isinstance(mapping, MutableMapping):
        return entries
    same = copy.copy(mapping)
    same.update(entries)
    return same


def _slice(value: Any, dim: int, start: int, stop: int, size: int, path: str) -> Any:
    if value.shape[dim] != size:
        raise ValueError(
            f"{path} of shape {tuple(value.shape)}: dim {dim} has {value.shape[dim]} entries "
            f"where the batch has {size}"
            " samples; pass MegatronStrategy(batch_dims={field: dim}) or a split_micro_batch hook"
        )
    if isinstance(value, np.ndarray):
        return value[(slice(None),) * (dim % value.ndim) + (slice(start, stop),)]
    return value.narrow(dim, start, stop - start)


def join_outputs(outputs: Sequence[Any]) -> Any:
    """Join the predictions of micro-batches: tensors along dim 0, mappings and sequences entry by
    entry.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(outputs)) if first.ndim else torch.stack(list(outputs))
    if isinstance(first, Mapping):
        return {key: join_outputs([output[key] for output in outputs]) for key in first}
    if isinstance(first, tuple):
        return tuple(join_outputs(list(entries)) for entries in zip(*outputs, strict=True))
    if isinstance(first, list):
        return [entry for output in outputs for entry in output]
    return list(outputs)
