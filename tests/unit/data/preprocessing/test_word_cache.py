"""Encoding by words gives the ids of the library, for every kind of tokenizer that it is used for;
and it is not used where it would not.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from megatron_lightning.data.preprocessing import word_cache
from megatron_lightning.data.preprocessing.encode import raw_encoder
from megatron_lightning.data.preprocessing.word_cache import WordCache, cuts_words
from megatron_lightning.data.sample_text import python_help_texts
from megatron_lightning.data.tokenizer import FileTokenizer

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<|endoftext|>", "<x>"]


def byte_level(pattern: str | None, **options: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    if pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(**options)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    return tokenizer


def bert() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def composed() -> Tokenizer:
    tokenizer = byte_level(None, add_prefix_space=False)
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": lambda: byte_level(None, add_prefix_space=False),
    "llama3": lambda: byte_level(LLAMA3),
    "qwen2": lambda: byte_level(QWEN2),
    "gpt4o": lambda: byte_level(GPT4O),
    "bert": bert,
    "composed": composed,
}


def train(tokenizer: Tokenizer, path: Path) -> FileTokenizer:
    kind = trainers.WordPieceTrainer if path.stem == "bert" else trainers.BpeTrainer
    trainer = kind(  # type: ignore[operator]
        vocab_size=900,
        special_tokens=[*SPECIAL, "[UNK]"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(python_help_texts()[:12], trainer)
    tokenizer.save(str(path))
    return FileTokenizer(path)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FileTokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {name: train(make(), folder / f"{name}.json") for name, make in KINDS.items()}


PIECES = st.sampled_from(
    [" ", " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\x85", "\x1c", "\x00", "\u200b"]
    + ["the", "The", "n't", "'s", "'S", "'", '"', ".", "...", "/", "-", "(", "1", "23", "1234"]
    + ["é", "e\u0301", "\u0301", "ﬁ", "漢", "字", "İ", "ß", "ǅ", "🙂", "٣", "½", "\ud7ff", "\uffff"]
    + [
        "<|endoftext|>",
        "<x>",
        "[UNK]",
        "<",
        ">",
        "word",
        "import os",
        "print(f'{x}')",
        "a_b",
        "a'b",
        "x\n",
        "9.5",
    ]
)
TEXTS = st.lists(
    st.one_of(
        st.lists(PIECES, max_size=12).map("".join),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    ),
    max_size=5,
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(batches=st.lists(TEXTS, min_size=1, max_size=3))
def test_ids_are_those_of_the_library(
    tokenizers: dict[str, FileTokenizer], kind: str, batches: list[list[str]]
) -> None:
    tokenizer = tokenizers[kind]
    encode = raw_encoder(tokenizer, np.dtype("<u2"))
    assert isinstance(encode, WordCache)
    encode._to_compare = 0  # nothing is put right afterwards
    for texts in batches:
        found = [np.frombuffer(raw, "<u2").tolist() for raw in encode(texts)]
        assert found == [tokenizer.encode(text) for text in texts]


def test_help_texts(tokenizers: dict[str, FileTokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_cache, "_LARGEST_TABLE", 300)  # emptied again and again
    texts = python_help_texts()
    for kind, tokenizer in tokenizers.items():
        encode = raw_encoder(tokenizer, np.dtype("<i4"))
        for at in range(0, 12, 4):
            found = [np.frombuffer(raw, "<i4").tolist() for raw in encode(texts[at : at + 4])]
            assert found == [tokenizer.encode(text) for text in texts[at : at + 4]], kind


def unsuitable() -> dict[str, Tokenizer]:
    metaspace = Tokenizer(models.BPE())
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace()
    llama2 = Tokenizer(models.BPE())
    llama2.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    unigram = Tokenizer(models.Unigram([("a", 0.0)], 0))
    unigram.pre_tokenizer = pre_tokenizers.Whitespace()
    dropout = Tokenizer(models.BPE(dropout=0.1))
    dropout.pre_tokenizer = pre_tokenizers.ByteLevel()
    found = {"metaspace": metaspace, "llama2": llama2, "unigram": unigram, "dropout": dropout}
    split = Tokenizer(models.BPE())
    split.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found["splits at spaces only"] = split
    found["none"] = Tokenizer(models.BPE())
    found["unknown pattern"] = byte_level(r"\p{L}+ ?|\s+")
    found["roberta"] = byte_level(None, add_prefix_space=True)
    found["no regex"] = byte_level(None, add_prefix_space=False, use_regex=False)
    for name, token in (
        ("space in token", AddedToken("a b")),
        ("strips", AddedToken("<m>", lstrip=True)),
        ("single word", AddedToken("m", single_word=True)),
    ):
        found[name] = byte_level(None, add_prefix_space=False)
        found[name].add_tokens([token])
    found["normalized token"] = composed()
    found["normalized token"].add_tokens([AddedToken("<m>", normalized=True)])
    return found


@pytest.mark.parametrize("name", unsuitable())
def test_other_tokenizers_are_left_alone(name: str) -> None:
    import json

    assert not cuts_words(json.loads(unsuitable()[name].to_str()))


def test_a_tokenizer_that_breaks_the_rule_is_noticed() -> None:
    def encode(texts: list[str]) -> list[bytes]:
        return [bytes([len(text)]) for text in texts]

    cache = WordCache(encode, [])  # type: ignore[arg-type]
    assert cache(["a b", "c"]) == [b"\x03", b"\x01"]
    assert cache(["a b c"]) == [b"\x05"]
