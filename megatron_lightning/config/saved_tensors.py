"""What is kept for the backward pass as rows: one for each storage, with who keeps it and whom it
enters, so that any choice of recomputed modules follows.

Rows that every part of a layer has, those of norms and dropout, stand here too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from megatron_lightning.config.model import GPTConfig

STATISTIC_BYTES = 4
"""Float32 numbers that norms and attention keep for each row."""


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """One storage that a layer keeps."""

    name: str
    bytes_per_token: float
    """On one rank, for each token of the micro-batch that this context rank holds."""
    kept_by: tuple[str, ...]
    """Modules, as paths within the layer, whose operations save it; "" is the layer itself."""
    enters: tuple[str, ...] = ()
    """Modules that it is an input of. Recomputing these keeps it."""
    pointwise: bool = False
    """A compiled layer computes it again from other rows instead of keeping it: the activated gate.
    (Inputs of products are kept, also where they could be computed again.)"""
    made_by: str | None = None
    """Module whose output it is, and which, if it is recomputed, makes it again for whoever keeps
    it."""


@dataclass(frozen=True, kw_only=True)
class ActivationSizes:
    """Everything that decides the rows besides the model."""

    tensor_parallel_size: int = 1
    sequence_parallel: bool = False
    bytes_per_element: int = 2
    """Of activations: 2 for bfloat16, 4 for float32."""
    fused_norm: bool = True
    """RMSNorm is one kernel (CUDA). False: float32 arithmetic of its own (CPU), keeping more."""
    expert_size: int = 1
    expert_tensor_size: int = 1
    """Ranks that a layer's experts are dealt to, and that share the columns of one."""
    compiled: bool = False
    """Layers are compiled: what is cheap to compute again is not kept."""

    @property
    def split_hidden(self) -> int:
        """Ranks over which the hidden state's sequence is split between the products."""
        return self.tensor_parallel_size if self.sequence_parallel else 1


def kept_bytes_per_token(rows: Iterable[SavedTensor], recomputed: Collection[str] = ()) -> float:
    """Bytes that remain when the modules at these paths (within the layer) are recomputed."""

    def inside(path: str) -> bool:
        return any(path == m or path.startswith(f"{m}.") or m == "" for m in recomputed)

    return sum(
        row.bytes_per_token
        for row in rows
        if row.made_by not in recomputed
        and (
            any(not inside(path) for path in row.kept_by)
            or any(
                path in recomputed and not _within_other(path, recomputed) for path in row.enters
            )
        )
    )


def _within_other(path: str, recomputed: Collection[str]) -> bool:
    """A region inside another one adds nothing to what the outer one keeps."""
    return any(m != path and (m == "" or path.startswith(f"{m}.")) for m in recomputed)


def norm_rows(
    path: str, model: GPTConfig, sizes: ActivationSizes, elements: float, heads: float
) -> list[SavedTensor]:
    """A norm over `heads` rows of together `elements` a token, without its input."""
    statistics = heads * STATISTIC_BYTES * (2 if model.norm == "layernorm" else 1)
    rows = [SavedTensor(name=f"{path} statistics", bytes_per_token=statistics, kept_by=(path,))]
    if model.norm == "rmsnorm" and not sizes.fused_norm:
        copies = 2 if sizes.bytes_per_element < 4 else 1  # of low precision, the input in float32
        inner = (copies - model.stream.zero_centered_norm) * 4 * elements
        rows.append(SavedTensor(name=f"{path} inner", bytes_per_token=inner, kept_by=(path,)))
    if model.stream.zero_centered_norm:  # normed, then multiplied by 1 + weight
        size = sizes.bytes_per_element * elements
        rows.append(
            SavedTensor(
                name=f"{path} normed", bytes_per_token=size, kept_by=(path,), pointwise=True
            )
        )
    return rows


def norm_input(
    name: str,
    size: float,
    model: GPTConfig,
    sizes: ActivationSizes,
    norm: str,
    enters: tuple[str, ...] = (),
) -> SavedTensor:
    """The input of a norm, of `size` bytes a token; one that computes in float32 keeps a copy of
    its own instead.
    """
    copies = model.norm == "rmsnorm" and not sizes.fused_norm and sizes.bytes_per_element < 4
    return SavedTensor(
        name=name, bytes_per_token=size, kept_by=() if copies else (norm,), enters=(norm, *enters)
    )


def hidden_input(
    name: str, model: GPTConfig, sizes: ActivationSizes, norm: str, enters: tuple[str, ...] = ()
) -> SavedTensor:
    """The hidden state as the input of a norm."""
    size = sizes.bytes_per_element * model.hidden_size / sizes.split_hidden
    return norm_input(name, size, model, sizes, norm, enters)


def branch_norm_rows(path: str, model: GPTConfig, sizes: ActivationSizes) -> list[SavedTensor]:
    """The norm of what a branch gives, with its input, which nothing else keeps."""
    if not model.stream.branch_norm:
        return []
    hidden = model.hidden_size / sizes.split_hidden
    rows = norm_rows(path, model, sizes, hidden, 1 / sizes.split_hidden)
    return [hidden_input(f"{path} input", model, sizes, path), *rows]


def dropout_mask(path: str, model: GPTConfig, hidden: float) -> list[SavedTensor]:
    """What dropout of a hidden state keeps, `hidden` elements a token."""
    if model.hidden_dropout == 0:
        return []
    return [SavedTensor(name=f"{path} mask", bytes_per_token=hidden, kept_by=(path,))]
