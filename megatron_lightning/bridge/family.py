"""What an architecture of transformers is: the fields of its config and its table of tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
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
    local = config.attention.local_rotary
    fields["attention"] = {
        **fields["attention"],
        "scale_dim": config.attention.scale_dim or config.head_dim,
        "local_rotary": local if any(fields["windows"]) and local != config.rotary else None,
    }
    return fields


def activation_name(config: GPTConfig) -> str:
    """The name there of our activation."""
    names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    return names[config.activation]
