"""Whatever stands in a file of JSON lines: the right corpus, or a message with file and line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megatron_lightning.data import (
    IndexedDataset,
    PreprocessOptions,
    open_files,
    preprocess,
)
from megatron_lightning.data.preprocessing import files

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)
LINES = st.one_of(
    st.binary(max_size=30),
    st.text(max_size=20).map(lambda text: json.dumps({"text": text}).encode()),
    st.text(max_size=20).map(
        lambda t: json.dumps({"text": t}, ensure_ascii=False).encode("utf-8", "surrogatepass")
    ),
    st.lists(st.text(max_size=5), max_size=4).map(lambda v: json.dumps({"text": v}).encode()),
    VALUES.map(lambda value: json.dumps({"text": value}).encode()),
    VALUES.map(lambda value: json.dumps(value).encode()),
    st.integers(1, 5000).map(lambda n: json.dumps({"text": "x" * n}).encode()),
    st.sampled_from([b"", b"  ", b"\r", b"\x00", b"[" * 3000, b'{"text": ' * 3000, b"1" * 5000]),
    st.sampled_from([rb'{"text": "\ud800"}', rb'{"text": "\ud83d\ude00"}', b"\xef\xbb\xbf{}"]),
    st.sampled_from([b'{"text": "a", "text": "b"}', b'{"text": NaN}', b'{"text": "a"} {}']),
).map(lambda line: line.replace(b"\n", b" "))


def reference(line: bytes) -> list[str] | None:
    """The texts of a line by plain means; None for a bad line."""
    try:
        record = json.loads(line.decode("utf-8").removeprefix("\ufeff"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or "text" not in record:
        return None
    value: Any = record["text"]
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        return None
    try:
        [text.encode() for text in texts]
    except UnicodeEncodeError:
        return None
    return texts


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(lines=st.lists(LINES, min_size=1, max_size=8), block=st.integers(1, 200))
@example(lines=[rb'{"text": "\ud800"}'], block=10)
@example(lines=[b"[" * 100_000], block=10)
def test_lines(tmp_path: Path, lines: list[bytes], block: int) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    numbered = [
        (number, reference(line))
        for number, line in enumerate(lines, start=1)
        if line and not line.isspace()
    ]
    bad = [number for number, texts in numbered if texts is None]
    good = [texts for _, texts in numbered if texts is not None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "BLOCK_BYTES", block)
        sources = open_files([path], "auto", ["text"])
        if bad:
            with pytest.raises(ValueError, match=re.escape(f"{path}:{bad[0]}: ")):
                preprocess(sources, tmp_path / "out", "bytes", PreprocessOptions())
        skip = PreprocessOptions(on_bad_line="skip")
        if not good:
            with pytest.raises(ValueError, match=rf"no document in .* \({len(bad)} lines skipped"):
                preprocess(sources, tmp_path / "out", "bytes", skip)
            return
        [card] = preprocess(sources, tmp_path / "out", "bytes", skip)
    assert (card.documents, card.skipped_lines) == (len(good), len(bad))
    data = IndexedDataset(tmp_path / "out")
    assert [data[i].tolist() for i in range(len(data))] == [
        list(text.encode()) for texts in good for text in texts if text
    ]
    bounds = data.document_indices.tolist()
    assert [b - a for a, b in zip(bounds, bounds[1:], strict=False)] == [
        sum(map(bool, texts)) for texts in good
    ]
