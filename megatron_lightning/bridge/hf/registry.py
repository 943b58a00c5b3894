"""The architectures that can be read and written, and why others can't."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_lightning.bridge.family import Family
from megatron_lightning.bridge.hf.deepseek_v3 import DeepseekV3Family
from megatron_lightning.bridge.hf.gemma2 import Gemma2Family
from megatron_lightning.bridge.hf.gemma3_text import Gemma3TextFamily
from megatron_lightning.bridge.hf.gpt2 import GPT2Family
from megatron_lightning.bridge.hf.gpt_oss import GptOssFamily
from megatron_lightning.bridge.hf.llama import LlamaFamily
from megatron_lightning.bridge.hf.mistral import MistralFamily
from megatron_lightning.bridge.hf.mixtral import MixtralFamily
from megatron_lightning.bridge.hf.phi3 import Phi3Family
from megatron_lightning.bridge.hf.qwen2 import Qwen2Family
from megatron_lightning.bridge.hf.qwen3 import Qwen3Family
from megatron_lightning.bridge.hf.qwen3_moe import Qwen3MoeFamily
from megatron_lightning.config.model import GPTConfig

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        LlamaFamily(),
        MistralFamily(),
        Qwen2Family(),
        Qwen3Family(),
        GPT2Family(),
        Phi3Family(),
        DeepseekV3Family(),
        Gemma2Family(),
        Gemma3TextFamily(),
        MixtralFamily(),
        Qwen3MoeFamily(),
        GptOssFamily(),
    )
}
"""By `model_type`. Of several that express a config the first is written."""
MISSING: Mapping[str, str] = {
    "bert": "bidirectional encoders",
    "bitnet": "ternary linear layers and norms inside attention and MLP",
    "deepseek_v4": "compressed attention, hyper-connections and experts",
    "falcon_h1": "state-space layers",
    "gemma": "norms with weight 1 + w without those after branches",
    "gemma3": "vision",
    "llava": "vision",
    "mamba2": "state-space layers",
    "nemotron_h": "state-space layers",
    "qwen2_5_vl": "vision",
    "qwen2_moe": "a table of its shared expert",
    "qwen3_vl": "vision",
    "t5": "encoder-decoder models",
}
"""Known architectures -> the parts that the networks of this package lack."""


def family_named(model_type: object, origin: str) -> Family:
    """The architecture of that `model_type`. ValueError says which parts others need."""
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    known = f"supported are {sorted(FAMILIES)}"
    if isinstance(model_type, str) and model_type in MISSING:
        raise ValueError(
            f"{origin}: model_type={model_type!r} needs parts that are not there yet:"
            f" {MISSING[model_type]}; {known}"
        )
    raise ValueError(f"{origin}: model_type={model_type!r} is unknown; {known}")


def family_of(config: GPTConfig) -> Family:
    """The architecture that expresses a config. ValueError says why none does."""
    reasons = {name: family.expresses(config) for name, family in FAMILIES.items()}
    for name, reason in reasons.items():
        if reason is None:
            return FAMILIES[name]
    text = "\n".join(f"- {name}: {reason}" for name, reason in reasons.items())
    raise ValueError(f"no architecture of transformers expresses this config:\n{text}")
