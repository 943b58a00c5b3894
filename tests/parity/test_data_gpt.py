"""Index arrays and samples of GPT data sets, bit for bit those of Megatron-Core."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from megatron_lightning.data import (
    GPTDataset,
    IndexedDataset,
    build_sample_index,
    split_ranges,
)
from tests.unit.data.corpora import REFERENCE, build, cases

PARTS = ("train", "valid", "test")
FIELDS = ("tokens", "labels", "position_ids", "loss_mask")
HELPERS = [
    case
    for case in json.loads((REFERENCE / "helpers" / "helpers.json").read_text())
    if case["function"] == "build_sample_idx"
]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("corpora"))


def make(case: dict, part: str, indexed: IndexedDataset) -> GPTDataset:
    options = case["options"]
    keep_last = options.get("drop_last_partial_validation_sequence") is False
    return GPTDataset(
        indexed,
        split_ranges(case["split"], len(indexed))[PARTS.index(part)],
        case["num_samples"][PARTS.index(part)],
        case["seq_length"],
        case["seed"],
        eod_mask_loss=options.get("eod_mask_loss", False),
        # Megatron restarts positions per document for packed attention as well.
        reset_position_ids=options.get("reset_position_ids", False)
        or options.get("inter_document_masking", False),
        reset_attention_mask=options.get("reset_attention_mask", False)
        or options.get("inter_document_masking", False),
        eod_id=256,
        pad_id=options.get("pad"),
        add_extra_token=options.get("add_extra_token_to_sequence", True),
        drop_last=not (keep_last and part == "valid"),
    )


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("path", cases("gpt"), ids=lambda path: path.stem)
def test_gpt_dataset(corpora: Path, path: Path, part: str) -> None:
    case = json.loads(path.read_text())
    stored = np.load(path.with_suffix(".npz"))
    expected = case["expected"][part]
    indexed = IndexedDataset(corpora / case["corpus"])
    sequences = split_ranges(case["split"], len(indexed))[PARTS.index(part)]
    if expected is None:
        assert len(sequences) == 0
        return
    bounds = [sequences.start, sequences.stop] if len(sequences) else []
    assert bounds == expected["sequences"]

    data = make(case, part, indexed)
    assert len(data) == expected["length"]
    assert data.tokens_per_epoch == expected["tokens_per_epoch"]
    plan = data.epoch_plan
    assert plan.num_epochs == expected["num_epochs"]
    if plan.num_epochs > 1:
        assert plan.separate_final_epoch == expected["separate_final_epoch"]
        assert plan.samples_before_final_epoch == expected["samples_before_final_epoch"]

    for name in ("document_index", "sample_index", "shuffle_index"):
        if f"{part}_{name}" in stored:
            ours = getattr(data, name)
            assert ours.dtype == stored[f"{part}_{name}"].dtype
            assert np.array_equal(ours, stored[f"{part}_{name}"]), name
    if f"{part}_sample_ids" in stored:
        for row, index in enumerate(stored[f"{part}_sample_ids"].tolist()):
            sample = data[index]
            for field in FIELDS:
                assert np.array_equal(sample[field], stored[f"{part}_{field}"][row]), (index, field)
            if f"{part}_cu_seqlens" in stored:
                boundaries = sample["cu_seqlens"]
                assert np.array_equal(boundaries, stored[f"{part}_cu_seqlens"][row])
                assert boundaries.diff().max() == stored[f"{part}_max_seqlen"][row]
            if f"{part}_attention_mask" in stored:
                hidden = ~allowed_by(sample["cu_seqlens"].numpy())
                assert np.array_equal(hidden, stored[f"{part}_attention_mask"][row, 0])
    if "all_tokens_sha256" in expected:
        digest = hashlib.sha256()
        for index in range(len(data)):
            digest.update(data[index]["tokens"].numpy().tobytes())
        assert digest.hexdigest() == expected["all_tokens_sha256"]


def allowed_by(boundaries: np.ndarray) -> np.ndarray:
    """Which of (S, S) positions are seen: earlier ones of the same document."""
    length = int(boundaries[-1])
    document = np.searchsorted(boundaries[1:], np.arange(length), side="right")
    return np.tril(document[:, None] == document[None, :])


@pytest.mark.parametrize("case", HELPERS, ids=lambda case: case["id"])
def test_sample_index(case: dict) -> None:
    stored = np.load(REFERENCE / "helpers" / "helpers.npz")
    ours = build_sample_index(
        stored[f"{case['id']}_sizes"],
        stored[f"{case['id']}_document_index"],
        case["seq_length"],
        extra=int(case["extra"]),
        drop_last=case["drop_last"],
    )
    assert ours.dtype == np.int32
    assert np.array_equal(ours, stored[f"{case['id']}_result"])
