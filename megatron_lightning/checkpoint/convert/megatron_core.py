"""The names of a Megatron-Core GPT and those of ours: one table.

Ours follow Megatron-Core, so most rules are about shapes: a gated first layer is stacked in two
halves, the vocabulary is padded, layers may be stacked into one tensor, and Transformer Engine
keeps a norm's weight with the linear layer that follows it.
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
)
"""Names in a checkpoint that are no weights: state of kernels and generators, optimizers."""
MASTERS = ("optimizer.state.fp32_param.", "optimizer.state.param.")
"""What the float32 masters' names begin with, in the formats that keep them by parameter."""
LAYER_NAMES = ("decoder.layers.{layer}.", "decoder.layers.")
"""Each layer by itself, and all of them stacked in one tensor."""
_PREFIXES = ("", "model.", "module.", "model0.")


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
    gated = Unflatten(2) if config.gated_linear_unit else Same()
    layer = "decoder.layers.{layer}."
    for kind in ("weight", "bias"):
        same = (
            f"input_layernorm.{kind}",
            f"self_attention.linear_qkv.{kind}",
            f"self_attention.linear_proj.{kind}",
            f"self_attention.q_layernorm.{kind}",
            f"self_attention.k_layernorm.{kind}",
            f"pre_mlp_layernorm.{kind}",
            f"mlp.linear_fc2.{kind}",
        )
        pairs = [(name, name, Same()) for name in same]
        pairs += [
            (f"mlp.linear_fc1.{kind}", f"mlp.linear_fc1.{kind}", gated),
            (
                f"input_layernorm.{kind}",
                f"self_attention.linear_qkv.layer_norm_{kind}",
                Same(),
            ),
            (f"pre_mlp_layernorm.{kind}", f"mlp.linear_fc1.layer_norm_{kind}", Same()),
        ]
        for ours, theirs, values in pairs:
            for there in LAYER_NAMES:
                rules.append(Rule(ours=layer + ours, theirs=there + theirs, values=values))
        if config.gated_linear_unit:
            fc1 = f"mlp.linear_fc1.{kind}"
            for there in LAYER_NAMES:
                halves = (f"{there}{fc1}_w", f"{there}{fc1}_v")
                rules.append(Rule(ours=layer + fc1, theirs=halves, values=Stacked(2)))
    return rules


def read_weights(folder: Path, config: GPTConfig) -> Renamed:
    """Weights of a `torch_dist` checkpoint by the names of our network, not read yet."""
    return weights_of(read_dcp(folder), config)


def read_model(folder: Path, config: GPTConfig) -> tuple[Renamed, dict[str, LazyTensor]]:
    """Weights, and the float32 masters of those for which the optimizer has some."""
    found = read_dcp(folder)
    for prefix in MASTERS:
        masters = {
            name.removeprefix(prefix): tensor
            for name, tensor in found.tensors.items()
            if name.startswith(prefix)
        }
        if masters:
            return weights_of(found, config), to_ours(gpt_rules(config), masters).tensors
    return weights_of(found, config), {}


def weights_of(found: DcpFolder, config: GPTConfig) -> Renamed:
    """The same of a folder whose table has been read."""
    tensors = dict(found.tensors)
    prefix = next((p for p in _PREFIXES if f"{p}embedding.word_embeddings.weight" in tensors), "")
    bare: Mapping[str, LazyTensor] = {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if not any(fnmatchcase(name, glob) for glob in IGNORED)
    }
    return to_ours(gpt_rules(config), bare)
