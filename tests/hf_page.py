"""The tables of `docs/huggingface.md`, from the tests that show what they say.

python -m tests.hf_page
"""

from collections.abc import Collection
from pathlib import Path

from megatron_lightning.bridge.hf import FAMILIES
from megatron_lightning.bridge.hf.registry import MISSING
from tests.hf_models import GOLDEN_NAMES, LOCAL_NAMES, MOE_NAMES
from tests.parity.test_hf_models import LAYOUTS, OF_EXPERTS, SLOW
from tests.unit.bridge.test_adapters_transformers import NAMES as WITH_ADAPTERS
from tests.unit.bridge.test_export_checks import LOCAL_NAMES as VERIFIED

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
    refused = [f"| `{name}` | {part} |" for name, part in sorted(MISSING.items())]
    head = (
        "family",
        "`model_type`",
        "class of transformers",
        "small models",
        "larger models",
        "layouts",
        "read back, and in transformers",
        "adapters",
    )
    return "\n".join(
        [
            f"In each of these layouts: {layouts} (of these, {nightly} among the slow tests).",
            "",
            f"| {' | '.join(head)} |",
            f"|{len(head) * '---|'}",
            *(f"| {' | '.join(row(name))} |" for name in sorted(FAMILIES)),
            "",
            "Other architectures are refused by name, with the parts that are missing:",
            "",
            "| `model_type` | needs |",
            "|---|---|",
            *refused,
            "",
        ]
    )


def row(name: str) -> list[str]:
    """What the tests show of a family."""

    def yes(names: Collection[str]) -> str:
        return "yes" if name in names else ""

    layouts = [x for x in LAYOUTS if x not in OF_EXPERTS or name in MOE_NAMES]
    return [
        TITLES[name],
        f"`{name}`",
        f"`{FAMILIES[name].architecture}`",
        yes(LOCAL_NAMES),
        yes(GOLDEN_NAMES),
        str(len(layouts)),
        yes(VERIFIED),
        yes(WITH_ADAPTERS),
    ]


def between(text: str) -> tuple[str, str, str]:
    """What stands before, in and after the written part of the page."""
    head, rest = text.split(BEGIN)
    body, tail = rest.split(END)
    return head, body, tail


if __name__ == "__main__":
    before, _, after = between(PAGE.read_text())
    PAGE.write_text(before + BEGIN + render() + END + after)
