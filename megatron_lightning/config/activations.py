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

from megatron_lightning.config.attention_activations import attention_rows
from megatron_lightning.config.expert_activations import expert_rows
from megatron_lightning.config.latent_activations import latent_rows
from megatron_lightning.config.mlp_activations import mlp_rows
from megatron_lightning.config.model import GPTConfig
from megatron_lightning.config.saved_tensors import (
    STATISTIC_BYTES,
    ActivationSizes,
    SavedTensor,
    hidden_input,
    kept_bytes_per_token,
    norm_rows,
)


@functools.lru_cache(maxsize=64)
def layer_rows(
    model: GPTConfig, sizes: ActivationSizes, *, sliding: bool = False, experts: bool = False
) -> tuple[SavedTensor, ...]:
    """Rows of one transformer layer; `sliding`: its window is shorter than the sequence; `experts`:
    it has experts in place of the MLP.
    """
    mlp = expert_rows(model, sizes) if experts else mlp_rows(model, sizes)
    attention = attention_rows if model.latent_attention is None else latent_rows
    rows = attention(model, sizes, sliding=sliding) + mlp
    return tuple(row for row in rows if not (sizes.compiled and row.pointwise))


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
    norm = norm_rows("final_layernorm", model, sizes, hidden, 1 / sizes.split_hidden)
    kept = [hidden_input("final", model, sizes, "final_layernorm"), *norm]
    loss = 8.0 + 1.0 + 1.0 + STATISTIC_BYTES  # target columns, two masks, log sum of exponentials
    return kept_bytes_per_token(kept) + element * hidden + logits + loss, logits


def prediction_bytes_per_token(
    model: GPTConfig, sizes: ActivationSizes, *, sliding: bool = False, recomputed: bool = False
) -> float:
    """What all depths of multi-token prediction keep; `recomputed`: of their layers the inputs
    only.
    """
    element, hidden = sizes.bytes_per_element, model.hidden_size / sizes.split_hidden
    normed = norm_rows("norm", model, sizes, hidden, 1 / sizes.split_hidden)
    inputs = [hidden_input(name, model, sizes, "norm") for name in ("embedded", "before")]
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
