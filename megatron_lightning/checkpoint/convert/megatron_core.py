"""The names of a Megatron-Core GPT and those of ours: one table.

Ours follow Megatron-Core, so most rules are about shapes: a gated first layer is stacked in two
halves, the vocabulary is padded, layers may be stacked into one tensor, Transformer Engine keeps a
norm's weight with the linear layer that follows it, and experts are one tensor or one each
(`singleton_local_shards`).
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from megatron_lightning.checkpoint.convert.lazy import LazyTensor
from megatron_lightning.checkpoint.convert.rules import (
    Renamed,
    Rows,
    Rule,
    Same,
    Stacked,
    Unflatten,
    Values,
    to_ours,
)
from megatron_lightning.checkpoint.convert.torch_dcp import DcpFolder, read_dcp
from megatron_lightning.config.model import GPTConfig

IGNORED = (
    "*_extra_state*",
    "rng_state*",
    "rerun_state*",
    "optimizer.*",
    "chained_*",
    "opt_param_*",
    "*.router.local_tokens_per_expert",
    "*.router.global_tokens_per_expert",
    "*.router.ga_steps",
)
"""Names in a checkpoint that are no weights: state of kernels, generators, optimizers; counts."""
LAYER_NAMES = ("decoder.layers.{layer}.", "decoder.layers.")
"""Each layer by itself, and all of them stacked in one tensor."""
_PREDICTION = "mtp.layers.{layer}."
_PREDICTION_LAYERS = ("transformer_layer.", "mtp_model_layer.")
"""How versions call the layer of a depth of multi-token prediction."""
MODEL_PREFIXES = ("", "model.", "module.", "model0.")
"""What holds the model there."""

_Entry = tuple[str, str | tuple[str, ...], Values]
"""Ours, theirs, values: names within a layer."""


def gpt_rules(config: GPTConfig) -> list[Rule]:
    """The table for a GPT of this config; both directions."""
    rules = [
        Rule(ours=name, theirs=name, values=Rows(config.vocab_size))
        for name in ("embedding.word_embeddings.weight", "output_layer.weight")
    ]
    rules += [
        Rule(ours=name, theirs=name)
        for name in (
            "embedding.position_embeddings.weight",
            "decoder.final_layernorm.weight",
            "decoder.final_layernorm.bias",
        )
    ]
    for ours, theirs, values in _layer(config):
        names: tuple[str, ...] = (theirs,) if isinstance(theirs, str) else theirs
        by_itself = any("{expert}" in name for name in names)
        for there in LAYER_NAMES[:1] if by_itself else LAYER_NAMES:
            rules.append(_rule(LAYER_NAMES[0], ours, there, names, values))
        for there in _PREDICTION_LAYERS if config.multi_token_prediction is not None else ():
            within = _PREDICTION + "mtp_model_layer."
            rules.append(_rule(within, ours, _PREDICTION + there, names, values))
    if config.multi_token_prediction is not None:
        parts = ("enorm", "hnorm", "eh_proj", "final_layernorm")
        for part in (f"{part}.{kind}" for part in parts for kind in ("weight", "bias")):
            rules.append(Rule(ours=_PREDICTION + part, theirs=_PREDICTION + part))
    return rules


def _rule(here: str, ours: str, there: str, names: tuple[str, ...], values: Values) -> Rule:
    return Rule(ours=here + ours, theirs=tuple(there + name for name in names), values=values)


def _layer(config: GPTConfig) -> list[_Entry]:
    """A layer with whatever it may have; what isn't there matches nothing."""
    found: list[_Entry] = []
    for kind in ("weight", "bias"):
        same = (
            f"input_layernorm.{kind}",
            f"self_attention.linear_qkv.{kind}",
            f"self_attention.linear_proj.{kind}",
            f"self_attention.q_layernorm.{kind}",
            f"self_attention.k_layernorm.{kind}",
            f"pre_mlp_layernorm.{kind}",
        )
        found += [(name, name, Same()) for name in same]
        found += [
            (f"{norm}.{kind}", f"{linear}.layer_norm_{kind}", Same())
            for norm, linear in (
                ("input_layernorm", "self_attention.linear_qkv"),
                ("pre_mlp_layernorm", "mlp.linear_fc1"),
            )
        ]
        found += _mlp("mlp", kind, config)
    if config.latent_attention is not None:
        found += _latent_attention()
    if config.moe is not None:
        found += _experts(config)
    return found


