"""Writes the recorded runs beside this file: `peft` on transformers trains adapters of the models
in `tests/data/hf`, from adapters that are kept with the losses of ten steps.

    python -m tests.data.lora.make        (needs transformers and peft)
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from tests.lora_runs import DATA, LEARNING_RATE, RECORDED, STEPS, batch_of

CASES: dict[str, dict[str, Any]] = {
    "gpt2": dict(target_modules=["c_attn", "c_proj", "c_fc"]),
    "llama": dict(target_modules="all-linear"),
    "phi3": dict(target_modules="all-linear", use_rslora=True),
    "qwen2": dict(target_modules=["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]),
}


def peft_model(base: Path, options: dict[str, Any]) -> Any:
    """The base with fresh adapters of rank 4, always the same ones."""
    import peft
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options)
    torch.manual_seed(5)
    return peft.get_peft_model(model, config)


def train_peft(model: Any, vocab_size: int) -> list[float]:
    """Losses of the run that `tests/lora_runs.py` makes."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.01)
    model.train()
    losses = []
    for step in range(STEPS):
        batch = batch_of(vocab_size, step)
        logits = model(batch["tokens"], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(float(loss))
    return losses


def main() -> None:
    for name, options in CASES.items():
        base, folder = DATA / "hf" / name, RECORDED / name
        shutil.rmtree(folder, ignore_errors=True)
        model = peft_model(base, options)
        model.save_pretrained(folder)
        config = json.loads((folder / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = f"tests/data/hf/{name}"
        config["target_modules"] = sorted(config["target_modules"])
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        (folder / "README.md").unlink()
        losses = train_peft(model, model.config.vocab_size)
        model.eval()
        with torch.no_grad():
            logits = model(batch_of(model.config.vocab_size, 0)["tokens"]).logits
        content = {"losses": losses, "first_logits": logits[0, -1].tolist()}
        (folder / "run.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
