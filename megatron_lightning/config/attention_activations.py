"""What the attention half of a layer keeps for its backward pass (see `activations.py`); latent
attention: `latent_activations.py`.
"""

from __future__ import annotations

from megatron_lightning.config.model import GPTConfig
from megatron_lightning.config.saved_tensors import (
    STATISTIC_BYTES,
    ActivationSizes,
    SavedTensor,
    branch_norm_rows,
    dropout_mask,
    hidden_input,
    norm_rows,
)


def attention_rows(model: GPTConfig, sizes: ActivationSizes, *, sliding: bool) -> list[SavedTensor]:
    """Rows of one layer's half; `sliding`: its window is shorter than the sequence."""
    element, tensor = sizes.bytes_per_element, sizes.tensor_parallel_size
    hidden = model.hidden_size / sizes.split_hidden
    queries, groups = (
        model.attention_size / tensor,
        model.num_query_groups * model.head_dim / tensor,
    )
    heads = model.num_attention_heads / tensor
    attention, core = "self_attention", "self_attention.core_attention"
    rows = [
        hidden_input("layer input", model, sizes, "input_layernorm", ("",)),
        *norm_rows("input_layernorm", model, sizes, hidden, 1 / sizes.split_hidden),
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
            rows += norm_rows(path, model, sizes, width, width / model.head_dim)
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
    rows += branch_norm_rows("post_attention_layernorm", model, sizes)
    return rows + dropout_mask("attention_dropout", model, hidden)


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
