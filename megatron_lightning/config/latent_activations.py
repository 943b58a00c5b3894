"""What the half of a layer with latent attention keeps for its backward pass (see
`activations.py`).
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
    norm_input,
    norm_rows,
)

ATTENTION = "self_attention"
CORE = f"{ATTENTION}.core_attention"


def latent_rows(model: GPTConfig, sizes: ActivationSizes, *, sliding: bool) -> list[SavedTensor]:
    """Rows of one layer's half; `sliding`: its window is shorter than the sequence."""
    split = sizes.split_hidden
    hidden, heads = model.hidden_size / split, model.num_attention_heads
    return [
        hidden_input("layer input", model, sizes, "input_layernorm", ("",)),
        *norm_rows("input_layernorm", model, sizes, hidden, 1 / split),
        SavedTensor(
            name="attention statistics",
            bytes_per_token=heads / sizes.tensor_parallel_size * STATISTIC_BYTES,
            kept_by=(CORE,),
        ),
        *_projections(model, sizes),
        *_core_rows(model, sizes, sliding=sliding),
        *branch_norm_rows("post_attention_layernorm", model, sizes),
        *dropout_mask("attention_dropout", model, hidden),
    ]


def _projections(model: GPTConfig, sizes: ActivationSizes) -> list[SavedTensor]:
    """From the normed input to the products that make queries, keys and values."""
    latent, split = model.latent_attention, sizes.split_hidden
    assert latent is not None
    downs = ["linear_kv_down_proj", "linear_q_down_proj" if latent.q_lora_rank else "linear_q_proj"]
    readers = tuple(f"{ATTENTION}.{name}" for name in downs)
    rank = latent.kv_lora_rank / split
    found = [
        SavedTensor(
            name="normed attention input",
            bytes_per_token=sizes.bytes_per_element * (model.hidden_size / split),
            kept_by=readers,
            enters=(ATTENTION, *readers),
        ),
        *_compressed("keys, values and shared key", model, sizes, rank, "kv_layernorm"),
        _to_product("normed keys and values", sizes, rank, "linear_kv_up_proj"),
    ]
    if latent.q_lora_rank:
        size = latent.q_lora_rank / split
        found += [
            *_compressed("queries", model, sizes, size, "q_layernorm"),
            _to_product("normed compressed queries", sizes, size, "linear_q_up_proj"),
        ]
    return found


def _core_rows(model: GPTConfig, sizes: ActivationSizes, *, sliding: bool) -> list[SavedTensor]:
    """What attention itself takes in and gives."""
    latent, element = model.latent_attention, sizes.bytes_per_element
    assert latent is not None
    heads = model.num_attention_heads / sizes.tensor_parallel_size
    query, value = heads * latent.query_dim, heads * latent.v_head_dim
    wide = max(query, value)
    up = element * (heads * (latent.qk_head_dim + latent.v_head_dim))
    found = [_core("queries and keys", element * (2 * wide))]
    if query == value:  # a view of what the projection gives for keys and values
        found.append(_core("values", up))
    else:  # the kernel takes one size
        size = element * (2 * wide)
        found += [
            SavedTensor(name="values", bytes_per_token=up, kept_by=(), enters=(CORE,)),
            SavedTensor(
                name="values and output of one size", bytes_per_token=size, kept_by=(CORE,)
            ),
        ]
    if sliding:
        size = element * (4 * wide)
        found.append(SavedTensor(name="windows", bytes_per_token=size, kept_by=(CORE,)))
    output = f"{ATTENTION}.linear_proj"
    found.append(
        SavedTensor(
            name="attention output",
            bytes_per_token=element * value,
            kept_by=(CORE, output) if query == value else (output,),
            enters=(output,),
        )
    )
    return found


def _compressed(
    name: str, model: GPTConfig, sizes: ActivationSizes, elements: float, norm: str
) -> list[SavedTensor]:
    """What a norm takes in between two projections, and what it keeps itself."""
    path, size = f"{ATTENTION}.{norm}", sizes.bytes_per_element * elements
    return [
        norm_input(f"compressed {name}", size, model, sizes, path),
        *norm_rows(path, model, sizes, elements, 1 / sizes.split_hidden),
    ]


def _to_product(name: str, sizes: ActivationSizes, elements: float, linear: str) -> SavedTensor:
    path, size = f"{ATTENTION}.{linear}", sizes.bytes_per_element * elements
    return SavedTensor(name=name, bytes_per_token=size, kept_by=(path,), enters=(path,))


def _core(name: str, size: float) -> SavedTensor:
    return SavedTensor(name=name, bytes_per_token=size, kept_by=(CORE,), enters=(CORE,))
