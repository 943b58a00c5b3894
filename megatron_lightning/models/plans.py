"""Split tables: what tensor parallelism does to each parameter of a family, and where the pipeline
may cut.

Gradients of whole parameters: those of norms, and of biases added after the sum over tensor ranks,
come from the own part of the sequence under sequence parallelism (SEQUENCE); so do those of learned
positions, whose ids are cut before the lookup. The norms on query and key heads are shared by heads
that are split, so each rank has a part (PARTIAL).
"""

from __future__ import annotations

import math

from megatron_lightning.config.model import GPTConfig
from megatron_lightning.config.parallel import ParallelConfig
from megatron_lightning.config.plan import (
    Gradient,
    ParallelPlan,
    Split,
    column,
    follows,
    replicated,
    row,
    vocabulary,
)
from megatron_lightning.models.moe_plan import dense_mlp_splits, moe_splits

LAYER = "decoder.layers.*"
WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
PREDICTION = "mtp"
"""Module of multi-token prediction, with an embedding that is tied to the first one."""


def gpt_splits(config: GPTConfig) -> dict[str, Split]:
    """Rows for the parameters that a GPTNetwork of this config has."""
    layer = LAYER
    sequence = replicated(Gradient.SEQUENCE)
    splits = {
        WORD_EMBEDDINGS: vocabulary(),
        f"{layer}.input_layernorm.weight": sequence,
        f"{layer}.self_attention.linear_qkv.weight": column(),
        f"{layer}.self_attention.linear_proj.weight": row(),
        f"{layer}.pre_mlp_layernorm.weight": sequence,
        "decoder.final_layernorm.weight": sequence,
        OUTPUT_LAYER: vocabulary(),
    }
    if config.num_moe_layers < config.num_layers:
        splits |= dense_mlp_splits(config, f"{layer}.mlp")
    if config.num_moe_layers:
        splits |= moe_splits(config, f"{layer}.mlp")
    if config.position_embedding == "learned":
        splits["embedding.position_embeddings.weight"] = sequence
    if config.norm == "layernorm":
        for norm in (
            f"{layer}.input_layernorm",
            f"{layer}.pre_mlp_layernorm",
            "decoder.final_layernorm",
        ):
            splits[f"{norm}.bias"] = sequence
    if config.add_bias_linear or config.add_qkv_bias:
        splits[f"{layer}.self_attention.linear_qkv.bias"] = follows()
    if config.add_bias_linear:
        splits[f"{layer}.self_attention.linear_proj.bias"] = sequence
    if config.stream.branch_norm:
        splits[f"{layer}.post_attention_layernorm.*"] = sequence
        splits[f"{layer}.post_mlp_layernorm.*"] = sequence
    if config.attention.sinks:
        splits[f"{layer}.self_attention.sinks"] = follows()
    if config.qk_layernorm:
        splits[f"{layer}.self_attention.[qk]_layernorm.*"] = replicated(Gradient.PARTIAL)
    if config.latent_attention is not None:
        splits |= _latent_splits(config)
        del splits[f"{layer}.self_attention.linear_qkv.weight"]
    if config.multi_token_prediction is not None:
        splits |= _prediction_splits(config, splits)
    return splits


def _latent_splits(config: GPTConfig) -> dict[str, Split]:
    """Rows of latent attention: what is made for all heads together (compression and its norms)
    is whole on every rank and sees the own part of the sequence; projections to heads are split.
    """
    attention, sequence = f"{LAYER}.self_attention", replicated(Gradient.SEQUENCE)
    assert config.latent_attention is not None
    queries = {f"{attention}.linear_q_proj.weight": column()}
    if config.latent_attention.q_lora_rank:
        queries = {
            f"{attention}.linear_q_down_proj.weight": sequence,
            f"{attention}.q_layernorm.*": sequence,
            f"{attention}.linear_q_up_proj.weight": column(),
        }
    return queries | {
        f"{attention}.linear_kv_down_proj.weight": sequence,
        f"{attention}.kv_layernorm.*": sequence,
        f"{attention}.linear_kv_up_proj.weight": column(),
    }


def _prediction_splits(config: GPTConfig, splits: dict[str, Split]) -> dict[str, Split]:
    """Rows of multi-token prediction, whose layers have those of the network's last."""
    layer, sequence = f"{PREDICTION}.layers.*", replicated(Gradient.SEQUENCE)
    inner = f"{layer}.mtp_model_layer"
    rows = {
        name.replace(LAYER, inner): split
        for name, split in splits.items()
        if name.startswith(LAYER) and not name.startswith(f"{LAYER}.mlp.")
    }
    has_experts = config.is_moe_layer(config.num_layers - 1)
    rows |= (moe_splits if has_experts else dense_mlp_splits)(config, f"{inner}.mlp")
    norms = {f"{layer}.{norm}.*": sequence for norm in ("enorm", "hnorm", "final_layernorm")}
    return (
        rows
        | norms
        | {
            f"{layer}.eh_proj.weight": sequence,
            f"{PREDICTION}.{WORD_EMBEDDINGS}": vocabulary(),
        }
    )


def gpt_plan(config: GPTConfig) -> ParallelPlan:
    """How a GPTNetwork may be split and cut."""
    tied = ((WORD_EMBEDDINGS, OUTPUT_LAYER),) if config.tie_word_embeddings else ()
    last: tuple[str, ...] = ("decoder.final_layernorm", "output_layer")
    further: tuple[str, ...] = ()
    if config.multi_token_prediction is not None:
        tied += ((WORD_EMBEDDINGS, f"{PREDICTION}.{WORD_EMBEDDINGS}"),)
        last += (PREDICTION,)
        further = (f"{PREDICTION}.layers",)
    return ParallelPlan(
        splits=gpt_splits(config),
        layers="decoder.layers",
        first=("embedding",),
        last=last,
        further_layers=further,
        tied=tied,
    )


def check_context_heads(config: GPTConfig, parallel: ParallelConfig) -> list[str]:
    """Heads that an all-to-all of the context layout can't share out, as explained sentences."""
    size, forms = parallel.context_parallel_size, parallel.context.forms
    exchanging = {"all_to_all": size, "hierarchical": parallel.context.inner_of(size)}
    problems = []
    for form, ranks in exchanging.items():
        groups, rest = divmod(config.num_query_groups, parallel.tensor_parallel_size)
        if form in forms and size > 1 and rest == 0 and groups % ranks:
            problems.append(
                f"context form {form!r}: all_to_all over {ranks} ranks can't share the key/value"
                f" heads of a tensor rank, num_query_groups={config.num_query_groups} /"
                f" tensor_parallel_size={parallel.tensor_parallel_size} = {groups}; use ring or"
                f" all_gather, or a size that divides {groups}"
            )
    return problems


def check_tensor_parallel(config: GPTConfig, tensor_parallel_size: int) -> list[str]:
    """Sizes that `tensor_parallel_size` must divide and does not, as sentences with field, value
    and remedy.
    """
    sizes = {"num_query_groups": config.num_query_groups, "ffn_hidden_size": config.ffn_hidden_size}
    common = math.gcd(*sizes.values())
    fits = [n for n in range(1, 2 * tensor_parallel_size + 1) if common % n == 0]
    problems = []
    for field, value in sizes.items():
        if value % tensor_parallel_size:
            problems.append(
                f"tensor_parallel_size={tensor_parallel_size} does not divide {field}={value};"
                f" use one of {fits}, or change {field}"
            )
    return problems
