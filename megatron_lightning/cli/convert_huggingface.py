"""The part of `megatron-lightning convert` that reads and writes Hugging Face folders."""

from __future__ import annotations

import math
from argparse import Namespace
from pathlib import Path
from typing import Any

from megatron_lightning.cli.errors import UserError, wrong_input

KIND = "huggingface"
EXPORT_ONLY = ("architecture", "tokenizer", "shard_size", "verify", "push_to_hub", "adapters")
_NOT_HERE = ("moments_dtype", "config", "preset", "like", "vocab_size")


def concerns(options: Namespace) -> bool:
    """Whether source or target is a Hugging Face folder."""
    return KIND in (_source_kind(options), options.target_kind)


def add_options(parser: Any) -> None:
    """Options of exports."""
    add = parser.add_argument_group("with --to huggingface").add_argument
    add("--architecture", metavar="TYPE", help="model_type to write (default: as it came, or fits)")
    add(
        "--tokenizer",
        metavar="FILE",
        help="tokenizer.json that goes with the model, or a folder whose tokenizer files are copied"
        " (default: as it came)",
    )
    add("--shard-size", type=float, metavar="GB", help="largest file, in 10^9 bytes (default: 5)")
    add(
        "--verify",
        action="store_true",
        default=None,
        help="read all tensors back; compare logits with those of transformers, if installed",
    )
    add(
        "--adapters",
        choices=("merge", "leave"),
        help="of a run with low-rank adapters: add them to the weights, or write the base alone",
    )
    add("--push-to-hub", metavar="REPO", help="upload the folder to this repository of the hub")


def convert(options: Namespace) -> None:
    """Import or export, and say what was written."""
    from megatron_lightning.bridge.tokenizer_files import has_tokenizer
    from megatron_lightning.checkpoint import CheckpointError

    kinds = (_source_kind(options), options.target_kind)
    importing = kinds[0] == KIND
    if kinds not in ((KIND, None), (KIND, "native"), (None, KIND), ("native", KIND)):
        raise UserError(
            f"from {kinds[0] or 'native'} to {kinds[1] or 'native'}: a Hugging Face folder is"
            " converted from or to a native checkpoint; convert in two steps"
        )
    unused = [*_NOT_HERE, *(EXPORT_ONLY if importing else ())]
    given = [name for name in unused if getattr(options, name) is not None]
    given += ["allow_pickle"] if options.allow_pickle else []
    given += ["files"] if not importing and options.files != 1 else []
    if given:
        names = ", ".join("--" + name.replace("_", "-") for name in given)
        raise UserError(f"{names}: without a meaning in this conversion; leave it out")
    with wrong_input(CheckpointError):
        weights = _import(options) if importing else _export(options)
    read = "; read back, they are equal" if options.verify else ""
    if not importing and not has_tokenizer(options.target):
        read += "; without a tokenizer, which --tokenizer FILE adds"
    print(f"{options.target}: {weights} tensors of weights, from {options.source}{read}")


def _import(options: Namespace) -> int:
    """Import; the number of tensors that were written."""
    from megatron_lightning.bridge import import_checkpoint

    content = import_checkpoint(
        options.source, options.target, dtype=_dtype(options), files=options.files
    )
    return sum(name.startswith("model.") for name in content.tensors)


def _export(options: Namespace) -> int:
    """Export; the number of tensors that were written."""
    from megatron_lightning.bridge import ExportOptions, export_checkpoint
    from megatron_lightning.bridge.folder import open_folder

    size: dict[str, Any] = {}
    if options.shard_size is not None:
        if not 1e-9 <= options.shard_size < math.inf:
            raise UserError(f"--shard-size {options.shard_size:g}: give gigabytes, more than 0")
        size["max_shard_bytes"] = int(options.shard_size * 1e9)
    how = ExportOptions(
        dtype=_dtype(options),
        architecture=options.architecture,
        tokenizer=options.tokenizer,
        verify=bool(options.verify),
        push_to_hub=options.push_to_hub,
        merge_adapters=None if options.adapters is None else options.adapters == "merge",
        **size,
    )
    export_checkpoint(options.source, options.target, how)
    return len(open_folder(options.target).tensors)


def _dtype(options: Namespace) -> Any:
    import torch

    return None if options.dtype is None else getattr(torch, options.dtype)


def _source_kind(options: Namespace) -> str | None:
    if options.source_kind is not None:
        return options.source_kind
    source = Path(options.source)
    native = (source / "manifest.json").is_file()
    return KIND if (source / "config.json").is_file() and not native else None
