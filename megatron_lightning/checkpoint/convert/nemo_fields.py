"""Fields of Megatron-Core's TransformerConfig, as NeMo extends it, and what they are here."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from megatron_lightning.checkpoint.errors import CheckpointError
from megatron_lightning.config.model import GPTConfig
from megatron_lightning.config.moe import MoEConfig
from megatron_lightning.config.rotary import RotaryConfig
from megatron_lightning.config.variants import StreamConfig

_INERT = """
_cpu* account_for_* apply_rope_fusion async_* attention_backend attention_softmax_in_fp32
autocast_dtype barrier_with_L1_time batch_p2p_* bf16 bias_activation_fusion bias_dropout_*
calculate_per_token_loss clone_scatter_output_in_embedding config_logger_dir context_parallel_size
cp_comm_type cpu_offloading* cross_entropy_* cuda_graph_* data_step_fn deallocate_pipeline_outputs
defer_* delay_wgrad_compute deterministic_mode disable_* distribute_* embedding_init_method*
enable_autocast enable_cuda_graph expert_model_parallel_size expert_tensor_parallel_size
external_cuda_graph finalize_* fine_grained_* flash_decode forward_step_fn fp16* fp32_residual_*
fp4* fp8* generation_config gradient_accumulation_fusion grad_scale_func grad_sync_func hidden_act
hierarchical_* inference_* init_method init_model_* kitchen_* keep_* log_max_* masked_softmax_fusion
memory_efficient_layer_norm microbatch_* min_offloaded_* mlp_chunks_* moe_deepep_* moe_enable_deepep
moe_flex_* moe_grouped_gemm moe_hybridep_* moe_layer_recompute moe_per_layer_logging
moe_permute_fusion moe_router_dtype moe_router_fusion moe_router_padding_* moe_shared_expert_overlap
moe_token_dispatcher_type moe_use_* nccl_* no_sync_func num_layers_at_* num_layers_in_*
num_microbatches_* offload_modules output_layer_init_method overlap_* parallel_output
param_sync_func params_dtype perform_initialization persist_layer_norm pipeline_* qk_clip_*
recompute_* scatter_embedding_* sequence_parallel symmetric_* tensor_model_parallel_size
test_mode timers tp_comm_* tp_only_* transformer_impl transformer_layer_spec use_cpu_initialization
use_fused_* use_kitchen* use_mamba_* use_ring_* use_te_* use_transformer_engine_*
variable_seq_lengths virtual_pipeline_* vocab_size wgrad_deferral_limit linear_conv_kernel_dim
linear_*_head_dim linear_num_*_heads mamba_*dim mamba_num_groups glu_linear_offset
mtp_loss_scaling_factor moe_aux_loss_coeff_* max_position_embeddings softmax_type old_context_len
scale_factor low_freq_factor high_freq_factor
"""
INERT = tuple(_INERT.split())
"""Globs of fields without an effect on the network: layout, kernels, precision of the run, or sizes
of parts that other fields turn on (`softmax_type` and `glu_linear_offset` are checked)."""
_ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "openai_gelu": "gelu_tanh",
    "fast_gelu": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "relu": "relu",
    "squared_relu": "squared_relu",
}
_SET_BY_CLASSES = (
    "add_qkv_bias",
    "gated_linear_unit",
    "kv_channels",
    "layernorm_zero_centered_gamma",
    "num_moe_experts",
    "qk_layernorm",
    "window_size",
    "moe_layer_freq",
    "moe_router_pre_softmax",
    "moe_router_topk_scaling_factor",
    "moe_shared_expert_intermediate_size",
)
"""Fields of which the classes of models have their own defaults, which a file of set fields alone
doesn't say."""
_BALANCING = ("none", "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn")
_MISSING = object()


