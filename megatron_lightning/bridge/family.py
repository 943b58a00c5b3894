"""What an architecture of transformers is: the fields of its config and its table of tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, ClassVar

from megatron_lightning.bridge.mapping import Rule
from megatron_lightning.bridge.source_config import ACTIVATIONS, SourceConfig
from megatron_lightning.config.model import GPTConfig

TRAINING_FIELDS = (
    "attention_dropout",
    "hidden_dropout",
    "init_method_std",
    "label_smoothing",
    "make_vocab_size_divisible_by",
)
"""Fields of a GPTConfig that change no logits of a given set of weights."""

TRAINING_MOE_FIELDS = (
    "load_balancing",
    "aux_loss_coeff",
    "z_loss_coeff",
    "expert_bias_update_rate",
    "input_jitter",
    "router_dtype",
)
"""The same of its MoEConfig."""

TOKEN_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")


class Family(ABC):
    """One architecture. Subclasses are tables: no state, no tensors."""

    model_type: ClassVar[str]
    """`model_type` in config.json."""
    architecture: ClassVar[str]
    """Class of transformers, for `architectures` in config.json."""
    prefix: ClassVar[str] = "model."
    """In front of the names of all tensors but the head's; files of the bare model lack it."""
    ignored: ClassVar[tuple[str, ...]] = ("*rotary_emb.inv_freq",)
    """Globs over names of tensors that hold nothing which isn't computed from the config."""
    word_embeddings: ClassVar[str] = "model.embed_tokens.weight"
    output_layer: ClassVar[str] = "lm_head.weight"

    @abstractmethod
    def read(self, source: SourceConfig) -> GPTConfig:
        """Our config. ValueError names what is missing or not supported."""

    @abstractmethod
    def write(self, config: GPTConfig) -> dict[str, Any]:
        """The fields of config.json that say the same; what they can't say is lost (`expresses`
        finds out).
        """

    @abstractmethod
    def rules(self, config: GPTConfig) -> Sequence[Rule]:
        """The table of tensors."""

    def left_out(self, config: GPTConfig, name: str) -> bool:
        """Whether a tensor of a file belongs to no parameter here and may be passed by."""
        return False

    def stays_float32(self, name: str) -> bool:
        """Whether a tensor there is float32 whatever dtype the model has."""
        return False

    def config_json(self, config: GPTConfig) -> dict[str, Any]:
        """A whole config.json but for the dtype, in the spelling that transformers 4.x and 5.x
        read.
        """
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **self.write(config),
            "initializer_range": config.init_method_std,
            **dict.fromkeys(TOKEN_FIELDS),  # else a reader takes those of the published model
        }

    def expresses(self, config: GPTConfig) -> str | None:
        """Why this architecture isn't the network of `config`; None if it is."""
        try:
            back = self.read(SourceConfig(self.config_json(config), self.model_type))
        except ValueError as error:
            return str(error)
        return difference(config, back)


def difference(ours: GPTConfig, theirs: GPTConfig) -> str | None:
    """The fields in which two configs give different networks, as text; None if there are none."""
    mine, other = computed_fields(ours), computed_fields(theirs)
    found = [f"{k}={mine[k]!r} (not {other[k]!r})" for k in mine if mine[k] != other[k]]
    return ", ".join(found) or None


def computed_fields(config: GPTConfig) -> dict[str, Any]:
    """Fields that decide what the network computes, in one form for configs that mean the same."""
    fields = {k: v for k, v in config.to_dict().items() if k not in TRAINING_FIELDS}
    fields["rotary"] = config.rotary if config.position_embedding == "rope" else None
    del fields["window_size"], fields["window_pattern"]
    fields["windows"] = [config.window_of(layer) for layer in range(config.num_layers)]
    fields["add_qkv_bias"] = config.add_qkv_bias or config.add_bias_linear
    fields["moe"] = _computed_moe(config)
    fields["multi_token_prediction"] = config.prediction_depths
    if config.num_moe_layers == config.num_layers:
        fields["ffn_hidden_size"] = None  # of a dense MLP, which there is none of
    local = config.attention.local_rotary
    fields["attention"] = {
        **fields["attention"],
        "scale_dim": config.attention.scale_dim or config.head_dim,
        "local_rotary": local if any(fields["windows"]) and local != config.rotary else None,
    }
    return fields


def _computed_moe(config: GPTConfig) -> dict[str, Any] | None:
    """The same of experts: which layers have them, and nothing of what only balances load."""
    moe = config.moe
    if moe is None or not config.num_moe_layers:
        return None
    fields = {k: v for k, v in asdict(moe).items() if k not in TRAINING_MOE_FIELDS}
    del fields["first_dense_layers"], fields["layer_pattern"]
    fields["layers"] = [config.is_moe_layer(layer) for layer in range(config.num_layers)]
    fields["ffn_hidden_size"] = moe.ffn_hidden_size or config.ffn_hidden_size
    if moe.router_score_function == "softmax" and moe.router_normalize_topk:
        fields["router_pre_softmax"] = False  # divided by their sum they are the same
    if moe.load_balancing in ("sinkhorn", "forced"):
        fields["load_balancing"] = moe.load_balancing
    groups = moe.router_num_groups if moe.router_num_groups > 1 else 0
    fields["router_num_groups"] = groups
    best = moe.router_group_best or moe.router_topk // max(1, moe.router_group_topk)
    fields["router_group_best"] = best if groups else 0
    fields["router_group_topk"] = moe.router_group_topk if groups else 0
    return fields


def activation_name(config: GPTConfig) -> str:
    """The name there of our activation."""
    names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    return names[config.activation]
