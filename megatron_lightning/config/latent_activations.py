"""What latent attention keeps for its backward pass, between the norm before it and the sum behind
it (see `config/activations.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lightning.config.model import GPTConfig

ATTENTION = "self_attention"
CORE = f"{ATTENTION}.core_attention"


@dataclass(frozen=True, kw_only=True)
class LatentTensor:
    """As `activations.SavedTensor`."""

    name: str
    elements: float
    """On one rank, for each token."""
    kept_by: tuple[str, ...]
    enters: tuple[str, ...] = ()
    norm: str | None = None
    """The norm that it is the input of, whose own rows are to be added."""


def latent_tensors(
    model: GPTConfig, *, split_hidden: int, tensor_size: int, sliding: bool
) -> list[LatentTensor]:
    """Rows of one layer but for the numbers that attention keeps for each row.

    `split_hidden`: ranks over which the sequence is split between products; `tensor_size`: those
    that share the heads.
    """
    latent = model.latent_attention
    assert latent is not None
    heads = model.num_attention_heads / tensor_size
    rank = latent.kv_lora_rank / split_hidden
    downs = ["linear_kv_down_proj", "linear_q_down_proj" if latent.q_lora_rank else "linear_q_proj"]
    readers = tuple(f"{ATTENTION}.{name}" for name in downs)
    found = [
        LatentTensor(
            name="normed attention input",
            elements=model.hidden_size / split_hidden,
            kept_by=readers,
            enters=(ATTENTION, *readers),
        ),
        _to_norm("compressed keys, values and shared key", rank, "kv_layernorm"),
        _to_product("normed keys and values", rank, "linear_kv_up_proj"),
    ]
    if latent.q_lora_rank:
        size = latent.q_lora_rank / split_hidden
        found += [
            _to_norm("compressed queries", size, "q_layernorm"),
            _to_product("normed compressed queries", size, "linear_q_up_proj"),
        ]
    query, value = heads * latent.query_dim, heads * latent.v_head_dim
    wide = max(query, value)
    found.append(_core("queries and keys", 2 * wide))
    if query == value:  # a view of what the projection gives for keys and values
        found.append(_core("values", heads * (latent.qk_head_dim + latent.v_head_dim)))
    else:  # the kernel takes one size
        up = heads * (latent.qk_head_dim + latent.v_head_dim)
        found += [
            LatentTensor(name="values", elements=up, kept_by=(), enters=(CORE,)),
            LatentTensor(name="values and output of one size", elements=2 * wide, kept_by=(CORE,)),
        ]
    if sliding:
        found.append(LatentTensor(name="windows", elements=4 * wide, kept_by=(CORE,)))
    output = f"{ATTENTION}.linear_proj"
    kept_by = (CORE, output) if query == value else (output,)
    found.append(
        LatentTensor(name="attention output", elements=value, kept_by=kept_by, enters=(output,))
    )
    return found


def _to_norm(name: str, elements: float, norm: str) -> LatentTensor:
    path = f"{ATTENTION}.{norm}"
    return LatentTensor(name=name, elements=elements, kept_by=(path,), enters=(path,), norm=path)


def _to_product(name: str, elements: float, linear: str) -> LatentTensor:
    path = f"{ATTENTION}.{linear}"
    return LatentTensor(name=name, elements=elements, kept_by=(path,), enters=(path,))


def _core(name: str, elements: float) -> LatentTensor:
    return LatentTensor(name=name, elements=elements, kept_by=(CORE,), enters=(CORE,))
