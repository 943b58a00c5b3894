"""T5 samples: recorded ones, spans that can be put back, and what doesn't fit."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_lightning.data.masked import MaskingConfig, T5DataConfig, T5Dataset, T5Vocabulary
from tests.unit.data import masked_corpora as corpora
from tests.unit.data.masked_corpora import CASES, CLS, EOS, SEP, TOKENS, t5, write

NAMES = {
    "text_enc": "tokens",
    "text_dec": "decoder_tokens",
    "labels": "labels",
    "loss_mask": "loss_mask",
    "truncated": "truncated",
    "enc_mask": "padding_mask",
    "dec_mask": "decoder_padding_mask",
}
SENTINELS = [TOKENS[f"<extra_id_{n}>"] for n in range(30)]


def put_back(sample: dict[str, Tensor]) -> list[int]:
    """The text of a sample, the spans in the places of their sentinels."""
    labels = sample["labels"][sample["loss_mask"] > 0].tolist()
    assert labels.pop() == EOS
    spans: dict[int, list[int]] = {}
    for token in labels:
        if token in SENTINELS:
            spans[token] = []
        else:
            spans[list(spans)[-1]].append(token)
    text: list[int] = []
    for token in sample["tokens"][sample["padding_mask"] > 0].tolist():
        text += spans[token] if token in SENTINELS else [token]
    return text


def read_all(data: T5Dataset) -> list[dict[str, Tensor]]:
    """Every sample."""
    return [data[number] for number in range(len(data))]


@pytest.mark.parametrize("name", CASES["t5"])
def test_recorded_samples(name: str):
    case, recorded = CASES["t5"][name], corpora.expected()
    config = T5DataConfig(
        masking=corpora.masking(case), short_seq_prob=case["short"], decoder_seq_length=case["D"]
    )
    data = t5(config, samples=case["num"], seq_length=case["S"], seed=case["seed"])
    np.testing.assert_array_equal(data.sample_index, recorded[f"t5_{name}_sample_index"])
    for number in range(CASES["samples"]):
        sample = data[number]
        for key, ours in NAMES.items():
            there = recorded[f"t5_{name}_{key}"][number]
            np.testing.assert_array_equal(sample[ours].numpy(), there, err_msg=f"{number} {ours}")


@pytest.mark.parametrize("geometric", [True, False])
def test_spans_can_be_put_back(geometric: bool):
    config = T5DataConfig(
        masking=MaskingConfig(probability=0.3, max_ngram=5, geometric=geometric),
        decoder_seq_length=80,
    )
    data = t5(config, samples=200)
    for number in range(200):
        sample = data[number]
        begin, end, target = data.sample_index[number].tolist()
        text = [token for i in range(begin, end) for token in data._indexed.get(i).tolist()]
        assert put_back(sample) == text[:target]
        assert bool(sample["truncated"]) == (len(text) > target)
        used = [token for token in sample["tokens"].tolist() if token in SENTINELS]
        assert used == SENTINELS[: len(used)]
        shifted = sample["decoder_tokens"][1:]
        assert torch.equal(shifted[shifted > 0], sample["labels"][:-1][shifted > 0])
        assert sample["decoder_tokens"][0] == TOKENS["[BOS]"]


def test_special_tokens_stay_in_the_encoder(tmp_path: Path):
    # There a span that reaches over one loses it: it is in neither sequence.
    sentence = [token for n in range(40, 70) for token in (n, n + 1, (CLS, SEP, EOS)[n % 3])]
    config = T5DataConfig(
        masking=MaskingConfig(probability=0.4, max_ngram=10, geometric=True, whole_words=False),
        short_seq_prob=0,
        decoder_seq_length=100,
    )
    data = t5(config, write(tmp_path, [[sentence]] * 20), seq_length=92)
    for number in range(20):
        sample = data[number]
        kept = [token for token in sample["tokens"].tolist() if token in (CLS, SEP, EOS)]
        assert kept == [token for token in sentence if token in (CLS, SEP, EOS)]
        assert put_back(sample) == sentence


def test_too_few_sentinels():
    tokens = {k: v for k, v in TOKENS.items() if k not in [f"<extra_id_{n}>" for n in range(2, 30)]}
    config = T5DataConfig(
        masking=MaskingConfig(max_ngram=1), short_seq_prob=0, decoder_seq_length=64
    )
    data = t5(config, tokens=tokens)
    with pytest.raises(ValueError, match=r"spans, but the tokenizer has 2 sentinels.*up to 9 of"):
        read_all(data)


def test_too_short_a_decoder_names_the_length_that_is_enough():
    masking = MaskingConfig(probability=0.4, max_ngram=1, whole_words=False)
    data = t5(T5DataConfig(masking=masking, short_seq_prob=0, decoder_seq_length=20))
    with pytest.raises(ValueError, match=r"decoder_seq_length=20: .* 49 are enough"):
        read_all(data)
    data = t5(T5DataConfig(masking=masking, short_seq_prob=0, decoder_seq_length=49))
    assert max(int(sample["decoder_padding_mask"].sum()) for sample in read_all(data)) > 40


def test_vocabulary_without_sentinels_and_end():
    tokens = {k: v for k, v in TOKENS.items() if "extra_id" not in k and k != "[EOS]"}
    with pytest.raises(ValueError, match="has no token <extra_id_0>") as caught:
        T5Vocabulary.from_tokens(tokens, T5DataConfig())
    assert "eos_token=None: the vocabulary has no token [EOS] or </s>" in str(caught.value)


def test_names_of_the_t5_tokenizer():
    tokens = {"<pad>": 0, "</s>": 1, "<unk>": 2, "▁a": 3, "b": 4, "<extra_id_1>": 5}
    tokens["<extra_id_0>"] = 6
    config = T5DataConfig(masking=MaskingConfig(word_marker="▁"))
    vocabulary = T5Vocabulary.from_tokens(tokens, config)
    assert (vocabulary.bos_id, vocabulary.eos_id, vocabulary.pad_id) == (0, 1, 0)
    assert vocabulary.sentinel_ids == (6, 5)
    assert vocabulary.continues_word.tolist() == [False, False, True, False, True, False, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decoder_seq_length": 3}, "decoder_seq_length=3: must be at least 4 tokens"),
        ({"masking": MaskingConfig(permute=True)}, "masking.permute=True: has no meaning"),
        ({"short_seq_prob": 2.0}, "short_seq_prob=2.0"),
    ],
)
def test_wrong_options(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        T5DataConfig(**options)
