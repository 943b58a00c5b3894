"""Whether a folder that was written is the model: its tensors read back, its logits compared."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.bridge.load import from_hf
from megatron_lightning.bridge.progress import Bar
from megatron_lightning.bridge.safetensors_files import BLOCK
from megatron_lightning.bridge.writing import Export, Held
from megatron_lightning.checkpoint import Box, CheckpointError
from megatron_lightning.models import GPTModel
from megatron_lightning.utils.logging import get_logger

TOLERANCE = 1e-3
"""Largest difference of logits in float32, in units of the largest logit."""
_PROMPT, _STRIDE = 16, 7919


def verify_tensors(export: Export, held: Held, bar: Bar | None = None) -> None:
    """Read this rank's share back as an import does, by config.json and the files' headers, and
    compare it bitwise with what is held. Takes part in no collective.

    Raises CheckpointError naming the first tensor that differs.
    """
    folder = export.files.folder
    try:
        source: Any = from_hf(folder).initial_values
    except ValueError as error:
        told = str(error).replace(str(folder), str(export.path))  # its name is to come
        raise CheckpointError(f"verifying {export.path}: it can't be read: {told}") from error
    try:
        for ours, share in export.mine.items():
            if ours not in source.table.entries:
                raise CheckpointError(f"verifying {export.path}: it has no {ours}")
            entry = source.table.entries[ours]
            for box in (part for whole in share for part in _parts(whole)):
                values = held.values(ours, box)
                for piece in (part for p in entry.pieces if (part := p.cut(box)) is not None):
                    stored = source.tensors[entry.names[piece.source]].seen_as(piece.view)
                    found = torch.empty(piece.theirs.sizes, dtype=stored.dtype)
                    source.reader.read(stored, piece.theirs, found)
                    wanted = values[piece.ours.shift(box.offsets, sign=-1).slices()]
                    wanted = piece.to_theirs(wanted).to("cpu", stored.dtype)
                    if not torch.equal(_bytes(found), _bytes(wanted)):
                        raise CheckpointError(
                            f"verifying {export.path}: {entry.names[piece.source]} differs from"
                            f" {ours} at {list(box.offsets)}"
                        )
                    if bar is not None:
                        bar.update(found.nbytes)
    finally:
        source.done()


def _parts(box: Box) -> list[Box]:
    """The box in parts of about `BLOCK` bytes."""
    pieces = box.cut(2) if 4 * box.numel > BLOCK else [box]
    return [box] if len(pieces) == 1 else [part for piece in pieces for part in _parts(piece)]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def verify_logits(folder: Path, name: Path | None = None) -> float | None:
    """Compare the logits that transformers and this package compute in float32 from `folder` for a
    fixed prompt; the largest difference, in units of the largest logit. `name`: what messages call
    the folder (by default its path).

    None where transformers isn't there or memory doesn't suffice, which is logged. Raises
    CheckpointError where they differ.
    """
    log, name = get_logger(__name__), folder if name is None else name
    if find_spec("transformers") is None:
        log.warning("%s: logits not compared, transformers is not installed", name)
        return None
    ours = from_hf(folder)
    assert isinstance(ours, GPTModel)
    needed = 2 * 4 * ours.config.num_parameters()
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > free:
        log.warning("%s: logits not compared, it takes %d bytes of memory", name, needed)
        return None
    length = min(_PROMPT, ours.config.max_position_embeddings)
    tokens = (torch.arange(2 * length) * _STRIDE % ours.config.vocab_size).view(2, length)
    ours.eval()  # GPT-2 as it is published has dropout
    with torch.no_grad():
        mine: Tensor = ours(tokens)
    del ours
    theirs = _transformers_logits(folder, tokens)
    difference = float((mine - theirs).abs().max() / theirs.abs().max())
    if not difference <= TOLERANCE:
        raise CheckpointError(
            f"verifying {name}: transformers computes other logits, they differ by"
            f" {difference:.1e} of the largest one"
        )
    log.info("%s: logits as those of transformers, within %.1e", name, difference)
    return difference


def _transformers_logits(folder: Path, tokens: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    with torch.no_grad():
        return model.float().eval()(tokens).logits
