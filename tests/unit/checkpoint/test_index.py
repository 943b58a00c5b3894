"""The table of contents: exact round trip, and every damaged entry named."""

import json
from typing import Any

import pytest
import torch

from megatron_lightning.checkpoint import Box, CheckpointError
from megatron_lightning.checkpoint.index import (
    StoredBox,
    StoredTensor,
    dtype_name,
    index_from_json,
    index_to_json,
)

INDEX = {
    'w "quoted" é': StoredTensor(
        torch.bfloat16,
        (3, 4),
        (
            StoredBox(Box((0, 0), (1, 4)), "data/rank_00000.bin", 64, 8, 0xDEADBEEF),
            StoredBox(Box((1, 0), (2, 4)), "data/rank_00001.bin", 128, 16, 1),
        ),
    ),
    "s": StoredTensor(torch.int64, (), (StoredBox(Box((), ()), "data/rank_00000.bin", 192, 8, 0),)),
}


def test_round_trip() -> None:
    data = index_to_json(INDEX)
    assert index_from_json(data, "metadata.json") == INDEX
    assert data.count(b"\n") == 4  # a line a tensor


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "object"},
        {"shape": [3]},
        {"shape": [3, 3]},
        {"shape": [4, 4]},
        {"boxes": []},
        {"boxes": None},
        {"file": "../../etc/passwd"},
        {"file": "/etc/passwd"},
        {"file": ""},
        {"start": -1},
        {"length": 9},
        {"crc32": "xyz"},
        {"offsets": [0]},
        {"sizes": [1, 5]},
    ],
    ids=str,
)
def test_damaged_entries_are_named(change: dict[str, Any]) -> None:
    table = json.loads(index_to_json(INDEX))
    entry = table["tensors"]['w "quoted" é']
    (entry if set(change) & set(entry) else entry["boxes"][0]).update(change)
    with pytest.raises(
        CheckpointError, match='here.json: the entry of tensor .w "quoted" é. is damaged'
    ):
        index_from_json(json.dumps(table).encode(), "here.json")


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x04.", b"[]", b"{}", b'{"format_version": 1, "tensors": 3}']
)
def test_other_contents_are_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="here.json is not a table of tensors"):
        index_from_json(data, "here.json")


def test_other_versions_are_refused() -> None:
    with pytest.raises(CheckpointError, match="format version 9; this program reads 1"):
        index_from_json(b'{"format_version": 9, "tensors": {}}', "here.json")


def test_quantised_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="qint8 cannot be stored"):
        dtype_name(torch.qint8)
