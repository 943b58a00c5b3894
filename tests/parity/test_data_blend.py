"""Order and content of blended data sets, bit for bit those of Megatron-Core."""

import hashlib
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from megatron_lightning.data import (
    BlendedDataset,
    GPTDataset,
    IndexedDataset,
    build_blend,
    build_blend_index,
    build_exhaustive_index,
    split_ranges,
)
from tests.unit.data.corpora import REFERENCE, build, cases

PARTS = ("train", "valid", "test")
HELPERS = [
    case
    for case in json.loads((REFERENCE / "helpers" / "helpers.json").read_text())
    if "blending" in case["function"]
]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("corpora"))


def make(indexed: IndexedDataset, sequences: range, case: dict, samples: int | None) -> GPTDataset:
    return GPTDataset(indexed, sequences, samples, case["seq_length"], case["seed"], eod_id=256)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("path", cases("blend"), ids=lambda path: path.stem)
def test_blend(corpora: Path, path: Path, part: str) -> None:
    case = json.loads(path.read_text())
    stored = np.load(path.with_suffix(".npz"))
    number, expected = PARTS.index(part), case["expected"][part]
    blend = case["blend"] if "blend" in case else case["blend_per_split"][number]
    if expected is None:
        assert blend is None
        return
    names, weights = blend
    builders = []
    for name in names:
        indexed = IndexedDataset(corpora / name)
        whole = range(len(indexed))
        sequences = split_ranges(case["split"], len(indexed))[number] if "split" in case else whole
        builders.append(partial(make, indexed, sequences, case))
    surplus = case.get("mid_level_dataset_surplus", 0.005)
    ours = build_blend(builders, weights, case["sizes"][number], names=names, surplus=surplus)

    assert len(ours) == expected["length"]
    if expected["class"] == "gpt":
        assert isinstance(ours, GPTDataset)
        return
    assert isinstance(ours, BlendedDataset)
    assert np.array_equal(ours.dataset_index, stored[f"{part}_dataset_index"])
    assert np.array_equal(ours.dataset_sample_index, stored[f"{part}_dataset_sample_index"])
    assert ours.counts.tolist() == expected["counts"]
    for j, (source, level) in enumerate(zip(ours.sources, expected["mid_level"], strict=True)):
        assert isinstance(source, GPTDataset)
        assert len(source) == level["length"]
        for name in ("document_index", "sample_index", "shuffle_index"):
            if f"{part}_{j}_{name}" in stored:
                assert np.array_equal(getattr(source, name), stored[f"{part}_{j}_{name}"])
    tokens = [ours[i]["tokens"].numpy() for i in range(min(40, len(ours)))]
    assert np.array_equal(np.stack(tokens), stored[f"{part}_tokens"])
    hashes = [hashlib.sha256(row.astype("<i8").tobytes()).hexdigest() for row in tokens]
    assert hashes == expected["token_sha256"]


@pytest.mark.parametrize("case", HELPERS, ids=lambda case: case["id"])
def test_blend_index(case: dict) -> None:
    stored = np.load(REFERENCE / "helpers" / "helpers.npz")
    if case["function"] == "build_blending_indices":
        ours = build_blend_index(case["weights"], case["size"])
    else:
        ours = build_exhaustive_index(case["sizes"])
    assert ours.dataset_index.dtype == np.int16
    assert np.array_equal(ours.dataset_index, stored[f"{case['id']}_dataset_index"])
    assert np.array_equal(ours.dataset_sample_index, stored[f"{case['id']}_dataset_sample_index"])
