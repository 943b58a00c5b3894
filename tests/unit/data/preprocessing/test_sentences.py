from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lightning.data import IndexedDataset, PreprocessOptions, open_files, preprocess
from megatron_lightning.data.preprocessing.sentences import split_sentences, splitter

TEXT = (
    'Dr. A. Smith (b. 1950) came at 5 p.m. to Washington, D.C. He saw 3.5 dogs, i.e. few. "Stop!" '
    "he said. Why?! Because…\n\nA heading\n\nSee fig. 3 for more... and so on."
)
SENTENCES = [
    "Dr. A. Smith (b. 1950) came at 5 p.m. to Washington, D.C.",
    "He saw 3.5 dogs, i.e. few.",
    '"Stop!" he said.',
    "Why?!",
    "Because…",
    "A heading",
    "See fig. 3 for more... and so on.",
]


def test_rules() -> None:
    assert split_sentences(TEXT) == SENTENCES
    assert split_sentences("你好。「世界！」再见") == ["你好。", "「世界！」", "再见"]
    assert split_sentences("Wer kommt? Niemand.") == ["Wer kommt?", "Niemand."]
    assert split_sentences("I know it was I. You did not.") == ["I know it was I.", "You did not."]
    assert split_sentences("") == split_sentences(" \n ") == []
    assert split_sentences("no end") == ["no end"]


def test_newlines_are_kept_if_asked() -> None:
    text = "One.\nTwo. Three!\n\nFour"
    assert split_sentences(text) == ["One.", "Two.", "Three!", "Four"]
    kept = split_sentences(text, keep_newlines=True)
    assert kept == ["One.\n", "Two.", "Three!\n\n", "Four"]


@given(st.text(alphabet=st.sampled_from("aB1 .!?\n\t'\")…。A"), max_size=60))
def test_nothing_but_space_is_lost(text: str) -> None:
    for keep in (False, True):
        found = split_sentences(text, keep_newlines=keep)
        assert "".join("".join(found).split()) == "".join(text.split())
        assert all(found)
        assert keep or all(sentence == sentence.strip() for sentence in found)


def test_a_sequence_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text("")
    options = PreprocessOptions(sentences="regex", append_eod=True)
    sources = open_files([tmp_path / "a.txt", tmp_path / "b.txt"], "auto", ["text"])
    preprocess(sources, tmp_path / "out", "bytes", options)
    data = IndexedDataset(tmp_path / "out")
    found = [bytes(data[i].astype("u1")).decode() for i in range(len(data) - 1)]
    assert found == SENTENCES[:-1]
    assert data[-1].tolist() == [*SENTENCES[-1].encode(), 256]  # after the last sentence only
    assert data.document_indices.tolist() == [0, 7, 7]


def test_punkt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nltk = pytest.importorskip("nltk")
    folder = tmp_path / "tokenizers" / "punkt_tab" / "test"
    folder.mkdir(parents=True)
    for name in ("collocations.tab", "sent_starters.txt", "ortho_context.tab"):
        (folder / name).write_text("")
    (folder / "abbrev_types.txt").write_text("qu\n")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    split = splitter("nltk", "test")
    assert split("The qu. House is big. Dr. No.\nYes") == [
        "The qu. House is big.",
        "Dr.",
        "No.",
        "Yes",
    ]
    kept = splitter("nltk", "test", keep_newlines=True)
    assert kept("One is.\nTwo is. Three\n") == ["One is.\n", "Two is.", "Three\n"]
    with pytest.raises(ValueError, match='no Punkt model for language="klingon"'):
        splitter("nltk", "klingon")
