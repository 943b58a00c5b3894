"""Random damage to a pair: what is read is what an independent parser reads, or one ValueError that
names a file. Never another exception, a crash, or data that are not there.
"""

import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megatron_lightning.data import IndexedDataset, IndexedDatasetWriter
from megatron_lightning.data.indexed.format import DTYPE_CODES

QUICK = settings(
    max_examples=400,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
)

documents = st.lists(
    st.lists(st.lists(st.integers(0, 255), max_size=6), max_size=3), min_size=0, max_size=5
)
damages = st.lists(
    st.tuples(
        st.sampled_from(["idx", "bin"]),
        st.sampled_from(["overwrite", "cut", "append", "insert", "remove"]),
        st.integers(0, 400),
        st.binary(min_size=1, max_size=9),
    ),
    min_size=0,
    max_size=3,
)


def spoil(content: bytes, how: str, at: int, value: bytes) -> bytes:
    at = min(at, len(content))
    if how == "overwrite":
        return content[:at] + value[: len(content) - at] + content[at + len(value) :]
    if how == "cut":
        return content[:at]
    if how == "append":
        return content + value
    if how == "insert":
        return content[:at] + value + content[at:]
    return content[:at] + content[at + len(value) :]


def parse(idx: bytes, tokens: bytes) -> tuple[list[bytes], list[int]] | None:
    """Sequences and boundaries of a pair by the format's description; None if it is not one."""
    if len(idx) < 34 or idx[:9] != b"MMIDIDX\x00\x00":
        return None
    version, code, sequences, boundaries = struct.unpack("<QBQQ", idx[9:34])
    if version != 1 or code not in DTYPE_CODES:
        return None
    if len(idx) != 34 + 12 * sequences + 8 * boundaries:
        return None
    numbers = struct.unpack(f"<{sequences}i{sequences}q{boundaries}q", idx[34:])
    lengths, pointers = numbers[:sequences], numbers[sequences : 2 * sequences]
    bounds = list(numbers[2 * sequences :])
    size, at, parts = DTYPE_CODES[code].itemsize, 0, []
    for length, pointer in zip(lengths, pointers, strict=True):
        if length < 0 or pointer != at:
            return None
        parts.append(tokens[at : at + length * size])
        at += length * size
    if at != len(tokens) or not bounds or bounds[0] != 0 or bounds[-1] != sequences:
        return None
    return (parts, bounds) if bounds == sorted(bounds) else None


@given(
    documents,
    st.sampled_from(["u1", "u2", "i4", "i8"]),
    damages,
    st.sampled_from(["mmap", "file"]),
)
@example([[[1, 2]], [[3]]], "i4", [("idx", "overwrite", 66, b"\xff" * 7 + b"\x7f")], "mmap")
@QUICK
def test_damaged_pairs_are_read_rightly_or_refused(
    content: list[list[list[int]]],
    dtype: str,
    spoils: list[tuple[str, str, int, bytes]],
    access: str,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "corpus"
        with IndexedDatasetWriter(prefix, dtype) as writer:
            for document in content:
                flat = np.array([token for part in document for token in part], np.int64)
                writer.add_document(flat, [len(part) for part in document])
        files = {kind: Path(f"{prefix}.{kind}").read_bytes() for kind in ("idx", "bin")}
        for kind, how, at, value in spoils:
            files[kind] = spoil(files[kind], how, at, value)
        for kind, raw in files.items():
            Path(f"{prefix}.{kind}").write_bytes(raw)

        expected = parse(files["idx"], files["bin"])
        if expected is None:
            with pytest.raises(ValueError, match=r"corpus\.(idx|bin)"):
                IndexedDataset(prefix, access=access)  # type: ignore[arg-type]
            return
        data = IndexedDataset(prefix, access=access)  # type: ignore[arg-type]
        assert [part.tobytes() for part in data[:]] == expected[0]
        assert data.document_indices.tolist() == expected[1]


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=6),
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5),
)
@example([0, 2**63 - 1, -5, 0], [])  # differences that wrap around look like a rise
@QUICK
def test_made_up_numbers_in_a_well_formed_index(bounds: list[int], lengths: list[int]) -> None:
    pointers, at = [], 0
    for length in lengths:
        pointers.append(at)
        at += length
    raw = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 1, len(lengths), len(bounds))
    raw += struct.pack(f"<{len(lengths)}i{len(lengths)}q", *lengths, *pointers)
    raw += struct.pack(f"<{len(bounds)}q", *bounds)
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "corpus"
        Path(f"{prefix}.idx").write_bytes(raw)
        Path(f"{prefix}.bin").write_bytes(b"")
        if parse(raw, b"") is None:
            with pytest.raises(ValueError, match=r"corpus\.(idx|bin)"):
                IndexedDataset(prefix)
        else:
            assert IndexedDataset(prefix).num_tokens == 0
