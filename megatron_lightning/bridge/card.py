"""The model card of an export: README.md with what is known of the model, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from megatron_lightning.bridge.record import SourceRecord

CARD = "README.md"
Facts = Mapping[str, str | int]
"""Rows of the table "Training": what -> how much."""
_CARRIED = ("license", "license_name", "license_link", "language")
"""Fields of the base model's card that hold for what was made of it."""
_LEDGER = "TokenLedger"


def model_card(
    name: str,
    *,
    architecture: str,
    dtypes: Mapping[str, torch.dtype],
    parameters: int,
    record: SourceRecord | None,
    facts: Facts,
) -> str:
    """The text of the card. `dtypes`: of each tensor; `parameters`: their number of elements."""
    base = None if record is None else record.name or Path(record.folder).name
    header: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if record is not None and record.name:
        header["base_model"] = record.name
    header |= {} if record is None else _carried(Path(record.folder) / CARD)
    header["tags"] = ["megatron-lightning"]
    held = sorted({str(dtype).removeprefix("torch.") for dtype in dtypes.values()})
    rows: dict[str, str | int] = {
        "architecture": f"`{architecture}`",
        "parameters": parameters,
        "dtype": ", ".join(held),
    }
    if base is not None:
        rows["base model"] = f"[{base}](https://huggingface.co/{base})" if record.name else base  # type: ignore[union-attr]
    lines = [
        "---",
        yaml.safe_dump(header, sort_keys=False, allow_unicode=True).rstrip(),
        "---",
        "",
        f"# {name}",
        "",
        "Written by megatron-lightning; loads in `transformers`.",
        "",
        *_table("model", rows),
    ]
    if facts:
        lines += ["", *_table("training", facts)]
    return "\n".join([*lines, ""])


def _table(title: str, rows: Facts) -> list[str]:
    def shown(value: str | int) -> str:
        return f"{value:,}" if isinstance(value, int) else value

    return [f"| {title} | |", "|---|---|", *(f"| {k} | {shown(v)} |" for k, v in rows.items())]


def _carried(card: Path) -> dict[str, Any]:
    """Licence and languages of a base model, from its own card."""
    if not card.is_file():
        return {}
    found = re.match(r"---\n(.*?)\n---\n", card.read_text(encoding="utf-8", errors="replace"), re.S)
    try:
        header = yaml.safe_load(found.group(1)) if found is not None else None
    except yaml.YAMLError:
        return {}  # the hub shows such a card too; it says nothing that could be read
    return {k: header[k] for k in _CARRIED if k in header} if isinstance(header, dict) else {}


def facts_of_trainer(trainer: Any) -> dict[str, str | int]:
    """What a Trainer knows of its training. All ranks call it: callbacks with a method
    `training_facts` (`TokenLedger`) add up their counts.
    """
    steps = int(trainer.global_step)
    if not steps:
        return {}
    facts: dict[str, str | int] = {"optimizer steps": steps}
    for callback in trainer.callbacks:
        if hasattr(callback, "training_facts"):
            facts |= callback.training_facts()
    facts["precision"] = str(trainer.precision)
    if hasattr(trainer.strategy, "mesh"):
        facts["layout"] = trainer.strategy.mesh.describe()
    return facts


def facts_of_checkpoint(
    objects: Mapping[str, Any], metadata: Mapping[str, Any]
) -> dict[str, str | int]:
    """The same of a checkpoint of this package: its objects, and its manifest's metadata."""
    steps = objects.get("global_step")
    if not steps:
        return {}
    facts: dict[str, str | int] = {"optimizer steps": int(steps)}
    ledger = (objects.get("callbacks") or {}).get(_LEDGER)
    if ledger is not None:
        tokens = [2 + ledger["fields"].index(f) for f in ("tokens", "loss_tokens")]
        names = ("tokens", "tokens with a loss")
        facts |= {
            n: sum(int(row[i]) for row in ledger["rows"])
            for n, i in zip(names, tokens, strict=True)
        }
    layout = metadata.get("layout")
    return facts | ({"layout": str(layout)} if layout else {})
