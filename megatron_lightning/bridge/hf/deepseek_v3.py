"""DeepSeek-V3 (and R1): latent attention, sigmoid routing within groups with a bias that only
chooses, shared experts, and layers of multi-token prediction behind the last one.

transformers: `models/deepseek_v3/configuration_deepseek_v3.py`, `modeling_deepseek_v3.py`, which
leaves multi-token prediction out; its names are those of the published weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from megatron_lightning.bridge.family import Family, activation_name
from megatron_lightning.bridge.mapping import Form, Rule, Same, Stacked
from megatron_lightning.bridge.source_config import SourceConfig, write_rope
from megatron_lightning.config.latent_attention import LatentAttentionConfig
from megatron_lightning.config.model import GPTConfig
from megatron_lightning.config.moe import MoEConfig
from megatron_lightning.config.multi_token_prediction import MultiTokenPredictionConfig
from megatron_lightning.config.rotary import RotaryConfig

GROUP_BEST = 2
"""Scores of a group that rank it; the architecture has no field for it."""
_LATENT = {
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
_MOE = {
    "num_experts": "n_routed_experts",
    "router_topk": "num_experts_per_tok",
    "ffn_hidden_size": "moe_intermediate_size",
    "first_dense_layers": "first_k_dense_replace",
    "router_num_groups": "n_group",
    "router_group_topk": "topk_group",
}
"""Our fields -> theirs."""
_LAYER: Mapping[str, str] = {
    "input_layernorm": "input_layernorm",
    "self_attention.linear_q_proj": "self_attn.q_proj",
    "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
    "self_attention.q_layernorm": "self_attn.q_a_layernorm",
    "self_attention.linear_q_up_proj": "self_attn.q_b_proj",
    "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
    "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
    "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj",
    "self_attention.linear_proj": "self_attn.o_proj",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.router": "mlp.gate",
}
_PREDICTION: Mapping[str, str] = {
    "enorm": "enorm",
    "hnorm": "hnorm",
    "eh_proj": "eh_proj",
    "final_layernorm": "shared_head.norm",
}
_SHARED = ("embed_tokens.weight", "shared_head.head.weight")
"""Copies of the embedding and the head that the published files hold in each further layer."""


class DeepseekV3Family(Family):
    """See the module."""

    model_type: ClassVar[str] = "deepseek_v3"
    architecture: ClassVar[str] = "DeepseekV3ForCausalLM"

    def read(self, source: SourceConfig) -> GPTConfig:
        """See `Family.read`. `num_nextn_predict_layers` brings multi-token prediction; override it
        by 0 to go without.
        """
        _refuse_others(source)
        heads = source.need("num_attention_heads")
        if source.get("num_key_value_heads", heads) != heads:
            raise source.refuse("num_key_value_heads", f"must equal num_attention_heads={heads}")
        depths = source.get("num_nextn_predict_layers", 0)
        fields = dict(
            vocab_size=source.need("vocab_size"),
            num_layers=source.need("num_hidden_layers"),
            hidden_size=source.need("hidden_size"),
            num_attention_heads=heads,
            ffn_hidden_size=source.need("intermediate_size"),
            max_position_embeddings=source.need("max_position_embeddings"),
            norm_epsilon=source.need("rms_norm_eps", (int, float)),
            activation=source.activation("hidden_act"),
            rotary=_rotary(source),
            tie_word_embeddings=source.flag("tie_word_embeddings", False),
            attention_dropout=source.number("attention_dropout", 0.0),
            init_method_std=source.number("initializer_range", 0.02),
            latent_attention=_latent(source),
            moe=_moe(source),
        )
        if depths:
            fields["multi_token_prediction"] = MultiTokenPredictionConfig(num_layers=depths)
        source.finish()
        return GPTConfig(**fields)

    def write(self, config: GPTConfig) -> dict[str, Any]:
        """See `Family.write`. ValueError for a model without latent attention or experts."""
        latent, moe = config.latent_attention, config.moe
        if latent is None or moe is None:
            raise ValueError("a model without latent attention and experts")
        width = moe.ffn_hidden_size or config.ffn_hidden_size
        return {
            "vocab_size": config.vocab_size,
            "num_hidden_layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_attention_heads,
            "intermediate_size": config.ffn_hidden_size,
            "max_position_embeddings": config.max_position_embeddings,
            "rms_norm_eps": config.norm_epsilon,
            "hidden_act": activation_name(config),
            **write_rope(config.rotary),
            "rope_interleave": config.rotary.interleaved,
            "tie_word_embeddings": config.tie_word_embeddings,
            "attention_bias": False,
            "attention_dropout": config.attention_dropout,
            "q_lora_rank": latent.q_lora_rank or None,
            **{theirs: getattr(latent, ours) for ours, theirs in _LATENT.items()},
            **{theirs: getattr(moe, ours) for ours, theirs in _MOE.items()},
            "moe_intermediate_size": width,
            "n_shared_experts": moe.shared_expert_ffn_hidden_size // width,
            "norm_topk_prob": moe.router_normalize_topk,
            "routed_scaling_factor": moe.router_topk_scaling_factor,
            "num_nextn_predict_layers": config.prediction_depths,
        }

    def rules(self, config: GPTConfig) -> Sequence[Rule]:
        """See `Family.rules`."""
        rules = [
            Rule("embedding.word_embeddings.weight", self.word_embeddings),
            Rule("decoder.final_layernorm.weight", "model.norm.weight"),
            Rule("output_layer.weight", self.output_layer),
            *_layer_rules(config, "decoder.layers.{layer}.", "model.layers.{layer}."),
        ]
        for depth in range(config.prediction_depths):
            ours, theirs = f"mtp.layers.{depth}.", f"model.layers.{config.num_layers + depth}."
            rules += [
                Rule(f"{ours}{here}.weight", f"{theirs}{there}.weight")
                for here, there in _PREDICTION.items()
            ]
            rules += _layer_rules(config, f"{ours}mtp_model_layer.", theirs)
        return rules

    def stays_float32(self, name: str) -> bool:
        """See `Family.stays_float32`: the biases of routers."""
        return name.endswith("e_score_correction_bias")

    def left_out(self, config: GPTConfig, name: str) -> bool:
        """See `Family.left_out`: what the published files repeat, and layers behind the last that
        the config goes without.
        """
        parts = name.split(".")
        behind = parts[:2] == ["model", "layers"] and parts[2].isdigit()
        if not behind or int(parts[2]) < config.num_layers:
            return False
        return not config.prediction_depths or ".".join(parts[3:]) in _SHARED


def _refuse_others(source: SourceConfig) -> None:
    """Fields that have one value only, and those without an effect on logits."""
    source.only("attention_bias", (False,), "biases in latent attention")
    source.only("scoring_func", ("sigmoid",), "another score function")
    source.only("topk_method", ("noaux_tc",), "another choice of experts")
    source.only("moe_layer_freq", (1,), "experts in every other layer")
    for name in ("aux_loss_alpha", "seq_aux", "ep_size"):
        source.get(name)


def _rotary(source: SourceConfig) -> RotaryConfig:
    given = source.values.get("rope_parameters") or source.values.get("rope_scaling") or {}
    scales = [bool(given.get(name)) for name in ("mscale", "mscale_all_dim")]
    if scales[0] != scales[1]:
        field = "rope_parameters" if "rope_parameters" in source.values else "rope_scaling"
        raise source.refuse(field, "mscale and mscale_all_dim are supported together only")
    return replace(source.rope(), interleaved=source.flag("rope_interleave", True))


def _latent(source: SourceConfig) -> LatentAttentionConfig:
    if "q_lora_rank" not in source.values:
        source.need("q_lora_rank")  # null says that queries are not compressed; absence nothing
    sizes = {ours: source.need(theirs) for ours, theirs in _LATENT.items()}
    latent = LatentAttentionConfig(q_lora_rank=source.get("q_lora_rank", 0), **sizes)
    derived = {"head_dim": latent.qk_pos_emb_head_dim, "qk_head_dim": latent.query_dim}
    for name, value in derived.items():
        if source.get(name, value) != value:
            raise source.refuse(name, f"must be {value}, which other fields say")
    return latent


def _moe(source: SourceConfig) -> MoEConfig:
    """Experts that train as in transformers: without a loss of the router and with a fixed bias."""
    values = {ours: source.need(theirs) for ours, theirs in _MOE.items()}
    return MoEConfig(
        **values,
        shared_expert_ffn_hidden_size=source.need("n_shared_experts") * values["ffn_hidden_size"],
        router_score_function="sigmoid",
        router_normalize_topk=source.flag("norm_topk_prob", True),
        router_group_best=GROUP_BEST,
        router_topk_scaling_factor=source.need("routed_scaling_factor", (int, float)),
        load_balancing="none",
        expert_bias=True,
        expert_bias_update_rate=0.0,
    )


def _layer_rules(config: GPTConfig, ours: str, theirs: str) -> list[Rule]:
    """Rules of one layer, dense or with experts."""

    def halves(prefix: str) -> tuple[str, ...]:
        return tuple(f"{prefix}.{half}_proj.weight" for half in ("gate", "up"))

    def mlp(here: str, there: str) -> list[Rule]:
        return [
            Rule(f"{here}.linear_fc1.weight", halves(there), Stacked(2)),
            Rule(f"{here}.linear_fc2.weight", f"{there}.down_proj.weight"),
        ]

    assert config.moe is not None
    count = config.moe.num_experts
    experts = [f"{theirs}mlp.experts.{i}" for i in range(count)]
    fc1 = tuple(name for expert in experts for name in halves(expert))
    fc2 = tuple(f"{expert}.down_proj.weight" for expert in experts)
    form: Form = Stacked(count, Stacked(2))
    return [
        *(Rule(f"{ours}{a}.weight", f"{theirs}{b}.weight", Same()) for a, b in _LAYER.items()),
        Rule(f"{ours}mlp.router.expert_bias", f"{theirs}mlp.gate.e_score_correction_bias"),
        *mlp(f"{ours}mlp", f"{theirs}mlp"),
        *mlp(f"{ours}mlp.shared_experts", f"{theirs}mlp.shared_experts"),
        Rule(f"{ours}mlp.experts.linear_fc1.weight", fc1, form),
        Rule(f"{ours}mlp.experts.linear_fc2.weight", fc2, Stacked(count)),
    ]
