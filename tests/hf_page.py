"""The tables of `docs/huggingface.md`, from the tests that show what they say.

python -m tests.hf_page
"""

from pathlib import Path

from megatron_lightning.bridge.hf import FAMILIES
from megatron_lightning.bridge.hf.registry import MISSING
from tests.hf_models import GOLDEN_NAMES, LOCAL_NAMES
from tests.parity.test_hf_models import LAYOUTS, SLOW

PAGE = Path(__file__).parents[1] / "docs" / "huggingface.md"
BEGIN, END = "<!-- written by tests/hf_page.py -->\n", "<!-- end -->\n"
TITLES = {
    "deepseek_v3": "DeepSeek-V3, R1",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3 (text)",
    "gpt2": "GPT-2",
    "gpt_oss": "GPT-OSS",
    "llama": "Llama 2, 3, 3.x",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "phi3": "Phi-3, Phi-4",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3 (dense)",
    "qwen3_moe": "Qwen3 (experts)",
}
LAYOUT_TITLES = {
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3 (text)",
    "single": "one process",
    "tp2": "TP=2",
    "pp2": "PP=2",
    "tp2_sp_pp2": "TP=2 x PP=2 with sequence parallelism",
    "ep2": "EP=2 (with experts)",
    "fsdp2": "FSDP2 on two ranks",
}


def render() -> str:
    """Both tables."""
    layouts = ", ".join(LAYOUT_TITLES[name] for name in LAYOUTS)
    nightly = ", ".join(LAYOUT_TITLES[name] for name in SLOW)
    rows = [
        f"| {TITLES[name]} | `{name}` | `{FAMILIES[name].architecture}` |"
        f" {'yes' if name in LOCAL_NAMES else ''} | {'yes' if name in GOLDEN_NAMES else ''} |"
        for name in sorted(FAMILIES)
    ]
    refused = [f"| `{name}` | {part} |" for name, part in sorted(MISSING.items())]
    return "\n".join(
        [
            f"In each of these layouts: {layouts} (of these, {nightly} among the slow tests).",
            "",
            "| family | `model_type` | class of transformers | small models | larger models |",
            "|---|---|---|---|---|",
            *rows,
            "",
            "Other architectures are refused by name, with the parts that are missing:",
            "",
            "| `model_type` | needs |",
            "|---|---|",
            *refused,
            "",
        ]
    )


def between(text: str) -> tuple[str, str, str]:
    """What stands before, in and after the written part of the page."""
    head, rest = text.split(BEGIN)
    body, tail = rest.split(END)
    return head, body, tail


if __name__ == "__main__":
    before, _, after = between(PAGE.read_text())
    PAGE.write_text(before + BEGIN + render() + END + after)
