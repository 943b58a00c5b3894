"""What a forward pass keeps for its backward pass, tensor by tensor, as numbers.

The accounting of Korthikanti et al. (arXiv 2205.05198, section 4.1), adapted to the layers of this
package: a fused attention keeps queries, keys, values, output and one float32 number a row; the
gated unit keeps both halves of its input and the product, and the activated gate unless that is
silu; a norm keeps its input; under sequence parallelism a column-split product keeps its own part
of the sequence only. Every row names the modules whose operations keep it and those that receive
it, so that any choice of recomputed modules follows. Sliding windows are approximate. A test
compares the rows with what autograd really saves.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from megatron_lightning.config.expert_activations import expert_tensors
from megatron_lightning.config.latent_activations import CORE, latent_tensors
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


@functools.lru_cache(maxsize=64)
def layer_rows(
    model: GPTConfig, sizes: ActivationSizes, *, sliding: bool = False, experts: bool = False
) -> tuple[SavedTensor, ...]:
    """Rows of one transformer layer; `sliding`: its window is shorter than the sequence; `experts`:
    it has experts in place of the MLP.
    """
    mlp = _expert_rows(model, sizes) if experts else _mlp_rows(model, sizes)
    attention = _attention_rows if model.latent_attention is None else _latent_rows
    rows = attention(model, sizes, sliding=sliding) + mlp
    return tuple(row for row in rows if not (sizes.compiled and row.pointwise))


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


def _norm_rows(
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


def _hidden(
    name: str, model: GPTConfig, sizes: ActivationSizes, norm: str, enters: tuple[str, ...]
) -> SavedTensor:
    """The input of a norm; one that computes in float32 keeps a copy of its own instead."""
    element = sizes.bytes_per_element
    size = element * model.hidden_size / sizes.split_hidden
    copies = model.norm == "rmsnorm" and not sizes.fused_norm and element < 4
    return SavedTensor(
        name=name, bytes_per_token=size, kept_by=() if copies else (norm,), enters=(norm, *enters)
    )


def _attention_rows(
    model: GPTConfig, sizes: ActivationSizes, *, sliding: bool
) -> list[SavedTensor]:
    element, tensor = sizes.bytes_per_element, sizes.tensor_parallel_size
    hidden = model.hidden_size / sizes.split_hidden
    queries, groups = (
        model.attention_size / tensor,
        model.num_query_groups * model.head_dim / tensor,
    )
    heads = model.num_attention_heads / tensor
    attention, core = "self_attention", "self_attention.core_attention"
    rows = [
        _hidden("layer input", model, sizes, "input_layernorm", ("",)),
        *_norm_rows("input_layernorm", model, sizes, hidden, 1 / sizes.split_hidden),
        SavedTensor(
            name="normed attention input",
            bytes_per_token=element * hidden,
            kept_by=(f"{attention}.linear_qkv",),
            enters=(attention, f"{attention}.linear_qkv"),
        ),
        SavedTensor(  # or what stands for them: rotated queries and keys, and a copy of the values
            name="packed queries, keys, values",
            bytes_per_token=element * (queries + 2 * groups),
            kept_by=(core,),
            enters=(core,),
        ),
        SavedTensor(
            name="attention output",
            bytes_per_token=element * queries,
            kept_by=(core, f"{attention}.linear_proj"),
            enters=(f"{attention}.linear_proj",),
        ),
        SavedTensor(
            name="attention statistics", bytes_per_token=heads * STATISTIC_BYTES, kept_by=(core,)
        ),
    ]
    if model.qk_layernorm:
        for name, width in (("q_layernorm", queries), ("k_layernorm", groups)):
            path = f"{attention}.{name}"
            rows += _norm_rows(path, model, sizes, width, width / model.head_dim)
    blocks = model.attention.sinks or model.attention.score_cap > 0
    if blocks:  # tokens of all samples in a row: copies of queries, keys, values and output
        size = element * queries
        rows.append(
            SavedTensor(name="attention output in a row", bytes_per_token=size, kept_by=(core,))
        )
    else:
        rows += _head_rows(model, element, queries, groups, core)
    if (
        sliding and not blocks
    ):  # each later block of queries reads two windows of repeated keys and values
        rows.append(
            SavedTensor(
                name="windows of keys and values",
                bytes_per_token=element * 4 * queries,
                kept_by=(core,),
            )
        )
    rows += _branch_norm_rows("post_attention_layernorm", model, sizes)
    return rows + _mask("attention_dropout", model, hidden)


def _latent_rows(model: GPTConfig, sizes: ActivationSizes, *, sliding: bool) -> list[SavedTensor]:
    element, split = sizes.bytes_per_element, sizes.split_hidden
    hidden, heads = model.hidden_size / split, model.num_attention_heads
    rows = [
        _hidden("layer input", model, sizes, "input_layernorm", ("",)),
        *_norm_rows("input_layernorm", model, sizes, hidden, 1 / split),
        SavedTensor(
            name="attention statistics",
            bytes_per_token=heads / sizes.tensor_parallel_size * STATISTIC_BYTES,
            kept_by=(CORE,),
        ),
    ]
    for tensor in latent_tensors(
        model, split_hidden=split, tensor_size=sizes.tensor_parallel_size, sliding=sliding
    ):
        copies = tensor.norm is not None and model.norm == "rmsnorm" and not sizes.fused_norm
        rows.append(
            SavedTensor(
                name=tensor.name,
                bytes_per_token=element * tensor.elements,
                kept_by=() if copies and element < 4 else tensor.kept_by,
                enters=tensor.enters,
            )
        )
        if tensor.norm is not None:
            rows += _norm_rows(tensor.norm, model, sizes, tensor.elements, 1 / split)
    rows += _branch_norm_rows("post_attention_layernorm", model, sizes)
    return rows + _mask("attention_dropout", model, hidden)


def _branch_norm_rows(path: str, model: GPTConfig, sizes: ActivationSizes) -> list[SavedTensor]:
    """The norm of what a branch gives, with its input, which nothing else keeps."""
    if not model.stream.branch_norm:
        return []
    hidden = model.hidden_size / sizes.split_hidden
    rows = _norm_rows(path, model, sizes, hidden, 1 / sizes.split_hidden)
    return [_hidden(f"{path} input", model, sizes, path, ()), *rows]


def _head_rows(
    model: GPTConfig, element: int, queries: float, groups: float, core: str
) -> list[SavedTensor]:
    """Queries and keys beside the packed ones, which the values or a norm's input are views of."""
    rotated = model.position_embedding == "rope"
    if rotated and not model.qk_layernorm:
        return []  # nothing keeps the packed ones
    new = rotated or model.qk_layernorm
    copied = new or model.num_query_groups < model.num_attention_heads
    size = (queries + groups if new else queries) if copied else 0.0
    if not size:
        return []
    return [
        SavedTensor(
            name="queries and keys",
            bytes_per_token=element * size,
            kept_by=(core,),
            enters=(core,),
        )
    ]


