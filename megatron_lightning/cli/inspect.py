"""`megatron-lightning inspect`: what is in a checkpoint or a corpus. Nothing is changed, and of a
checkpoint only the tables are read unless `--verify` asks for every byte.
"""

import dataclasses
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from megatron_lightning.cli.errors import Parser, UserError, wrong_input

Rows = Iterator[tuple[str, str]]


def main(arguments: list[str]) -> None:
    """Print what is at the path."""
    options = _parser().parse_args(arguments)
    path = Path(options.path)
    corpus = Path(f"{path}.idx").is_file() or Path(f"{path}.bin").is_file()
    if not corpus and not path.exists():
        raise UserError(f"{path}: neither a checkpoint folder nor {path}.bin with {path}.idx")
    from megatron_lightning.checkpoint import CheckpointError

    with wrong_input(CheckpointError):
        rows = [row for row in (_corpus(path) if corpus else _checkpoint(path, options.tensors))]
        if options.verify:
            rows.append(("verified", _verify(path, corpus)))
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name:<{width}}  {text}" for name, text in rows))


def _checkpoint(path: Path, with_tensors: bool) -> Rows:
    from megatron_lightning.checkpoint import (
        list_tensors,
        load_metadata,
        load_objects,
        read_manifest,
    )
    from megatron_lightning.checkpoint.config_codec import CODEC

    manifest, tensors = read_manifest(path), list_tensors(path)
    objects = load_objects(path, codec=CODEC)
    created = datetime.fromtimestamp(manifest.created_unix_ns / 1e9, UTC)
    yield "checkpoint", str(path)
    yield "written", f"{created:%Y-%m-%d %H:%M:%S} UTC"
    yield (
        "versions",
        f"megatron_lightning {manifest.program_version}, torch {manifest.torch_version}",
    )
    for name, value in load_metadata(path, codec=CODEC).items():
        yield name, str(value)
    size = sum(file.size for file in manifest.files.values())
    yield "size", f"{size:,} bytes in {len(manifest.files)} files"
    for kind in sorted({name.partition(".")[0] for name in tensors}):
        found = [tensors[name] for name in tensors if name.startswith(f"{kind}.")]
        elements = sum(math.prod(tensor.shape) for tensor in found)
        yield f"{kind} tensors", f"{len(found)}, {elements:,} elements"
    yield "objects", ", ".join(sorted(objects))
    for name, value in (objects.get("hyper_parameters") or {}).items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from _differences(name, value)
        elif value is not None:
            yield name, str(value)
    if with_tensors:
        for name, tensor in sorted(tensors.items()):
            yield name, f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _differences(name: str, config: object) -> Rows:
    """The fields of a config that are not at their defaults."""
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        made = field.default_factory
        default = made() if made is not dataclasses.MISSING else field.default
        if value != default:
            yield f"{name}.{field.name}", str(value)


def _corpus(path: Path) -> Rows:
    from megatron_lightning.data import IndexedDataset, read_card

    corpus, card = IndexedDataset(path), read_card(path)
    yield "corpus", f"{path}.bin, {path}.idx"
    yield "documents", f"{len(corpus.document_indices) - 1:,}"
    yield "sequences", f"{len(corpus):,}"
    yield "tokens", f"{corpus.num_tokens:,}, {corpus.dtype.name}"
    if len(corpus):
        lengths = corpus.sequence_lengths
        yield (
            "tokens a sequence",
            f"{lengths.min():,} to {lengths.max():,}, mean {lengths.mean():,.1f}",
        )
    if card is None:
        yield "data card", "none: vocabulary and origin are unknown"
        return
    yield "tokenizer", f"{card.tokenizer}, {card.vocab_size:,} ids, end of document {card.eod_id}"
    yield "tokenizer digest", card.tokenizer_digest
    for source in card.sources:
        yield "source", f"{source['path']}, {source['bytes']:,} bytes"
    yield "lines skipped", f"{card.skipped_lines:,}"
    yield "made by", f"megatron_lightning {card.package_version}, {card.arguments}"


def _verify(path: Path, corpus: bool) -> str:
    """Read every byte and compare it with the checksums; ValueError or CheckpointError if wrong."""
    if not corpus:
        from megatron_lightning.checkpoint import verify

        return f"all {len(verify(path).files)} files have their checksum"
    from megatron_lightning.data import read_card
    from megatron_lightning.data.card import file_digest

    card = read_card(path)
    if card is None:
        raise ValueError(f"{path}: there is no data card, and so no digest to compare with")
    for suffix, expected in ((".bin", card.bin_sha256), (".idx", card.idx_sha256)):
        if file_digest(f"{path}{suffix}") != expected:
            raise ValueError(f"{path}{suffix}: its digest is not the one of the data card")
    return "both files have the digests of the data card"


def _parser() -> Parser:
    parser = Parser("inspect", "Say what is in a checkpoint folder or a corpus.")
    add = parser.add_argument
    add("path", help="checkpoint folder, or path of a .bin/.idx pair without suffix")
    add("--tensors", action="store_true", help="list every tensor of a checkpoint")
    add("--verify", action="store_true", help="read everything and compare checksums")
    return parser
