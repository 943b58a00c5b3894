"""SentencePiece, tiktoken and hub tokenizers: the ids of the libraries, special tokens, digests."""

import base64
import json
import pickle
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Fast

from megatron_lightning.data import load_tokenizer, python_help_texts, train_byte_bpe
from megatron_lightning.data.tokenizer import SentencePieceTokenizer, TiktokenTokenizer

TEXTS = ["The quick — “ünï” 漢字 brown fox.\n\n    def f(x):\t return 1", "", " a  b ", "<s></s>"]
GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = pytest.importorskip("sentencepiece")
    path = tmp_path_factory.mktemp("sp") / "tokenizer.model"
    with path.open("wb") as out:
        library.SentencePieceTrainer.train(
            sentence_iterator=iter(" ".join(python_help_texts()[:8]).split("\n")),
            model_writer=out,
            vocab_size=400,
            byte_fallback=True,
            pad_id=3,
            minloglevel=2,
        )
    return path


def test_sentence_piece_ids(sentence_piece: Path) -> None:
    import sentencepiece

    reference = sentencepiece.SentencePieceProcessor(model_file=str(sentence_piece))
    tokenizer = load_tokenizer(sentence_piece)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    texts = [*TEXTS, *python_help_texts()[:5]]
    assert tokenizer.encode_batch(texts) == [reference.encode(text) for text in texts]
    assert [tokenizer.encode(text) for text in texts] == tokenizer.encode_batch(texts)
    assert tokenizer.vocab_size == reference.vocab_size() == 400
    assert tokenizer.eod_id == reference.eos_id() == 2
    assert tokenizer.special_ids == {"eod": 2, "bos": 1, "eos": 2, "unk": 0, "pad": 3}
    ids = tokenizer.encode(texts[-1])
    assert tokenizer.decode([1, *ids, 2]) == reference.decode(ids)
    assert load_tokenizer(sentence_piece.parent).digest == tokenizer.digest  # by folder
    assert pickle.loads(pickle.dumps(tokenizer)).encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])
    assert load_tokenizer(sentence_piece, eod_token="<s>").eod_id == 1
    with pytest.raises(ValueError, match=r"tokenizer\.model has no <end>"):
        load_tokenizer(sentence_piece, eod_token="<end>")


def test_bad_sentence_piece_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sentencepiece")
    path = tmp_path / "x.model"
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"x\.model is no SentencePiece model"):
        load_tokenizer(path)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ImportError, match=r"pip install megatron-lightning\[tokenizers\]"):
        load_tokenizer(path)


@pytest.fixture
def tiktoken_file(tmp_path: Path) -> Path:
    """A vocabulary of all bytes and the merges of a small BPE, in tiktoken's format."""
    pytest.importorskip("tiktoken")
    from tokenizers import pre_tokenizers

    trained = train_byte_bpe(python_help_texts()[:8], 600, tmp_path / "tokenizer.json")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    of_byte = dict(zip(printable, map(chr, printable), strict=True))
    others = [value for value in range(256) if value not in of_byte]
    of_byte |= {value: chr(256 + number) for number, value in enumerate(others)}
    assert sorted(of_byte.values()) == letters
    of_letter = {letter: value for value, letter in of_byte.items()}
    vocabulary = Fast.from_file(trained.name).get_vocab(with_added_tokens=False)
    ranks = {
        bytes(of_letter[letter] for letter in token): number - 1  # without <|endoftext|>, id 0
        for token, number in vocabulary.items()
        if token != "<|endoftext|>"
    }
    path = tmp_path / "small.tiktoken"
    path.write_bytes(
        b"".join(
            base64.b64encode(token) + b" %d\n" % rank
            for token, rank in sorted(ranks.items(), key=lambda entry: entry[1])
        )
    )
    special = {"<|endoftext|>": len(ranks), "<x>": len(ranks) + 5}
    Path(f"{path}.json").write_text(json.dumps({"pattern": GPT2, "special_tokens": special}))
    return path


