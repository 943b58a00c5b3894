"""Adapters of every family, as `peft` and transformers compute them: over the base, and merged."""

from pathlib import Path

import pytest
import torch

from megatron_lightning.bridge import from_hf
from tests.lora_runs import DATA, TOLERANCE

NAMES = sorted(path.parent.name for path in (DATA / "hf").glob("*/config.json"))
IDS = torch.arange(12)[None] % 30


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_of_every_family(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    base = DATA / "hf" / name

    def theirs(folder: Path) -> torch.nn.Module:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    model = from_hf(base).add_lora(rank=4, alpha=8)
    unchanged = model(IDS)
    with torch.no_grad():
        for parameter in (p for n, p in model.named_parameters() if "lora_b" in n):
            parameter.normal_(std=0.05)
        logits = model(IDS)
        assert (logits - unchanged).abs().max() > 0.1
        model.save_hf(tmp_path / "merged", merge_adapters=True)
        merged = theirs(tmp_path / "merged")(IDS).logits
        torch.testing.assert_close(merged, logits, atol=TOLERANCE, rtol=0)
        if any(".experts." in name for name, _ in model.named_parameters()):
            with pytest.raises(ValueError, match="experts.linear_fc1: .* has no linear module"):
                model.save_adapters(tmp_path / "adapters")
            targets = [t for t in ("linear_qkv", "linear_q_proj", "linear_proj") if has(model, t)]
            model = from_hf(base).add_lora(rank=4, targets=targets)
            logits = model(IDS)
        model.save_adapters(tmp_path / "adapters")
        adapted = peft.PeftModel.from_pretrained(theirs(base), str(tmp_path / "adapters"))
        torch.testing.assert_close(adapted(IDS).logits, logits, atol=TOLERANCE, rtol=0)


def has(model: torch.nn.Module, layer: str) -> bool:
    return any(f".{layer}.weight" in name for name, _ in model.named_parameters())
