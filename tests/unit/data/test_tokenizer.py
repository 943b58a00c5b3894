import json
import pickle
import sys
from pathlib import Path

import pytest

from megatron_lightning.data import ByteTokenizer, load_tokenizer, train_byte_bpe
from megatron_lightning.data.tokenizer import END_OF_TEXT

TEXT = "The quick — “ünï” 漢字 brown fox.\n\n    def f(x):\t return 1\x00"
TRAINING = ["the cat sat on the mat, the cat sat"] * 5 + ["a dog and a cat"] * 3


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    train_byte_bpe(TRAINING, 270, tmp_path / "sub" / "tokenizer.json")
    return tmp_path / "sub" / "tokenizer.json"


def test_bytes() -> None:
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (257, 256)
    assert tokenizer.encode("aé") == [97, 0xC3, 0xA9]
    assert tokenizer.decode([*tokenizer.encode(TEXT), 256]) == TEXT
    assert tokenizer.decode([0xC3]) == "�"
    assert tokenizer.encode_batch(["a", ""]) == [[97], []]


def test_trained_bpe_is_lossless_compact_and_deterministic(trained: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(trained)
    assert tokenizer.vocab_size == 270
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert len(tokenizer.encode(TRAINING[0])) < len(TRAINING[0]) / 2
    assert tokenizer.decode([*tokenizer.encode("cat"), tokenizer.eod_id]) == "cat"
    assert tokenizer.encode_batch([TEXT, "cat"]) == [tokenizer.encode(t) for t in (TEXT, "cat")]
    assert max(tokenizer.encode(TEXT)) < tokenizer.vocab_size
    again = train_byte_bpe(TRAINING, 270, tmp_path / "again.json")
    assert again.digest == tokenizer.digest
    assert train_byte_bpe(TRAINING, 265, tmp_path / "less.json").digest != tokenizer.digest
    assert load_tokenizer(trained.parent).digest == tokenizer.digest  # by folder
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.encode(TEXT) == tokenizer.encode(TEXT)
    assert [path.name for path in trained.parent.iterdir()] == ["tokenizer.json"]


def test_end_of_document_token(trained: Path) -> None:
    assert (
        load_tokenizer(trained).eod_id == json.loads(trained.read_text())["added_tokens"][0]["id"]
    )
    config = trained.with_name("tokenizer_config.json")
    config.write_text(json.dumps({"eos_token": {"content": "the"}}))
    the = load_tokenizer(trained, eod_token=END_OF_TEXT).encode("the")
    assert [load_tokenizer(trained).eod_id] == the
    config.write_text(json.dumps({"eos_token": "</s>"}))
    with pytest.raises(ValueError, match="no token </s>"):
        load_tokenizer(trained)


def test_bad_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no tokenizer file .*absent"):
        load_tokenizer(tmp_path / "absent")
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match=r"x\.json is no tokenizer\.json"):
        load_tokenizer(tmp_path / "x.json")
    with pytest.raises(ValueError, match="vocab_size=256 must be at least 257"):
        train_byte_bpe(TRAINING, 256, tmp_path / "y.json")


def test_bytes_need_no_tokenizers_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert ByteTokenizer().decode(ByteTokenizer().encode("abc")) == "abc"
    assert load_tokenizer("bytes").vocab_size == 257


def test_nothing_to_train_on_leaves_no_tokenizer(tmp_path: Path) -> None:
    for texts in ([], ["", ""]):
        with pytest.raises(ValueError, match="no text to train a tokenizer on"):
            train_byte_bpe(texts, 300, tmp_path / "tokenizer.json")
    assert list(tmp_path.iterdir()) == []