def _mlp_rows(model: GPTConfig, sizes: ActivationSizes) -> list[SavedTensor]:
    element = sizes.bytes_per_element
    hidden = model.hidden_size / sizes.split_hidden
    width = element * model.ffn_hidden_size / sizes.tensor_parallel_size
    gated = model.gated_linear_unit
    in_product = gated and model.activation == "silu" and model.clamp is None
    by_output = not gated and model.activation == "relu" and not sizes.compiled
    in_activation = ("mlp.activation",) if by_output else ()
    rows = [
        _hidden("hidden between", model, sizes, "pre_mlp_layernorm", ()),
        *_norm_rows("pre_mlp_layernorm", model, sizes, hidden, 1 / sizes.split_hidden),
        SavedTensor(
            name="normed MLP input",
            bytes_per_token=element * hidden,
            kept_by=("mlp.linear_fc1",),
            enters=("mlp", "mlp.linear_fc1"),
        ),
        SavedTensor(
            name="MLP product",
            bytes_per_token=width,
            kept_by=("mlp.linear_fc2", *in_activation),
            enters=("mlp.linear_fc2",),
            made_by="mlp.activation" if in_product else None,
        ),
    ]
    inner = 2 if gated else 0 if by_output else 1
    rows.append(SavedTensor(name="MLP inner", bytes_per_token=width * inner, kept_by=("mlp",)))
    between = gated + (gated and model.activation == "squared_relu")  # gate, and what it came from
    if model.activation == "silu":
        between = 0  # `layers.gated_silu`, `layers.clamped_gate`
    rows.append(
        SavedTensor(
            name="activated gate",
            bytes_per_token=width * between,
            kept_by=("mlp.activation",),
            pointwise=True,
        )
    )
    rows += _branch_norm_rows("post_mlp_layernorm", model, sizes)
    return rows + _mask("mlp_dropout", model, hidden)


