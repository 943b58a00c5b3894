"""Corpora written by our preprocessing are, byte for byte, the files that Megatron-Core wrote."""

from pathlib import Path

import numpy as np
import pytest

from megatron_lightning.data import (
    IndexedDataset,
    IndexedDatasetWriter,
    PreprocessOptions,
    open_files,
    preprocess,
)
from tests.unit.data.corpora import build, digests, manifest

VARIANTS = [(name, v) for name, entry in manifest().items() for v in entry["variants"]]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("corpora"))


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_pair_has_the_recorded_digests_and_counts(corpora: Path, name: str, variant: str) -> None:
    expected = manifest()[name]["variants"][variant]
    prefix = corpora / name / variant
    data = IndexedDataset(prefix)
    assert digests(prefix) == {key: expected[key] for key in ("bin_sha256", "idx_sha256")}
    assert len(data) == expected["sequences"]
    assert len(data.document_indices) == expected["documents"] + 1
    assert data.num_tokens == expected["tokens"]


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_megatron_files_are_read_and_rewritten_unchanged(
    golden: Path, tmp_path: Path, name: str, variant: str
) -> None:
    prefix = golden / "data" / "corpora" / name / variant
    data = IndexedDataset(prefix)
    stored = np.load(prefix.with_name(f"{variant.rsplit('_', 1)[0]}.npz"))
    assert np.array_equal(data.sequence_lengths, stored["sequence_lengths"])
    assert np.array_equal(data.document_indices, stored["document_indices"])
    tokens = np.concatenate([data.get(i) for i in range(len(data))])
    assert np.array_equal(tokens, stored["tokens"])
    bounds = data.document_indices
    with IndexedDatasetWriter(tmp_path / "again", data.dtype) as writer:
        at = 0
        for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
            lengths = data.sequence_lengths[begin:end].tolist()
            writer.add_document(tokens[at : at + sum(lengths)], lengths)
            at += sum(lengths)
    assert digests(tmp_path / "again") == digests(prefix)


@pytest.mark.parametrize("name", [name for name in manifest() if name != "exact"])
def test_parts_and_workers_give_megatrons_files(golden: Path, tmp_path: Path, name: str) -> None:
    folder = golden / "data" / "corpora" / name
    for kind, source in (("doc", "text"), ("noeod", "text"), ("sent", "sentences")):
        if f"{kind}_uint16" not in manifest()[name]["variants"]:
            continue
        expected = digests(folder / f"{kind}_uint16")
        sources = open_files([folder / f"{source}.jsonl"], "jsonl", ["text"])
        for workers, partitions in ((1, 5), (3, 1), (2, 2)):
            options = PreprocessOptions(
                append_eod=kind != "noeod", workers=workers, partitions=partitions
            )
            preprocess(sources, tmp_path / "out", "bytes", options)
            assert digests(tmp_path / "out") == expected
