"""Names in the config file of a training run that nothing takes, for the commands that only read
it: `fit` itself leaves them to its parser.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl

from megatron_lightning.cli.errors import UserError
from megatron_lightning.config.names import arguments_of, meant, remedy
from megatron_lightning.data import PretrainingDataModule
from megatron_lightning.models.gpt import GPTModel

SECTIONS = ("trainer", "model", "data", "seed_everything", "ckpt_path", "weights_only")
_OF_OTHERS = ("verbose", "return_predictions", "optimizer", "lr_scheduler")
"""What `validate`, `test`, `predict` and command lines of a user's own take besides."""
_KINDS: Mapping[str, type] = {
    "trainer": pl.Trainer,
    "model": GPTModel,
    "data": PretrainingDataModule,
}
"""What takes a section that names no class."""


def check_names(content: Mapping[str, Any], path: str) -> None:
    """Raise UserError for sections, and names in them, that there are not."""
    problems = []
    for name in content:
        if name not in (*SECTIONS, *_OF_OTHERS):
            near = meant(name, SECTIONS)
            end = f"do you mean {near[0]}?" if near else f"there are {', '.join(SECTIONS)}"
            problems.append(f"{path}: {name}: there is no such section; {end}")
    for section, kind in _KINDS.items():
        values = content.get(section)
        if not isinstance(values, Mapping) or "class_path" in values:
            continue
        known = arguments_of(kind)
        problems += [
            f"{path}: {section}.{name}: there is no such option;"
            f" {remedy(kind, name, f'{section}.')}"
            for name in values
            if known and name not in known
        ]
    if problems:
        raise UserError("\n".join(problems))