def _expert_rows(model: GPTConfig, sizes: ActivationSizes) -> list[SavedTensor]:
    hidden = model.hidden_size / sizes.split_hidden
    found = expert_tensors(
        model,
        element=sizes.bytes_per_element,
        split_hidden=sizes.split_hidden,
        tensor_size=sizes.tensor_parallel_size,
        expert_size=sizes.expert_size,
        expert_tensor_size=sizes.expert_tensor_size,
    )
    return [
        _hidden("hidden between", model, sizes, "pre_mlp_layernorm", ()),
        *_norm_rows("pre_mlp_layernorm", model, sizes, hidden, 1 / sizes.split_hidden),
        *(
            SavedTensor(
                name=tensor.name,
                bytes_per_token=tensor.bytes_per_token,
                kept_by=tensor.kept_by,
                enters=tensor.enters,
            )
            for tensor in found
        ),
        *_branch_norm_rows("post_mlp_layernorm", model, sizes),
        *_mask("mlp_dropout", model, hidden),
    ]


def _mask(path: str, model: GPTConfig, hidden: float) -> list[SavedTensor]:
    if model.hidden_dropout == 0:
        return []
    return [SavedTensor(name=f"{path} mask", bytes_per_token=hidden, kept_by=(path,))]


def embedding_bytes_per_token(model: GPTConfig, sizes: ActivationSizes) -> float:
    """What the embedding keeps: token ids, positions, the mask of its dropout."""
    ids = 8.0 + (9.0 if sizes.tensor_parallel_size > 1 else 0.0)
    positions = 8.0 if model.position_embedding == "learned" else 0.0
    mask = model.hidden_size / sizes.split_hidden if model.hidden_dropout else 0.0
    return ids + positions + mask


def head_bytes_per_token(model: GPTConfig, sizes: ActivationSizes) -> tuple[float, float]:
    """(what final norm, output layer and loss keep, logits included; the logits alone)."""
    element, hidden = sizes.bytes_per_element, model.hidden_size / sizes.split_hidden
    tensor = sizes.tensor_parallel_size
    logits = element * model.padded_vocab_size(tensor) / tensor
    norm = _norm_rows("final_layernorm", model, sizes, hidden, 1 / sizes.split_hidden)
    kept = [_hidden("final", model, sizes, "final_layernorm", ()), *norm]
    loss = 8.0 + 1.0 + 1.0 + STATISTIC_BYTES  # target columns, two masks, log sum of exponentials
    return kept_bytes_per_token(kept) + element * hidden + logits + loss, logits


def prediction_bytes_per_token(
    model: GPTConfig, sizes: ActivationSizes, *, sliding: bool = False, recomputed: bool = False
) -> float:
    """What all depths of multi-token prediction keep; `recomputed`: of their layers the inputs
    only.
    """
    element, hidden = sizes.bytes_per_element, model.hidden_size / sizes.split_hidden
    normed = _norm_rows("norm", model, sizes, hidden, 1 / sizes.split_hidden)
    inputs = [_hidden(name, model, sizes, "norm", ()) for name in ("embedded", "before")]
    experts = model.is_moe_layer(model.num_layers - 1)
    layer = kept_bytes_per_token(layer_rows(model, sizes, sliding=sliding, experts=experts))
    # The norms of both inputs, the joined input of the projection, the layer, and its norm, whose
    # own input stands among what the head keeps.
    inner = kept_bytes_per_token([*inputs, *normed, *normed]) + element * 2 * hidden + layer
    layer_kept = element * 2 * hidden if recomputed else inner
    # What the head's norm would keep again is the output of the norm before, which is one storage.
    head = head_bytes_per_token(model, sizes)[0]
    shared = 0.0 if recomputed or not inputs[1].kept_by else element * hidden
    tokens = embedding_bytes_per_token(model, sizes)
    return model.prediction_depths * (tokens + layer_kept + head - shared)
