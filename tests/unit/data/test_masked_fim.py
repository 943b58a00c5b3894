"""Fill-in-the-middle: recorded samples, and what is right where the peer is not."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from megatron_lightning.data import ByteTokenizer, IndexedDataset, load_tokenizer
from megatron_lightning.data.masked import FillInMiddle, FIMConfig, FIMDataset, FIMTokens
from megatron_lightning.data.tokenizer import NamedTokens
from tests.unit.data.masked_corpora import FIM, FOLDER, expected

EOD, PREFIX, MIDDLE, SUFFIX, PAD, SPLIT = 256, 300, 301, 302, 303, 304
IDS = FIMTokens(prefix_id=PREFIX, middle_id=MIDDLE, suffix_id=SUFFIX, pad_id=PAD, eod_id=EOD)
SPLIT_IDS = FIMTokens(
    prefix_id=PREFIX, middle_id=MIDDLE, suffix_id=SUFFIX, pad_id=PAD, eod_id=EOD, split_id=SPLIT
)


def recorded(config: FIMConfig, seed: int = FIM["seed"], **options: Any) -> FIMDataset:
    """A data set over the recorded corpus."""
    tokenizer = load_tokenizer(FOLDER / "tokenizer.json")
    assert isinstance(tokenizer, NamedTokens)
    tokens = FIMTokens.from_tokens(tokenizer.token_ids(), config, tokenizer.eod_id)
    indexed = IndexedDataset(FOLDER / "code")
    place = (indexed, range(len(indexed)), None, FIM["seq_length"], seed)
    return FIMDataset(*place, tokenizer, tokens, config, **options)


def reorder(
    tokens: Sequence[int], config: FIMConfig, ids: FIMTokens = IDS, seed: int = 0
) -> list[int]:
    """Byte tokens in the new order."""
    fill = FillInMiddle(config, ids, ByteTokenizer())
    return fill(np.array(tokens, dtype=np.int64), np.random.RandomState(seed)).tolist()


def put_back(tokens: Sequence[int]) -> list[int]:
    """The text of one reordered document."""
    if tokens[:1] != [PREFIX]:
        return list(tokens)
    suffix, middle = tokens.index(SUFFIX), tokens.index(MIDDLE)
    return [*tokens[1:suffix], *tokens[middle + 1 :], *tokens[suffix + 1 : middle]]


@pytest.mark.parametrize("name", FIM["cases"])
def test_recorded_samples(name: str):
    data, there = recorded(FIMConfig(**FIM["cases"][name])), expected("fim")
    plain = recorded(FIMConfig(rate=0.0))
    compared = 0
    for number in range(40):
        if name != "split" and 5 in plain[number]["tokens"]:
            continue  # <file_sep>, which is lost there where it is not the split token
        compared += 1
        for key in ("tokens", "labels", "loss_mask"):
            np.testing.assert_array_equal(data[number][key], there[f"{name}_{key}"][number])
    assert compared == (40 if name == "split" else 22)


def test_samples_do_not_depend_on_the_order_of_reading():
    # There one random state runs on from sample to sample.
    data, other = recorded(FIMConfig()), recorded(FIMConfig())
    first = [data[number]["tokens"].tolist() for number in range(20)]
    again = [other[number]["tokens"].tolist() for number in reversed(range(20))]
    assert first == again[::-1]
    assert first != [recorded(FIMConfig(), seed=5)[n]["tokens"].tolist() for n in range(20)]


@pytest.mark.parametrize("suffix_first", [0.0, 1.0])
def test_text_can_be_put_back(suffix_first: float):
    text = list(b"a text of one document, without its end")
    for seed in range(20):
        fill = FillInMiddle(FIMConfig(rate=1.0, spm_rate=suffix_first), IDS, ByteTokenizer())
        changed = fill._document(np.array(text), np.random.RandomState(seed)).tolist()
        assert len(changed) == len(text) + 3
        if suffix_first:
            assert changed[:2] == [PREFIX, SUFFIX]
            middle = changed.index(MIDDLE)
            whole = changed[middle + 1 :] + changed[2:middle]
            assert whole == text
        else:
            assert put_back(changed) == text


def test_length_is_kept_and_the_end_is_cut():
    text = [*b"first document", EOD, *b"second", EOD, *b"third one"]
    changed = reorder(text, FIMConfig(rate=1.0))
    assert len(changed) == len(text)
    assert changed.count(EOD) == 2
    assert changed.count(PREFIX) == 3


def test_ends_of_documents_that_follow_each_other_are_kept():
    # There only the one after text is kept, and the empty rest becomes three tokens.
    text = [EOD, EOD, *b"ab", EOD, EOD, EOD]
    changed = reorder([*text, *b"01234567890"], FIMConfig(rate=1.0))
    assert changed[:2] == [EOD, EOD]
    assert changed.count(EOD) == 5
    assert reorder([EOD, EOD, EOD], FIMConfig(rate=1.0)) == [EOD, EOD, EOD]


def test_split_tokens_that_follow_each_other_are_kept():
    config = FIMConfig(rate=1.0, split_token="<file>", fragment_rate=1.0)
    text = [SPLIT, SPLIT, *b"ab", SPLIT, SPLIT]
    changed = reorder([*text, *b"0123456789"], config, SPLIT_IDS)
    assert changed[:3] == [SPLIT, SPLIT, PREFIX]
    assert changed.count(SPLIT) == 4
    assert reorder([SPLIT] * 3, config, SPLIT_IDS) == [SPLIT] * 3


def test_cut_characters_stay_as_they_are():
    # There they come back as the three bytes of U+FFFD.
    text = [*"größe".encode()[3:], EOD, *"über".encode()[:1], EOD, *b"plain text"]
    changed = reorder(text, FIMConfig(rate=1.0))
    assert changed[: text.index(EOD)] == text[: text.index(EOD)]
    assert 0xEF not in changed


def test_special_tokens_within_a_document_are_kept():
    # There they are lost with the text that they don't appear in.
    text = [*b"one file", SPLIT, *b"another file"]
    assert reorder([*text, EOD, *b"text"], FIMConfig(rate=1.0))[: len(text)] == text
    assert (
        reorder(text, FIMConfig(rate=1.0, split_token="<file>", fragment_rate=1.0), SPLIT_IDS)
        != text
    )


def test_shorter_text_is_filled_without_loss():
    class Shorter(ByteTokenizer):
        """Every character is one token fewer when it is encoded again."""

        def encode(self, text: str) -> list[int]:
            return super().encode(text)[::2]

    fill = FillInMiddle(FIMConfig(rate=1.0), IDS, Shorter())
    changed = fill(np.arange(60, 120), np.random.RandomState(0)).tolist()
    assert len(changed) == 60
    assert changed[-20:] == [PAD] * 20

    data = recorded(FIMConfig(rate=0.0))
    pad_id = data._pad_id
    data._fill = lambda tokens, random: np.where(np.arange(len(tokens)) < 50, tokens, pad_id)
    sample, note = data.read(0)
    assert sample["loss_mask"].tolist() == [1.0] * 49 + [0.0] * 47
    assert note.padding == 46


def test_rate_zero_is_the_plain_sample():
    data = recorded(FIMConfig(rate=0.0))
    plain = super(FIMDataset, data)._read(int(data.shuffle_index[0]))
    assert data[0]["tokens"].tolist() == plain[:-1].tolist()


def test_text_with_the_prefix_is_left():
    text = list(b"#!/bin/sh and more")
    assert reorder(text, FIMConfig(rate=1.0, no_prefix="#!")) == text
    assert reorder(text, FIMConfig(rate=1.0, no_prefix="!#")) != text


def test_missing_tokens_are_named():
    with pytest.raises(ValueError, match="prefix_token='<fim_prefix>': the vocabulary has no"):
        FIMTokens.from_tokens({"<fim_pad>": 1}, FIMConfig(), 0)
    config = FIMConfig(split_token="<nothing>", fragment_rate=0.5)
    with pytest.raises(ValueError, match="split_token='<nothing>'"):
        recorded(config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 1.5}, "rate=1.5: must be between 0 and 1"),
        ({"split_token": "<a>"}, "split_token='<a>' with fragment_rate=None: give both or neither"),
        ({"fragment_rate": 0.5}, "split_token=None with fragment_rate=0.5"),
        ({"pad_token": "<fim_prefix>"}, "must differ"),
    ],
)
def test_wrong_options(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        FIMConfig(**options)