class _Fields:
    """The fields, which of them were asked for, and what is wrong with them."""

    def __init__(self, values: Mapping[str, Any], *, complete: bool) -> None:
        self.values, self.complete = values, complete
        self.read: set[str] = set()
        self.problems: list[str] = []

    def need(self, name: str, default: Any = _MISSING) -> Any:
        """A field that has to be there; with `default`, what null stands for."""
        self.read.add(name)
        value = self.values.get(name, _MISSING)
        if value is _MISSING:
            self.problems.append(f"{name} is missing, and no value is guessed for it")
            return None if default is _MISSING else default
        return default if value is None and default is not _MISSING else value

    def off(self, name: str, default: Any = None) -> Any:
        """A field whose absence means that a feature is off."""
        if not self.complete and name in _SET_BY_CLASSES:
            return self.need(name, default)
        self.read.add(name)
        value = self.values.get(name)
        return default if value is None else value

    def only(self, name: str, *allowed: Any) -> None:
        """Refuse other values; absent is allowed."""
        value = self.off(name)
        if value is not None and value not in allowed:
            self.problems.append(f"{name}={value!r} is not supported")

    def target(self, name: str) -> str:
        """The last part of the name of a function."""
        value = self.need(name)
        full = value.get("_target_", "") if isinstance(value, Mapping) else str(value)
        return full.rpartition(".")[2]

    def unknown(self) -> list[str]:
        """Fields that nobody has asked for and that aren't known to be without effect."""
        return [
            f"{name}={value!r} is not known"
            for name, value in self.values.items()
            if name not in self.read
            and value not in (None, False)
            and not any(fnmatchcase(name, glob) for glob in INERT)
        ]


def gpt_config(
    values: Mapping[str, Any], vocab_size: int, origin: str, *, complete: bool, scaled: bool
) -> GPTConfig:
    """Our config. `complete`: whether fields with their defaults are among the values; `scaled`:
    whether its class scales rotary frequencies.

    CheckpointError names every field that is missing, unknown or not supported.
    """
    fields = _Fields(values, complete=complete)
    options = {**_sizes(fields), **_layers(fields), **_positions(fields, scaled)}
    options["moe"] = _experts(fields, options["ffn_hidden_size"])
    _refuse(fields)
    problems = fields.problems + fields.unknown()
    if not problems:
        config = GPTConfig(vocab_size=vocab_size, **options)
        problems = config.check()
        if not problems:
            return config
    raise CheckpointError(
        "\n- ".join([f"{origin} can't be followed; give the model's config (--config):", *problems])
    )


