"""Reads the recorded Megatron-Core runs of tests/data/mcore: our config, weights, batches,
results.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_lightning.config import (
    GPTConfig,
    MoEConfig,
    MultiTokenPredictionConfig,
    RotaryConfig,
)

FOLDER = Path(__file__).resolve().parents[1] / "data" / "mcore"
NAMES = ("gpt_absolute", "gpt_rope_swiglu")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One recorded run, by our names and shapes."""

    config: GPTConfig
    state: dict[str, Tensor]
    """Initial weights; a tied head is listed too."""
    tokens: Tensor
    """int64 (steps, micro-batches, B, S)."""
    labels: Tensor
    """int64 (steps, micro-batches, B, S), already shifted."""
    loss_mask: Tensor
    """float32 (steps, micro-batches, B, S)."""
    logits: Tensor
    """Of the first micro-batch with the initial weights: (B, S, V)."""
    token_losses: Tensor | None
    """Of the first micro-batch with the initial weights: (B, S); not with further predictions."""
    gradients: dict[str, Tensor]
    """Of the first step before clipping, for the parameters that are recorded."""
    optimizer: dict[str, Any]
    """lr, min_lr, weight_decay, clip_grad, warmup, decay, style."""
    expected: dict[str, Any]
    """Lists over steps: loss, microbatch_loss, grad_norm, lr."""


def load_case(name: str, folder: Path = FOLDER) -> Case:
    """Read case `name` from `folder`."""
    raw = json.loads((folder / name / "case.json").read_text())
    config = model_config(raw)
    batches = {k: torch.from_numpy(v) for k, v in np.load(folder / name / "batches.npz").items()}
    gradients = dict(np.load(folder / name / "first_gradients.npz").items())
    state = load_file(folder / name / "initial.safetensors")
    return Case(
        config=config,
        state=our_state(config, state),
        tokens=batches["tokens"].long(),
        labels=batches["labels"].long(),
        loss_mask=batches["loss_mask"].float(),
        logits=batches["logits"],
        token_losses=batches.get("token_losses"),
        gradients=stacked(
            {k: our_tensor(config, k, torch.from_numpy(v)) for k, v in gradients.items()}
        ),
        optimizer=raw["optimizer"],
        expected=raw["expected"],
    )


def moe_config(theirs: dict[str, Any]) -> MoEConfig | None:
    """Our experts of a case's TransformerConfig."""
    if not theirs.get("num_moe_experts"):
        return None
    return MoEConfig(
        num_experts=theirs["num_moe_experts"],
        router_topk=theirs["moe_router_topk"],
        ffn_hidden_size=theirs["moe_ffn_hidden_size"],
        load_balancing=theirs["moe_router_load_balancing_type"],
        aux_loss_coeff=theirs["moe_aux_loss_coeff"],
        z_loss_coeff=theirs["moe_z_loss_coeff"],
    )


def prediction_config(theirs: dict[str, Any]) -> MultiTokenPredictionConfig | None:
    """Our further predictions of a case's TransformerConfig."""
    if not theirs.get("mtp_num_layers"):
        return None
    return MultiTokenPredictionConfig(
        num_layers=theirs["mtp_num_layers"], loss_scaling_factor=theirs["mtp_loss_scaling_factor"]
    )


def model_config(raw: dict[str, Any]) -> GPTConfig:
    """Our config of a case's TransformerConfig and GPTModel arguments."""
    theirs, model = raw["config"], raw["model"]
    learned = model["position_embedding_type"] == "learned_absolute"
    return GPTConfig(
        vocab_size=raw["vocab"],
        num_layers=theirs["num_layers"],
        hidden_size=theirs["hidden_size"],
        num_attention_heads=theirs["num_attention_heads"],
        num_query_groups=theirs.get("num_query_groups", 0),
        ffn_hidden_size=theirs.get("ffn_hidden_size", 0),
        max_position_embeddings=raw["seq"],
        norm="rmsnorm" if theirs.get("normalization") == "RMSNorm" else "layernorm",
        norm_epsilon=theirs.get("layernorm_epsilon", 1e-5),
        activation=theirs.get("activation", "gelu"),
        gated_linear_unit=theirs.get("gated_linear_unit", False),
        add_bias_linear=theirs.get("add_bias_linear", True),
        add_qkv_bias=theirs.get("add_qkv_bias", False),
        qk_layernorm=theirs.get("qk_layernorm", False),
        position_embedding="learned" if learned else "rope",
        rotary=RotaryConfig(base=float(model.get("rotary_base", 10000))),
        tie_word_embeddings=model["share_embeddings_and_output_weights"],
        moe=moe_config(theirs),
        multi_token_prediction=prediction_config(theirs),
    )


def our_tensor(config: GPTConfig, name: str, tensor: Tensor) -> Tensor:
    """A Megatron-Core parameter in our shape: a gated fc1 is [2, F, H] instead of [2F, H]."""
    if config.gated_linear_unit and ".linear_fc1." in name:
        return tensor.unflatten(0, (2, -1))
    return tensor


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the experts' tensors, one each, as one: `local_experts.E.` is dim 0."""
    found: dict[str, Tensor] = {}
    experts: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():  # in the order of experts
        if ".local_experts." in name:
            layer, _, rest = name.partition("local_experts.")
            experts.setdefault(layer + rest.partition(".")[2], []).append(tensor)
        else:
            found[name] = tensor
    return found | {name: torch.stack(parts) for name, parts in experts.items()}


def our_state(config: GPTConfig, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A Megatron-Core state dict as a GPTNetwork reads it."""
    ours = stacked({name: our_tensor(config, name, tensor) for name, tensor in state.items()})
    if config.tie_word_embeddings:
        ours["output_layer.weight"] = ours["embedding.word_embeddings.weight"]
    return ours