def test_tiktoken_ids(tiktoken_file: Path, tmp_path: Path) -> None:
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe

    described = json.loads(Path(f"{tiktoken_file}.json").read_text())
    reference = tiktoken.Encoding(
        "reference",
        pat_str=described["pattern"],
        mergeable_ranks=load_tiktoken_bpe(str(tiktoken_file)),
        special_tokens=described["special_tokens"],
    )
    tokenizer = load_tokenizer(tiktoken_file)
    assert isinstance(tokenizer, TiktokenTokenizer)
    texts = [*TEXTS, "<|endoftext|>", *python_help_texts()[:5]]
    assert tokenizer.encode_batch(texts) == [reference.encode_ordinary(text) for text in texts]
    twin = load_tokenizer(tmp_path / "tokenizer.json")  # the same merges, ids one higher
    assert tokenizer.encode(texts[-1]) == [number - 1 for number in twin.encode(texts[-1])]
    assert tokenizer.eod_id == reference.eot_token == 599
    assert tokenizer.vocab_size == reference.n_vocab == 605
    assert tokenizer.special_ids == {"eod": 599}
    for text in texts:
        assert tokenizer.decode([*tokenizer.encode(text), tokenizer.eod_id]) == text
    assert pickle.loads(pickle.dumps(tokenizer)).encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])
    assert load_tokenizer(tiktoken_file, eod_token="<x>").eod_id == 604
    digest = tokenizer.digest
    described["pattern"] = r"\S+|\s+"
    Path(f"{tiktoken_file}.json").write_text(json.dumps(described))
    assert load_tokenizer(tiktoken_file).digest != digest


def test_bad_tiktoken_files(tiktoken_file: Path) -> None:
    beside = Path(f"{tiktoken_file}.json")
    for text in ("{", "[]", '{"pattern": 1, "special_tokens": {}}', '{"pattern": "a"}'):
        beside.write_text(text)
        with pytest.raises(ValueError, match=r"small\.tiktoken\.json must hold"):
            load_tokenizer(tiktoken_file)
    beside.write_text('{"pattern": "a", "special_tokens": {}}')
    with pytest.raises(ValueError, match=r"special_tokens has no <\|endoftext\|>"):
        load_tokenizer(tiktoken_file)
    beside.write_text('{"pattern": "(", "special_tokens": {"<|endoftext|>": 9999}}')
    with pytest.raises(ValueError, match=r"small\.tiktoken with the description"):
        load_tokenizer(tiktoken_file)
    content = tiktoken_file.read_bytes()
    tiktoken_file.write_bytes(content + b"what is this\n")
    with pytest.raises(ValueError, match=r"small\.tiktoken:600: no token in base64"):
        load_tokenizer(tiktoken_file)
    tiktoken_file.write_bytes(content[content.index(b"\n") + 1 :])
    with pytest.raises(ValueError, match="has no token for the byte"):
        load_tokenizer(tiktoken_file)
    beside.unlink()
    with pytest.raises(FileNotFoundError, match=r"no .*small\.tiktoken\.json, which tells"):
        load_tokenizer(tiktoken_file)


def test_special_tokens_by_role_and_no_truncation(tmp_path: Path) -> None:
    train_byte_bpe(["abc " * 9], 300, tmp_path / "tokenizer.json")
    fast = Fast.from_file(str(tmp_path / "tokenizer.json"))
    fast.add_special_tokens(["[CLS]", "[SEP]", "[MASK]", "</s>", "<none>"])
    fast.enable_truncation(2)
    fast.enable_padding(length=50)
    fast.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    ids = {token: fast.token_to_id(token) for token in ("[CLS]", "[SEP]", "[MASK]", "</s>")}
    assert tokenizer.special_ids == {
        "eod": 0,
        "cls": ids["[CLS]"],
        "sep": ids["[SEP]"],
        "mask": ids["[MASK]"],
        "eos": ids["</s>"],
    }
    assert tokenizer.decode(tokenizer.encode("a longer text")) == "a longer text"
    config = {"eos_token": {"content": "[SEP]"}, "pad_token": "<none>", "mask_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eod_id == ids["[SEP]"]
    assert tokenizer.special_ids["pad"] == fast.token_to_id("<none>")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is no JSON"):
        load_tokenizer(tmp_path)


def test_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    train_byte_bpe(["abc " * 9], 300, tmp_path / "tokenizer.json")

    def download(repository: str, file: str) -> str:
        if repository != "someone/model":
            raise LocalEntryNotFoundError("offline")
        if not (tmp_path / file).is_file():
            raise EntryNotFoundError(file)
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    tokenizer = load_tokenizer("someone/model")
    assert tokenizer.name == "someone/model"
    assert tokenizer.digest == load_tokenizer(tmp_path).digest
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert (copy.name, copy.encode("abc")) == (tokenizer.name, tokenizer.encode("abc"))
    with pytest.raises(FileNotFoundError, match="no tokenizer file someone/else, and no"):
        load_tokenizer("someone/else")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for path in ("model", "someone/model.json", "folder/model"):  # mistyped paths
        with pytest.raises(FileNotFoundError, match=f"no tokenizer file {path}: give"):
            load_tokenizer(path)
