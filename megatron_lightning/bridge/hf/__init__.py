"""One table for each architecture."""

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
from megatron_lightning.bridge.hf.registry import FAMILIES, family_named, family_of

__all__ = [
    "FAMILIES",
    "DeepseekV3Family",
    "GPT2Family",
    "Gemma2Family",
    "Gemma3TextFamily",
    "GptOssFamily",
    "LlamaFamily",
    "MistralFamily",
    "MixtralFamily",
    "Phi3Family",
    "Qwen2Family",
    "Qwen3Family",
    "Qwen3MoeFamily",
    "family_named",
    "family_of",
]
