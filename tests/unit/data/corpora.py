"""The committed test corpora as `.bin`/`.idx` pairs, made by our own preprocessing and checked
against digests.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from megatron_lightning.data import IndexedDataset, IndexedDatasetWriter, preprocess_jsonl
from megatron_lightning.data.card import file_digest

SOURCE = Path(__file__).resolve().parents[2] / "data" / "corpora"
REFERENCE = SOURCE / "reference"


def manifest() -> dict[str, Any]:
    """Recorded digests and counts of every corpus and variant."""
    return json.loads((SOURCE / "manifest.json").read_text())


def cases(kind: str) -> list[Path]:
    """The JSON files of a kind of reference case."""
    return sorted((REFERENCE / kind).glob("*.json"))


def build(folder: Path) -> Path:
    """Writes every pair of the manifest as `folder/NAME/VARIANT_DTYPE`; returns the folder."""
    for name, entry in manifest().items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for variant in sorted(entry["variants"], reverse=True):  # uint16 first
            kind, dtype = variant.rsplit("_", 1)
            prefix = folder / name / variant
            if kind == "items":
                for suffix in (".bin", ".idx"):
                    shutil.copy(f"{SOURCE / name / variant}{suffix}", f"{prefix}{suffix}")
                continue
            lines = SOURCE / name / ("sentences.jsonl" if kind == "sent" else "text.jsonl")
            narrow = folder / name / f"{kind}_uint16"
            if not Path(f"{narrow}.idx").exists():
                preprocess_jsonl(lines, narrow, "bytes", append_eod=kind != "noeod")
            if dtype == "int32":
                widen(narrow, prefix)
    return folder


def widen(source: Path, target: Path) -> None:
    """Writes the documents of a pair again as int32."""
    data = IndexedDataset(source)
    bounds = data.document_indices
    with IndexedDatasetWriter(target, "int32") as writer:
        for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
            tokens = [token for i in range(begin, end) for token in data.get(i).tolist()]
            writer.add_document(tokens, data.sequence_lengths[begin:end].tolist())


def digests(prefix: Path) -> dict[str, str]:
    """sha256 of both files of a pair, under the manifest's names."""
    return {f"{kind}_sha256": file_digest(f"{prefix}.{kind}") for kind in ("bin", "idx")}
