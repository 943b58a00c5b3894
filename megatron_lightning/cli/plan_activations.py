"""Bytes that one chunk of a pipeline rank keeps for a micro-batch, and works with."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lightning.cli.plan_quantized import QuantizedLayer, quantized_layers
from megatron_lightning.cli.plan_request import PlanRequest
from megatron_lightning.config.activations import (
    embedding_bytes_per_token,
    head_bytes_per_token,
    layer_rows,
    prediction_bytes_per_token,
)
from megatron_lightning.config.model import GPTConfig
from megatron_lightning.config.moe import expert_width
from megatron_lightning.config.recompute import RecomputeConfig
from megatron_lightning.config.rounded_inputs import RoundedInputs, with_rounded_inputs
from megatron_lightning.config.saved_tensors import ActivationSizes, kept_bytes_per_token
from megatron_lightning.parallel.pipeline import ChunkUnits
from megatron_lightning.precision.policy import policy_for
from megatron_lightning.runtime.recompute import name_matches

LOSS_SLICE_BYTES = 2 * 4 * (1 << 25)
"""Float32 copies of a slice of the logits (`layers/loss.py`): two at a time."""

LAYER_MODULES = (
    "",
    "input_layernorm",
    "self_attention",
    "self_attention.linear_qkv",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "self_attention.linear_q_proj",
    "self_attention.linear_q_down_proj",
    "self_attention.linear_q_up_proj",
    "self_attention.linear_kv_down_proj",
    "self_attention.kv_layernorm",
    "self_attention.linear_kv_up_proj",
    "self_attention.core_attention",
    "self_attention.linear_proj",
    "post_attention_layernorm",
    "attention_dropout",
    "pre_mlp_layernorm",
    "mlp",
    "mlp.linear_fc1",
    "mlp.activation",
    "mlp.linear_fc2",
    "mlp.router",
    "mlp.experts",
    "mlp.shared_experts",
    "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.linear_fc2",
    "post_mlp_layernorm",
    "mlp_dropout",
)
"""Paths within a layer that selective recompute may name."""


@dataclass(frozen=True, kw_only=True)
class ChunkActivations:
    """Of one micro-batch in one chunk, in bytes on one rank."""

    kept: float
    """From its forward to its backward."""
    host: float
    """The same in CPU memory (offload)."""
    forward: float
    """Most that a forward works with besides."""
    backward: float
    """Most that a backward works with besides, recomputed layers included."""
    split_backward: float
    """The same of one that puts off weight gradients, what it leaves for them included."""
    waiting: float
    """What it leaves for them beyond `kept`, or less than that if negative."""


def chunk_activations(request: PlanRequest, chunk: ChunkUnits) -> ChunkActivations:
    """Estimate one chunk."""
    model, config = request.model, request.parallel
    sizes = activation_sizes(request)
    tokens = request.micro_batch_size * -(-request.seq_length // config.context_parallel_size)
    quantized = quantized_layers(request)
    rounded = [quantized[layer].inputs for layer in chunk.layers]
    whole = [
        tokens * _kept(model, sizes, *_kind(request, layer), (), inputs)
        for layer, inputs in zip(chunk.layers, rounded, strict=True)
    ]
    kept, again = _layers_kept(request, chunk.layers, whole, rounded, tokens, sizes)
    host, device = 0.0, kept
    if config.recompute.offload:  # two layers are on their way at a time
        host, kept = kept, min(kept, 2 * kept / max(1, len(chunk.layers)))
        device = kept
        again = max([again, *(whole if config.recompute.mode == "full" else ())])
    waiting = _put_off(request, chunk.layers, whole, device, tokens, sizes, quantized)
    if chunk.has_embedding:
        kept += tokens * embedding_bytes_per_token(model, sizes)
    working = tokens * _working_bytes_per_token(request, sizes)
    layer_backward, split_backward = again + working, max(again, waiting) + working
    if not chunk.has_head:
        return ChunkActivations(
            kept=kept,
            host=host,
            forward=0.0,
            backward=layer_backward,
            split_backward=split_backward,
            waiting=waiting,
        )
    of_head, logits = (tokens * size for size in head_bytes_per_token(model, sizes))
    of_head += tokens * prediction_bytes_per_token(
        model,
        sizes,
        sliding=_kind(request, model.num_layers - 1)[0],
        recomputed=config.recompute.mode == "full",
    )
    loss_slices = min(LOSS_SLICE_BYTES, 2 * logits * 4 / sizes.bytes_per_element)
    # First the loss makes the logits' gradient, over the logits unless FSDP2's hooks may hold them;
    # then the output layer's weight gets its own, in place where products add to sums themselves.
    sharded = config.data_parallel.sharding == "fsdp"
    apart = logits if sharded else 0.0
    in_sum = config.data_parallel.fuse_weight_gradients and not sharded
    weight = model.padded_vocab_size(sizes.tensor_parallel_size) * model.hidden_size
    weight_gradient = weight / sizes.tensor_parallel_size * sizes.bytes_per_element * (not in_sum)
    head_backward = max(apart + loss_slices, weight_gradient)
    gone = 0.0 if config.pipeline.defer_head_gradient else of_head
    return ChunkActivations(
        kept=kept + of_head,
        host=host,
        forward=loss_slices,
        backward=max(head_backward, layer_backward - of_head),
        split_backward=max(head_backward, split_backward - gone),
        waiting=waiting - gone,
    )


def activation_sizes(request: PlanRequest) -> ActivationSizes:
    """The request as the rows of `config.activations` want it."""
    config = request.parallel
    return ActivationSizes(
        tensor_parallel_size=config.tensor_parallel_size,
        sequence_parallel=config.sequence_parallel,
        bytes_per_element=policy_for(request.precision).params_dtype.itemsize,
        expert_size=config.expert_parallel_size,
        expert_tensor_size=config.expert_tensor_size,
        compiled=config.runtime.compile_layers,
    )


def recomputed_paths(config: RecomputeConfig, layer: int) -> tuple[str, ...]:
    """Paths within layer number `layer` that selective recompute covers."""
    return _matching(tuple(config.modules), layer) if config.mode == "selective" else ()


@functools.lru_cache(maxsize=1024)
def _matching(globs: tuple[str, ...], layer: int) -> tuple[str, ...]:
    name = f"decoder.layers.{layer}"
    paths = [f"{name}.{path}" if path else name for path in LAYER_MODULES]
    found = [path for path in paths if any(name_matches(path, glob) for glob in globs)]
    return tuple(path.removeprefix(name).removeprefix(".") for path in found)


@functools.lru_cache(maxsize=256)
def _kept(
    model: GPTConfig,
    sizes: ActivationSizes,
    sliding: bool,
    experts: bool,
    recomputed: tuple[str, ...],
    rounded: RoundedInputs = (),
) -> float:
    rows = layer_rows(model, sizes, sliding=sliding, experts=experts)
    rows = with_rounded_inputs(rows, rounded, sizes.bytes_per_element)
    return kept_bytes_per_token(rows, recomputed)


def _put_off(
    request: PlanRequest,
    layers: Sequence[int],
    whole: Sequence[float],
    kept: float,
    tokens: int,
    sizes: ActivationSizes,
    quantized: Sequence[QuantizedLayer],
) -> float:
    """Bytes beyond `kept` (less, if negative) of what a split backward leaves for later."""
    # The factors of a layer's products weigh as much as all that it keeps without recompute.
    # Products in low precision, but for some of experts, are not put off.
    if not any(quantized[layer].inputs for layer in layers):
        return max(0.0, sum(whole) - kept)
    factors = 0.0
    for layer in layers:
        share = 1.0 - quantized[layer].share_at_once
        factors += share * tokens * _kept(request.model, sizes, *_kind(request, layer), ())
    return factors - kept


def _layers_kept(
    request: PlanRequest,
    layers: Sequence[int],
    whole: Sequence[float],
    rounded: Sequence[RoundedInputs],
    tokens: int,
    sizes: ActivationSizes,
) -> tuple[float, float]:
    """(bytes kept, most that a recomputation brings back at once)."""
    config = request.parallel.recompute
    entry = tokens * sizes.bytes_per_element * request.model.hidden_size / sizes.split_hidden
    if not layers:
        return 0.0, 0.0
    if config.mode == "full" and config.method == "uniform":
        groups = -(-len(layers) // config.num_layers)
        return groups * entry, min(config.num_layers, len(layers)) * max(whole)
    if config.mode == "full":
        again = min(config.num_layers, len(layers))
        # The last layers' backward comes first; when the block's turn is there, they are gone.
        rest = sum(whole[again:])
        return again * entry + rest, max(0.0, whole[0] - rest)
    kept = 0.0
    back = 0.0
    for layer, all_of_it, inputs in zip(layers, whole, rounded, strict=True):
        paths = recomputed_paths(config, layer)
        remaining = tokens * _kept(request.model, sizes, *_kind(request, layer), paths, inputs)
        kept += remaining
        back = max(back, all_of_it - remaining)
    return kept, back


def _kind(request: PlanRequest, layer: int) -> tuple[bool, bool]:
    """(whether the layer's window slides, whether it has experts)."""
    moe = request.model.moe
    slides = 0 < request.model.window_of(layer) < request.seq_length
    return slides, moe is not None and moe.is_moe_layer(layer)


def _working_bytes_per_token(request: PlanRequest, sizes: ActivationSizes) -> float:
    """Gradients inside one layer's MLP, the widest part: those of both halves, apart and joined,
    less what is used up by then.
    """
    model = request.model
    width = model.ffn_hidden_size / sizes.tensor_parallel_size
    if model.moe is not None:  # rows of experts; those that come in and go out beside them
        rows = model.moe.router_topk * sizes.expert_tensor_size / sizes.tensor_parallel_size
        columns = expert_width(model) / sizes.expert_tensor_size
        width = max(width, rows * (columns + model.hidden_size / 2))
    inside = 3 * width if model.gated_linear_unit else width
    return sizes.bytes_per_element * (inside + 2 * model.hidden_size / sizes.split_hidden)
