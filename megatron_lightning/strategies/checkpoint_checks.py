"""Looks into the checkpoint of a `ckpt_path` before any rank is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule

from megatron_lightning.checkpoint import CheckpointError
from megatron_lightning.checkpoint.preflight import model_problems, read_tables

_WORDS = ("last", "best", "hpc", "registry")


def check_checkpoint_path(
    path: Any, module: LightningModule | None = None, data: Any = None, *, name: Any = None
) -> list[str]:
    """Violation of a `ckpt_path` that names nothing, something else than a checkpoint, a damaged
    one, or one of another model or tokenizer. `name`: the word that `path` has been found for.

    Only tables are read. Words such as "last" that stand for no path yet are left out.
    """
    if path is None or str(path) in _WORDS or "://" in str(path):
        return []
    given = f"ckpt_path={str(path)!r}" if name in (None, path) else f"ckpt_path={name!r} ({path})"
    if not Path(path).exists():
        return [
            f"{given}: there is no such file or folder; give the path of a "
            f"checkpoint folder, or None to start afresh"
        ]
    try:
        tables = read_tables(path)
    except (CheckpointError, OSError) as error:
        return [
            f"{given}: not a complete checkpoint folder; give one "
            f"that MegatronStrategy has saved ({error})"
        ]
    try:
        own = getattr(data, "tokenizer_digest", None)
    except (OSError, ValueError, ImportError):
        own = None  # the data module's own check says what is wrong with its tokenizer
    known = tables.objects.get("tokenizer_digest")
    if None not in (own, known) and own != known:
        return [
            f"{given}: it was trained with the tokenizer {known}, that of the data "
            f"module is {own}; use the same, or load the weights alone with load_weights"
        ]
    zoo: Any = module
    if zoo is None or not hasattr(
        zoo, "global_shapes"
    ):  # a module of the user's: as the ranks cut it
        return []
    network, prefix = zoo.build_network("meta"), f"{zoo.network_attribute}."
    parameters = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    buffers = frozenset(prefix + name for name in network.state_dict() if name not in parameters)
    try:
        elsewhere = zoo.names_elsewhere(tables.objects)
    except ValueError as error:
        return [f"{given}: {error}"]
    problems = model_problems(
        tables.index,
        {name: shape for name, shape in zoo.global_shapes().items() if name not in elsewhere},
        scope=f"model.{prefix}",
        optional=buffers,
        strict=zoo.strict_loading,
    )
    return [
        f"{given}: it holds another model: {problem}; use the config that it was saved with"
        for problem in problems
    ]
