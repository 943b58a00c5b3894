"""Reading a model's `config.json` without guesses.

A field that has to be there and isn't is an error that names it, and so is a field that nobody
asked for: what isn't understood may change what the model computes. Rope comes in two spellings:
`rope_theta`, `rope_scaling`, `partial_rotary_factor` (transformers 4.x) and `rope_parameters`
(5.x).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megatron_lightning.config.rotary import RotaryConfig

_INERT = """
_attn_implementation _commit_hash _name_or_path architectures attn_implementation auto_map
bad_words_ids begin_suppress_tokens chunk_size_feed_forward diversity_penalty do_sample dtype
early_stopping encoder_no_repeat_ngram_size experimental exponential_decay_length_penalty
finetuning_task id2label initializer_range is_decoder is_encoder_decoder
keys_to_ignore_at_inference label2id length_penalty max_length max_new_tokens min_length model_type
no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences output_attentions
output_hidden_states output_scores prefix pretraining_tp problem_type remove_invalid_values
repetition_penalty return_dict return_dict_in_generate suppress_tokens task_specific_params
temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript transformers_version
typical_p use_bfloat16 use_cache use_return_dict
"""
INERT = frozenset(_INERT.split())
"""Fields without an effect on the logits. `pretraining_tp` splits a product and sums it up
again."""
_ROPE_KINDS = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"),
    ),
}
"""Kind -> fields that it needs, fields whose absence has a defined meaning."""
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "squared_relu",
}


class SourceConfig:
    """The fields of one config.json, and which of them have been asked for."""

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        self.values, self.origin = dict(values), origin
        self._read: set[str] = set()

    def refuse(self, field: str, why: str) -> ValueError:
        """The error for a field that can't be followed."""
        return ValueError(f"{self.origin}: {field}={self.values.get(field)!r}: {why}")

    def need(self, field: str, kind: type | tuple[type, ...] = int) -> Any:
        """A field that has to be there."""
        value = self.get(field)
        if value is None:
            raise ValueError(
                f"{self.origin}: {field} is missing, and no value is guessed for it; add it to the"
                f" file, or pass overrides={{{field!r}: ...}}"
            )
        return self._typed(field, value, kind)

    def get(self, field: str, default: Any = None) -> Any:
        """A field, or `default` where it is missing or null: for what the format derives."""
        self._read.add(field)
        value = self.values.get(field)
        return default if value is None else value

    def number(self, field: str, default: Any = None) -> Any:
        """A number or None."""
        value = self.get(field, default)
        return value if value is None else self._typed(field, value, (int, float))

    def flag(self, field: str, default: bool) -> bool:
        """A boolean; `default` is what the format says of its absence."""
        return self._typed(field, self.get(field, default), bool)

    def only(self, field: str, allowed: Collection[Any], part: str) -> None:
        """Refuse any value but these; `part` says what a network would need for others."""
        if self.get(field) not in (None, *allowed):
            raise self.refuse(field, f"{part} is not supported")

    def activation(self, field: str) -> Any:
        """Our name of the activation."""
        name = self.need(field, str)
        if name not in ACTIVATIONS:
            raise self.refuse(field, f"unknown activation; supported are {sorted(ACTIVATIONS)}")
        return ACTIVATIONS[name]

    def stated(self, field: str) -> Any:
        """A field that has to be there and may be null."""
        if field not in self.values:
            self.need(field)
        return self.number(field)

    def rope(self, layers: str | None = None) -> RotaryConfig:
        """The rotary embedding, from either spelling. `layers`: the type of layers whose it is,
        where `rope_parameters` tell them apart.
        """
        given = self._rope_fields(layers)
        kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
        given.pop("type", None)
        if kind not in _ROPE_KINDS:
            raise ValueError(
                f"{self.origin}: rope kind {kind!r} is not supported; supported are"
                f" {sorted(_ROPE_KINDS)}"
            )
        base, percent = given.pop("rope_theta", None), given.pop("partial_rotary_factor", None)
        if base is None:
            raise ValueError(
                f"{self.origin}: rope_theta, the base of the rotary frequencies, is missing, and no"
                " value is guessed for it; add it to the file, or pass"
                " overrides={'rope_theta': ...}"
            )
        needed, optional = _ROPE_KINDS[kind]
        original = self.get("original_max_position_embeddings")
        if original is not None and "original_max_position_embeddings" in needed:
            given["original_max_position_embeddings"] = original  # as transformers: it goes first
        if missing := [name for name in needed if given.get(name) is None]:
            raise ValueError(f"{self.origin}: rope kind {kind!r} needs {missing}")
        used = {k: given[k] for k in (*needed, *optional) if given.get(k) is not None}
        unknown = sorted(k for k, v in given.items() if k not in used and v is not None)
        if unknown and kind != "default":
            raise ValueError(f"{self.origin}: rope kind {kind!r} with unknown fields {unknown}")
        if kind == "yarn":
            used |= self._yarn_scales(used)
        scaling: Any = "plain" if kind == "default" else kind
        return RotaryConfig(
            base=float(base), percent=1.0 if percent is None else percent, scaling=scaling, **used
        )

    def _yarn_scales(self, used: Mapping[str, Any]) -> dict[str, float]:
        """Transformers takes the two scales together only, and their absence as 1 and 0."""
        both = used.get("mscale") and used.get("mscale_all_dim")
        return {} if both else {"mscale": 1.0, "mscale_all_dim": 0.0}

    def tells_ropes_apart(self) -> bool:
        """Whether `rope_parameters` hold one rotary embedding for each type of layers."""
        found = self.get("rope_parameters")
        return isinstance(found, Mapping) and any(isinstance(x, Mapping) for x in found.values())

    def _rope_fields(self, layers: str | None) -> dict[str, Any]:
        new, old = self.get("rope_parameters"), self.get("rope_scaling")
        if layers is not None and self.tells_ropes_apart():
            if layers not in new:
                raise self.refuse("rope_parameters", f"{layers!r} is missing")
            new = new[layers]
        top = {name: self.get(name) for name in ("rope_theta", "partial_rotary_factor")}
        for name, value in (("rope_parameters", new), ("rope_scaling", old)):
            if value is None:
                continue
            if not isinstance(value, Mapping):
                raise self.refuse(name, "not a mapping")
            if any(isinstance(entry, Mapping) for entry in value.values()):
                raise self.refuse(
                    name, "different rotary frequencies in different layers are not supported"
                )
        given = {**(old or {}), **(new or {})}
        for name, value in top.items():
            if value is not None:
                if given.get(name) not in (None, value):
                    raise self.refuse(name, f"rope_parameters say {given[name]!r}")
                given[name] = value
        return given

    def finish(self) -> None:
        """Refuse fields that nobody has asked for, unless they are off."""
        rest = {
            name: value
            for name, value in self.values.items()
            if name not in self._read | INERT
            and not name.endswith("_token_id")
            and value not in (None, False, {}, [], "")
        }
        if rest:
            name = next(iter(rest))
            raise ValueError(
                f"{self.origin}: {rest}: not understood for this architecture, and may change what"
                " the model computes; if one does not, pass"
                f" overrides={{{name!r}: None}}"
            )

    def _typed(self, field: str, value: Any, kind: type | tuple[type, ...]) -> Any:
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.refuse(field, f"not a {getattr(kind, '__name__', 'number')}")
        return value


def write_rope(rotary: RotaryConfig) -> dict[str, Any]:
    """The fields of a rotary embedding in the spelling of transformers 4.x, which 5.x reads too."""
    fields: dict[str, Any] = {"rope_theta": rotary.base, "rope_scaling": None}
    if rotary.percent != 1.0:
        fields["partial_rotary_factor"] = rotary.percent
    if rotary.scaling == "plain":
        return fields
    needed, optional = _ROPE_KINDS[rotary.scaling]
    scaling = {name: getattr(rotary, name) for name in needed}
    if rotary.scaling == "yarn":
        scaling |= {name: getattr(rotary, name) for name in optional}
        if rotary.attention_factor is None:
            del scaling["attention_factor"]
        if not (rotary.mscale and rotary.mscale_all_dim):
            del scaling["mscale"], scaling["mscale_all_dim"]
    return {**fields, "rope_scaling": {"rope_type": rotary.scaling, **scaling}}
