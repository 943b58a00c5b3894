"""Makes the reference models of this folder with transformers, which the tests do without.

python make.py FOLDER [NAME ...]
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

SIZES = dict(
    vocab_size=35,
    hidden_size=32,
    intermediate_size=36,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    attention_dropout=0.0,
)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 4.0}
SMALLER = dict(hidden_size=16, intermediate_size=20, head_dim=8)
GEMMA = dict(SMALLER, sliding_window=5, tie_word_embeddings=True)
EXPERTS = dict(hidden_size=16, intermediate_size=12, num_experts_per_tok=2)
MODELS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, dict(head_dim=16, rope_parameters=LLAMA3)),
    "mistral": (transformers.MistralConfig, dict(sliding_window=5, rope_parameters=ROPE)),
    "qwen2": (
        transformers.Qwen2Config,
        dict(
            use_sliding_window=True,
            sliding_window=5,
            max_window_layers=1,
            tie_word_embeddings=True,
            rope_parameters=YARN,
        ),
    ),
    "qwen3": (transformers.Qwen3Config, dict(head_dim=8, rope_parameters=ROPE)),
    "phi3": (
        transformers.Phi3Config,
        dict(
            sliding_window=None,
            original_max_position_embeddings=64,
            rope_parameters={**ROPE, "partial_rotary_factor": 0.5},
        ),
    ),
    "gpt2": (
        transformers.GPT2Config,
        dict(
            vocab_size=35,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=32,
            n_inner=48,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=2,
        ),
    ),
    "gemma2": (
        transformers.Gemma2Config,
        dict(
            GEMMA,
            query_pre_attn_scalar=12,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=4.0,
            rope_parameters=ROPE,
        ),
    ),
    "gemma3_text": (
        transformers.Gemma3TextConfig,
        dict(
            GEMMA,
            query_pre_attn_scalar=8,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={"full_attention": LINEAR, "sliding_attention": ROPE},
        ),
    ),
    "mixtral": (
        transformers.MixtralConfig,
        dict(EXPERTS, sliding_window=6, num_local_experts=4, rope_parameters=ROPE),
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        dict(
            EXPERTS,
            head_dim=8,
            moe_intermediate_size=12,
            num_experts=6,
            mlp_only_layers=[0],
            norm_topk_prob=False,
            rope_parameters=ROPE,
        ),
    ),
    "gpt_oss": (
        transformers.GptOssConfig,
        dict(
            EXPERTS,
            head_dim=8,
            sliding_window=5,
            num_local_experts=4,
            layer_types=["sliding_attention", "full_attention"],
            swiglu_limit=0.5,
            rope_parameters={**YARN, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
        ),
    ),
    "deepseek_v3": (
        transformers.DeepseekV3Config,
        dict(
            hidden_size=16,
            intermediate_size=20,
            num_key_value_heads=4,
            moe_intermediate_size=12,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_shared_experts=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            routed_scaling_factor=1.5,
            q_lora_rank=None,
            kv_lora_rank=12,
            qk_nope_head_dim=6,
            qk_rope_head_dim=4,
            v_head_dim=12,
            rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
            num_nextn_predict_layers=0,
        ),
    ),
}
ORDER = (
    "gpt2",
    "llama",
    "mistral",
    "phi3",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "deepseek_v3",
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
)
"""Decides the seeds."""
WITH_ROUTERS = ("mixtral", "qwen3_moe", "gpt_oss")
"""Models whose outputs may hold the router's logits of each layer with experts."""


def legacy(config: dict[str, Any]) -> dict[str, Any]:
    """The same config in the spelling of transformers 4.x."""
    config = {**config, "torch_dtype": config["dtype"], "transformers_version": "4.51.3"}
    del config["dtype"]
    if "full_attention" in config.get("rope_parameters", {}):
        both = config.pop("rope_parameters")
        config["rope_local_base_freq"] = both["sliding_attention"]["rope_theta"]
        config["rope_parameters"] = both["full_attention"]
    if "rope_parameters" in config:
        rope = dict(config.pop("rope_parameters"))
        config["rope_theta"] = rope.pop("rope_theta")
        if "partial_rotary_factor" in rope:
            config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    return config


def shifted_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the next tokens."""
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
    )


def make(name: str, folder: Path) -> None:
    """Write one model and what it computes."""
    kind, changes = MODELS[name]
    config = kind(**({**SIZES, **changes} if name != "gpt2" else changes))
    config.architectures = None
    torch.manual_seed(ORDER.index(name) + 7)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            wide = 0.12 if parameter.dim() > 1 else 0.2
            around_one = ("norm" in key or "ln" in key) and not name.startswith("gemma")
            parameter.copy_(torch.randn_like(parameter) * wide + float(around_one))
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config_legacy.json").write_text(json.dumps(legacy(written), indent=2) + "\n")
    (folder / "generation_config.json").unlink(missing_ok=True)
    ids = torch.randint(3, 35, (2, 14))
    labels = ids.clone()
    labels[0, :3], labels[1, 9:] = -100, -100
    with torch.no_grad():
        routers = {"output_router_logits": True} if name in WITH_ROUTERS else {}
        out = model(ids, output_hidden_states=True, **routers)
        greedy = ids[:1, :6]
        for _ in range(8):
            greedy = torch.cat([greedy, model(greedy).logits[:, -1:].argmax(-1)], dim=1)
    np.savez_compressed(
        folder / "golden.npz",
        input_ids=ids.numpy(),
        labels=labels.numpy(),
        logits=out.logits.numpy(),
        hidden_states=torch.stack(out.hidden_states).numpy(),
        greedy_ids=greedy.numpy(),
        **({"router_logits": torch.stack(out.router_logits).numpy()} if routers else {}),
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    losses = []
    for _ in range(8):
        loss = shifted_loss(model(ids).logits, labels)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    meta = {
        "transformers": transformers.__version__,
        "loss": losses[0],
        "train": {"losses": losses},
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")


if __name__ == "__main__":
    for model_name in sys.argv[2:] or MODELS:
        target = Path(sys.argv[1]) / model_name
        target.mkdir(parents=True, exist_ok=True)
        make(model_name, target)