def _sizes(fields: _Fields) -> dict[str, Any]:
    hidden, heads = fields.need("hidden_size"), fields.need("num_attention_heads")
    channels = fields.off("kv_channels")
    return {
        "num_layers": fields.need("num_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": fields.need("num_query_groups", heads),
        "head_dim": channels or 0,
        "ffn_hidden_size": fields.need("ffn_hidden_size", 4 * (hidden or 0)),
        "max_position_embeddings": fields.need("seq_length"),
        "make_vocab_size_divisible_by": fields.off("make_vocab_size_divisible_by", 128),
    }


def _layers(fields: _Fields) -> dict[str, Any]:
    norm = {"RMSNorm": "rmsnorm", "LayerNorm": "layernorm"}.get(str(fields.need("normalization")))
    if norm is None:
        fields.only("normalization", "RMSNorm", "LayerNorm")
    activation = _ACTIVATIONS.get(fields.target("activation_func"))
    if activation is None:
        fields.problems.append(f"activation_func={fields.values.get('activation_func')!r}")
    window, size = fields.off("window_size"), 0
    if window is not None and list(window) not in ([-1, -1], [-1, 0]):
        size = int(window[0]) + 1  # a query sees so many tokens before it, and itself
        if window[1] != 0 or window[0] < 0:
            fields.problems.append(f"window_size={window!r} is not supported")
    return {
        "norm": norm,
        "norm_epsilon": fields.need("layernorm_epsilon"),
        "activation": activation,
        "gated_linear_unit": bool(fields.off("gated_linear_unit", False)),
        "add_bias_linear": bool(fields.need("add_bias_linear")),
        "add_qkv_bias": bool(fields.off("add_qkv_bias", False)),
        "qk_layernorm": bool(fields.off("qk_layernorm", False)),
        "window_size": size,
        "tie_word_embeddings": bool(fields.need("share_embeddings_and_output_weights")),
        "attention_dropout": fields.need("attention_dropout"),
        "hidden_dropout": fields.need("hidden_dropout"),
        "init_method_std": fields.off("init_method_std", 0.02),
        "stream": StreamConfig(
            zero_centered_norm=bool(fields.off("layernorm_zero_centered_gamma", False))
        ),
    }


def _positions(fields: _Fields, scaled: bool) -> dict[str, Any]:
    kinds = {"rope": "rope", "learned_absolute": "learned", "none": "none"}
    name = str(fields.need("position_embedding_type"))
    if name not in kinds:
        fields.problems.append(f"position_embedding_type={name!r} is not supported")
    if name != "rope":
        for ignored in ("rotary_base", "rotary_percent", "seq_len_interpolation_factor"):
            fields.off(ignored)
        return {"position_embedding": kinds.get(name, "none")}
    base, percent = fields.need("rotary_base"), fields.need("rotary_percent")
    scaling: dict[str, Any] = {}
    if (factor := fields.off("seq_len_interpolation_factor")) is not None:
        scaling = {"scaling": "linear", "factor": float(factor)}
    if scaled or fields.off("scale_factor") is not None:
        scaling = {
            "scaling": "llama3",
            "factor": float(fields.need("scale_factor") or 0),
            "low_freq_factor": float(fields.need("low_freq_factor") or 0),
            "high_freq_factor": float(fields.need("high_freq_factor") or 0),
            "original_max_position_embeddings": fields.need("old_context_len"),
        }
    rotary = RotaryConfig(base=float(base or 0), percent=float(percent or 0), **scaling)
    return {"position_embedding": "rope", "rotary": rotary}


def _experts(fields: _Fields, ffn: Any) -> MoEConfig | None:
    count = fields.off("num_moe_experts")
    names = [n for n in fields.values if n.startswith("moe_")]
    if count is None:
        fields.read.update(names)
        return None
    score, topk = fields.need("moe_router_score_function"), fields.need("moe_router_topk")
    pre = bool(fields.off("moe_router_pre_softmax", False))
    balancing = fields.need("moe_router_load_balancing_type")
    if balancing not in _BALANCING:
        fields.problems.append(f"moe_router_load_balancing_type={balancing!r} is not supported")
    policy = fields.off("moe_token_drop_policy", "probs")
    shared = fields.off("moe_shared_expert_intermediate_size", 0)
    dense, pattern = _frequency(fields)
    fields.only("moe_router_topk_limited_devices", 0)
    fields.only("moe_apply_probs_on_input", False)
    coefficient = fields.off("moe_aux_loss_coeff", 0.0)
    return MoEConfig(
        num_experts=count,
        router_topk=topk,
        ffn_hidden_size=fields.need("moe_ffn_hidden_size", ffn),
        shared_expert_ffn_hidden_size=shared,
        shared_expert_gate=bool(fields.off("moe_shared_expert_gate", False)),
        latent_size=fields.off("moe_latent_size", 0),
        first_dense_layers=dense,
        layer_pattern=pattern,
        router_score_function=score,
        router_pre_softmax=pre,
        router_normalize_topk=not pre if score == "softmax" else (topk or 0) > 1,
        router_num_groups=fields.off("moe_router_num_groups", 0),
        router_group_topk=fields.off("moe_router_group_topk", 0),
        router_topk_scaling_factor=fields.off("moe_router_topk_scaling_factor", 1.0),
        input_jitter=fields.off("moe_input_jitter_eps", 0.0),
        load_balancing=balancing if balancing in _BALANCING else "none",
        aux_loss_coeff=coefficient if balancing != "none" else 0.0,
        z_loss_coeff=fields.off("moe_z_loss_coeff", 0.0),
        expert_bias=bool(fields.off("moe_router_enable_expert_bias", False)),
        expert_bias_update_rate=fields.off("moe_router_bias_update_rate", 1e-3),
        capacity_factor=fields.off("moe_expert_capacity_factor"),
        drop_policy="probability" if policy == "probs" else policy,
        pad_to_capacity=bool(fields.off("moe_pad_expert_input_to_capacity", False)),
    )


def _frequency(fields: _Fields) -> tuple[int, str]:
    """Leading dense layers, and one letter a layer."""
    frequency, layers = fields.off("moe_layer_freq", 1), fields.values.get("num_layers") or 0
    if isinstance(frequency, int):
        return 0, "E" + "D" * (frequency - 1)
    if not isinstance(frequency, list) or len(frequency) != layers:
        fields.problems.append(f"moe_layer_freq={frequency!r} is not supported")
        return 0, "E"
    letters = "".join("E" if one else "D" for one in frequency)
    dense = len(letters) - len(letters.lstrip("D"))
    return (dense, "E") if "D" not in letters[dense:] else (0, letters)


def _refuse(fields: _Fields) -> None:
    """Parts that a config can turn on and that aren't read."""
    for name in (
        "multi_latent_attention",
        "rotary_interleaved",
        "apply_residual_connection_post_layernorm",
        "qk_l2_norm",
        "qk_clip",
        "attention_output_gate",
        "is_hybrid_model",
        "apply_query_key_layer_scaling",
    ):
        fields.only(name, False)
    fields.only("softmax_type", "vanilla")
    fields.only("glu_linear_offset", 0, 0.0)
    fields.only("softmax_scale")
    for name in ("mtp_num_layers", "activation_func_clamp_value", "window_attn_skip_freq"):
        fields.only(name, 0)