def _mlp(path: str, kind: str, config: GPTConfig) -> list[_Entry]:
    """The halves of a gated first layer are in one tensor, or apart."""
    fc1, fc2 = f"{path}.linear_fc1.{kind}", f"{path}.linear_fc2.{kind}"
    found: list[_Entry] = [(fc2, fc2, Same())]
    if not config.gated_linear_unit:
        return [*found, (fc1, fc1, Same())]
    return [*found, (fc1, fc1, Unflatten(2)), (fc1, (f"{fc1}_w", f"{fc1}_v"), Stacked(2))]


def _latent_attention() -> list[_Entry]:
    """The norms of the two small vectors are apart, or with the projection that follows."""
    names = [
        *(f"linear_{name}_proj.weight" for name in ("q", "q_down", "q_up", "kv_down", "kv_up")),
        "kv_layernorm.weight",
        "kv_layernorm.bias",
    ]
    found: list[_Entry] = [(f"self_attention.{n}", f"self_attention.{n}", Same()) for n in names]
    found += [
        (
            f"self_attention.{x}_layernorm.{k}",
            f"self_attention.linear_{x}_up_proj.layer_norm_{k}",
            Same(),
        )
        for x in ("q", "kv")
        for k in ("weight", "bias")
    ]
    return found


def _experts(config: GPTConfig) -> list[_Entry]:
    """Router, experts, and what goes beside them."""
    found: list[_Entry] = [
        (f"mlp.router.{name}", f"mlp.router.{name}", Same())
        for name in ("weight", "bias", "expert_bias")
    ]
    found.append(("mlp.shared_expert_gate.weight", "mlp.shared_experts.gate_weight", Same()))
    found += [
        ("mlp.latent_down.weight", "mlp.fc1_latent_proj.weight", Same()),
        ("mlp.latent_up.weight", "mlp.fc2_latent_proj.weight", Same()),
    ]
    for kind in ("weight", "bias"):
        found += _mlp("mlp.shared_experts", kind, config)
        one, each = "mlp.experts.experts.", "mlp.experts.experts.{expert}."
        fc1, fc2 = f"linear_fc1.{kind}", f"linear_fc2.{kind}"
        gated = config.gated_linear_unit
        found += [
            (f"mlp.experts.{fc1}", one + fc1, Unflatten(2, dim=1) if gated else Same()),
            (f"mlp.experts.{fc2}", one + fc2, Same()),
            (f"mlp.experts.{fc2}", each + fc2, Same()),
            (f"mlp.experts.{fc1}", each + fc1, Unflatten(2) if gated else Same()),
        ]
        if gated:
            halves = (f"{each}{fc1}_w", f"{each}{fc1}_v")
            found.append((f"mlp.experts.{fc1}", halves, Stacked(2)))
    return found


def read_weights(folder: Path, config: GPTConfig) -> Renamed:
    """Weights of a `torch_dist` checkpoint by the names of our network, not read yet."""
    return weights_of(read_dcp(folder), config)


def bare_weights(found: DcpFolder) -> dict[str, LazyTensor]:
    """Weights by the names of Megatron-Core's GPTModel, without those of what holds it."""
    tensors = dict(found.tensors)
    prefix = next(
        (p for p in MODEL_PREFIXES if f"{p}embedding.word_embeddings.weight" in tensors), ""
    )
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if not any(fnmatchcase(name, glob) for glob in IGNORED)
    }


def weights_of(found: DcpFolder, config: GPTConfig) -> Renamed:
    """The same of a folder whose table has been read."""
    bare: Mapping[str, LazyTensor] = bare_weights(found)
    return to_ours(gpt_rules(config), bare)
