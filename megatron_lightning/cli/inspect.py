"""`megatron-lightning inspect`: what is in a checkpoint or a corpus. Nothing is changed, and of a
checkpoint only the tables are read unless `--verify` asks for every byte.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from megatron_lightning.cli.data import show
from megatron_lightning.cli.errors import Parser, UserError, wrong_input
from megatron_lightning.cli.inspect_checkpoint import checkpoint_rows, describe_checkpoint

Found = tuple[dict[str, Any], list[tuple[str, str]]]
"""As one JSON object, and as lines of text."""


def main(arguments: list[str]) -> None:
    """Print what is at the path."""
    options = _parser().parse_args(arguments)
    path = Path(options.path)
    corpus = Path(f"{path}.idx").is_file() or Path(f"{path}.bin").is_file()
    if not corpus and not path.exists():
        raise UserError(
            f"{path}: neither a checkpoint folder nor {path}.bin with {path}.idx; give the path of"
            " one of them"
        )
    if not corpus and path.is_file():
        raise UserError(f"{path} is a file; {_instead_of_file(path)}")
    from megatron_lightning.checkpoint import CheckpointError

    with wrong_input(CheckpointError):
        found, rows = _corpus(path) if corpus else _checkpoint(path, options.tensors)
        if options.verify:
            found["verified"] = _verify(path, corpus)
            rows.append(("verified", found["verified"]))
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        show(rows)


def _instead_of_file(path: Path) -> str:
    from megatron_lightning.checkpoint.manifest import pickle_note

    if path.suffix in (".bin", ".idx"):
        return f"give the path of a corpus without suffix: {path.with_suffix('')}"
    with wrong_input(), path.open("rb") as file:
        note = pickle_note(file.read(4))
    if note or path.suffix == ".safetensors":
        return "`megatron-lightning convert` makes a checkpoint folder of it, which is shown"
    return "give a checkpoint folder, or the path of a corpus without suffix"


def _corpus(path: Path) -> Found:
    from megatron_lightning.data.indexed import corpus_info

    info = corpus_info(path)
    return dataclasses.asdict(info), list(info.rows())


def _checkpoint(path: Path, with_tensors: bool) -> Found:
    found = describe_checkpoint(path)
    return found, list(checkpoint_rows(found, with_tensors=with_tensors))


def _verify(path: Path, corpus: bool) -> str:
    """Read every byte and compare it with the checksums; ValueError or CheckpointError if wrong."""
    if not corpus:
        from megatron_lightning.checkpoint import verify

        return f"all {len(verify(path).files)} files have their checksum"
    from megatron_lightning.data.indexed import check_digests

    check_digests(path)
    return "both files have the digests of the data card"


def _parser() -> Parser:
    parser = Parser("inspect", "Say what is in a checkpoint folder or a corpus.")
    add = parser.add_argument
    add("path", help="checkpoint folder, or path of a .bin/.idx pair without suffix")
    add("--tensors", action="store_true", help="list every tensor of a checkpoint")
    add("--verify", action="store_true", help="read everything and compare checksums")
    add("--json", action="store_true", help="print one JSON object, all tensors included")
    return parser
