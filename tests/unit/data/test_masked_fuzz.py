"""Any documents, any options: masked samples hold what they must."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_lightning.data import ByteTokenizer
from megatron_lightning.data.masked import (
    BERTDataConfig,
    BERTVocabulary,
    FillInMiddle,
    FIMConfig,
    FIMTokens,
    MaskingConfig,
    T5DataConfig,
    T5Vocabulary,
    build_sentence_index,
)
from megatron_lightning.data.masked.fim import _map_between
from megatron_lightning.data.masked.spans import SpanChooser
from megatron_lightning.data.masked.t5 import corrupt
from megatron_lightning.data.masked.vocabulary import MaskedVocabulary
from tests.unit.data import masked_corpora as corpora
from tests.unit.data.masked_corpora import TOKENS

LENGTHS = st.lists(st.lists(st.integers(0, 20), max_size=8), max_size=12)
SEEDS = st.integers(0, 2**32 - 2)
EOD, PREFIX, MIDDLE, SUFFIX, PAD, SPLIT = 256, 300, 301, 302, 303, 304


def naive_twister(seed: int, count: int) -> list[int]:
    """mt19937-64 as it is usually written, word by word."""
    mask = 2**64 - 1
    state = [seed & mask]
    for n in range(1, 312):
        state.append((6364136223846793005 * (state[-1] ^ (state[-1] >> 62)) + n) & mask)
    found, at = [], 312
    for _ in range(count):
        if at == 312:
            for n in range(312):
                x = (state[n] & ~0x7FFFFFFF & mask) | (state[(n + 1) % 312] & 0x7FFFFFFF)
                state[n] = state[(n + 156) % 312] ^ (x >> 1) ^ (0xB5026F5AA96619E9 if x & 1 else 0)
            at = 0
        x = state[at]
        at += 1
        x ^= (x >> 29) & 0x5555555555555555
        x ^= (x << 17) & 0x71D67FFFEDA60000
        x ^= (x << 37) & 0xFFF7EEE000000000
        found.append(x ^ (x >> 43))
    return found


def naive_index(
    bounds: list[int], lengths: list[int], options: dict[str, Any]
) -> list[tuple[int, int, int]]:
    """The mapping as its rule is stated, sentence by sentence."""
    random = np.random.RandomState(options["seed"])
    longest, least = options["max_length"], options["min_sentences"]
    ratio = round(1 / options["short_seq_prob"]) if options["short_seq_prob"] else 0

    def target_length() -> int:
        if not ratio:
            return longest
        word = int(random.randint(0, 2**32, dtype=np.uint32))
        return 2 + word % (longest - 1) if word % ratio == 0 else longest

    rows: list[tuple[int, int, int]] = []
    for begin, end in zip(bounds, bounds[1:], strict=False):
        held = lengths[begin:end]
        if len(held) < least or (len(held) > 1 and max(held) > options["max_sentence_length"]):
            continue
        target, first, tokens = target_length(), begin, 0
        for sentence in range(begin, end):
            tokens += lengths[sentence]
            left, taken = end - sentence - 1, sentence + 1 - first
            if (tokens >= target and left > 1 and taken >= least) or left == 0:
                rows.append((first, sentence + 1, target))
                target, first, tokens = target_length(), sentence + 1, 0
    numbers = iter(naive_twister(options["seed"] + 1, max(len(rows) - 1, 0)))
    for last in range(len(rows) - 1, 0, -1):
        other = next(numbers) % (last + 1)
        rows[last], rows[other] = rows[other], rows[last]
    return rows


@settings(deadline=None, max_examples=150)
@given(
    documents=LENGTHS,
    seed=SEEDS,
    max_length=st.integers(2, 60),
    short=st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]),
    least=st.integers(1, 2),
    longest=st.integers(5, 25),
)
def test_index_is_the_plain_rule(
    documents: list[list[int]], seed: int, max_length: int, short: float, least: int, longest: int
):
    bounds = np.cumsum([0, *map(len, documents)])
    lengths = np.array([length for document in documents for length in document], np.int32)
    options = {
        "max_length": max_length,
        "short_seq_prob": short,
        "seed": seed,
        "min_sentences": least,
        "max_sentence_length": longest,
    }
    index = build_sentence_index(bounds, lengths, num_samples=None, **options)
    wanted = naive_index(bounds.tolist(), lengths.tolist(), options)
    assert [tuple(row) for row in index.samples.tolist()] == wanted


MASKING = st.builds(
    MaskingConfig,
    probability=st.floats(0.01, 0.9),
    max_ngram=st.integers(1, 10),
    whole_words=st.booleans(),
    longer_ngrams=st.just(False),
    geometric=st.booleans(),
)
TEXT = st.lists(st.integers(0, 199), max_size=80)


def chosen(
    tokens: NDArray[np.int64],
    masking: MaskingConfig,
    vocabulary: MaskedVocabulary,
    seed: int,
    *,
    contiguous: bool,
) -> tuple[list[list[int]], float]:
    chooser = SpanChooser(masking, vocabulary, contiguous=contiguous)
    target = len(tokens) + 2
    runs = list(chooser.choose(tokens, target, np.random.RandomState(seed)))
    return runs, chooser.limit(len(tokens), target)


@settings(deadline=None, max_examples=150)
@given(text=TEXT, masking=MASKING, seed=SEEDS, contiguous=st.booleans())
def test_runs(text: list[int], masking: MaskingConfig, seed: int, contiguous: bool):
    vocabulary = BERTVocabulary.from_tokens(TOKENS, BERTDataConfig(masking=masking))
    tokens = np.array(text, np.int64)
    runs, limit = chosen(tokens, masking, vocabulary, seed, contiguous=contiguous)
    positions = [position for run in runs for position in run]
    assert len(set(positions)) == len(positions) <= limit
    assert not vocabulary.special[tokens[positions]].any()
    for run in runs:
        assert run == sorted(run)
        if contiguous:
            assert run == list(range(run[0], run[-1] + 1))
    if masking.whole_words and contiguous:
        inside = vocabulary.continues_word[tokens]
        for run in runs:
            after = run[-1] + 1
            assert after == len(text) or not inside[after]
    if not masking.whole_words and not vocabulary.special[tokens].all():
        assert runs


@settings(deadline=None, max_examples=80)
@given(
    documents=st.lists(st.lists(TEXT, min_size=1, max_size=6), min_size=1, max_size=4),
    masking=MASKING,
    seed=SEEDS,
    pairs=st.booleans(),
)
def test_bert_samples(
    documents: list[list[list[int]]],
    masking: MaskingConfig,
    seed: int,
    pairs: bool,
    tmp_path_factory: pytest.TempPathFactory,
):
    config = BERTDataConfig(masking=masking, classification_head=pairs)
    indexed = corpora.write(tmp_path_factory.mktemp("fuzz"), documents)
    data = corpora.bert(config, indexed, seq_length=40, seed=seed)
    for number in range(len(data)):
        sample, note = data.read(number)
        begin, end, target = data.sample_index[number].tolist()
        hit = sample["labels"] >= 0
        assert torch.equal(hit, sample["loss_mask"] > 0)
        text = torch.where(hit, sample["labels"], sample["tokens"])
        filled = int(sample["padding_mask"].sum())
        assert note.padding == 40 - filled
        held = sum(int(n) for n in indexed.sequence_lengths[begin:end])
        kept = filled - 2 - int(sample["token_type_ids"].any())
        assert kept == min(held, target)
        assert bool(sample["truncated"]) == (held > target)
        if not pairs and held <= target:
            whole = [token for i in range(begin, end) for token in indexed.get(i).tolist()]
            assert text[1 : filled - 1].tolist() == whole


@settings(deadline=None, max_examples=150)
@given(text=TEXT, masking=MASKING, seed=SEEDS)
def test_t5_spans_can_be_put_back(text: list[int], masking: MaskingConfig, seed: int):
    tokens = {**TOKENS, **{f"<extra_id_{n}>": 1000 + n for n in range(80)}}
    config = T5DataConfig(masking=masking)
    vocabulary = T5Vocabulary.from_tokens(tokens, config)
    array = np.array(text, np.int64)
    spans = sorted(chosen(array, masking, vocabulary, seed, contiguous=True)[0])
    encoder, decoder = corrupt(array, spans, vocabulary.sentinel_ids)
    pieces = iter(np.split(decoder, np.flatnonzero(decoder >= 1000))[1:])
    back: list[int] = []
    for token in encoder.tolist():
        back += next(pieces)[1:].tolist() if token >= 1000 else [token]
    assert back == text
    assert next(pieces, None) is None


def undo(part: NDArray[np.int64]) -> NDArray[np.int64]:
    """One document in the order in which it was."""
    tokens = part.tolist()
    if tokens[:1] != [PREFIX]:
        return part
    suffix, middle = tokens.index(SUFFIX), tokens.index(MIDDLE)
    order = [*tokens[1:suffix], *tokens[middle + 1 :], *tokens[suffix + 1 : middle]]
    if suffix == 1:  # suffix first
        order = [*tokens[middle + 1 :], *tokens[2:middle]]
    return np.array(order, np.int64)


@settings(deadline=None, max_examples=150)
@given(
    text=st.lists(st.one_of(st.integers(32, 255), st.sampled_from([EOD, SPLIT])), max_size=60),
    rate=st.floats(0, 1),
    seed=SEEDS,
    fragments=st.booleans(),
)
def test_fill_in_the_middle_can_be_undone(text: list[int], rate: float, seed: int, fragments: bool):
    if not fragments:
        text = [token for token in text if token != SPLIT]
    ids = FIMTokens(
        prefix_id=PREFIX,
        middle_id=MIDDLE,
        suffix_id=SUFFIX,
        pad_id=PAD,
        eod_id=EOD,
        split_id=SPLIT if fragments else None,
    )
    share = {"split_token": "<file>", "fragment_rate": rate} if fragments else {}
    fill = FillInMiddle(FIMConfig(rate=rate, **share), ids, ByteTokenizer())
    tokens, random = np.array(text, np.int64), np.random.RandomState(seed)
    whole = _map_between(tokens, EOD, lambda part: fill._document(part, random))
    back = _map_between(whole, EOD, lambda part: _map_between(part, SPLIT, undo))
    assert back.tolist() == text
    assert len(fill(tokens, np.random.RandomState(seed))) == len(text)
