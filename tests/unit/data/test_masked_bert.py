"""BERT samples: recorded ones, and what is right where the peer is not."""

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_lightning.data.masked import BERTDataConfig, BERTVocabulary, MaskingConfig
from tests.unit.data import masked_corpora as corpora
from tests.unit.data.masked_corpora import CASES, FIRST_WORD, MASK, TOKENS, bert, write

NAMES = {
    "text": "tokens",
    "types": "token_type_ids",
    "labels": "labels",
    "is_random": "is_random",
    "padding_mask": "padding_mask",
    "loss_mask": "loss_mask",
    "truncated": "truncated",
}


@pytest.mark.parametrize("name", CASES["bert"])
def test_recorded_samples(name: str):
    case, recorded = CASES["bert"][name], corpora.expected()
    config = BERTDataConfig(
        masking=corpora.masking(case),
        short_seq_prob=case["short"],
        classification_head=case["head"],
    )
    data = bert(config, samples=case["num"], seq_length=case["S"], seed=case["seed"])
    np.testing.assert_array_equal(data.sample_index, recorded[f"bert_{name}_sample_index"])
    for number in range(CASES["samples"]):
        sample = data[number]
        there = {ours: recorded[f"bert_{name}_{key}"][number] for key, ours in NAMES.items()}
        if case["p"] * data.sample_index[number][2] < 1:  # no token is masked there
            assert there["loss_mask"].sum() == 0
            assert sample["loss_mask"].sum() == 1
            continue
        # There a random replacement may be a special token; here it is the next
        # token that is text.
        tokens = there["tokens"]
        special = (tokens < FIRST_WORD) & (tokens != TOKENS["[UNK]"])
        kept = (tokens == MASK) & (sample["tokens"].numpy() == MASK)
        drawn = (there["labels"] >= 0) & special & ~kept
        assert (sample["tokens"].numpy()[drawn] == FIRST_WORD).all()
        tokens[drawn] = FIRST_WORD
        for key, values in there.items():
            np.testing.assert_array_equal(sample[key].numpy(), values, err_msg=f"{number} {key}")


def test_fields():
    sample = bert()[3]
    assert {name: (field.dtype, tuple(field.shape)) for name, field in sample.items()} == {
        "tokens": (torch.int64, (64,)),
        "token_type_ids": (torch.int64, (64,)),
        "labels": (torch.int64, (64,)),
        "loss_mask": (torch.float32, (64,)),
        "padding_mask": (torch.int64, (64,)),
        "is_random": (torch.int64, ()),
        "truncated": (torch.int64, ()),
    }


def test_shares_of_replacements():
    config = BERTDataConfig(masking=MaskingConfig(probability=0.5, max_ngram=1, whole_words=False))
    data = bert(config, samples=1500)
    replaced = np.zeros(3)
    for number in range(1500):
        sample = data[number]
        hit = sample["loss_mask"] > 0
        tokens, labels = sample["tokens"][hit], sample["labels"][hit]
        replaced += [
            int((tokens == MASK).sum()),
            int((tokens == labels).sum()),
            int(((tokens != MASK) & (tokens != labels)).sum()),
        ]
    assert replaced.sum() > 20_000
    np.testing.assert_allclose(replaced / replaced.sum(), [0.8, 0.1, 0.1], atol=0.01)


def test_whole_words_are_masked_or_not():
    data = bert(BERTDataConfig(masking=MaskingConfig(probability=0.3)), samples=100)
    continues = data._vocabulary.continues_word
    for number in range(100):
        sample = data[number]
        hit = sample["loss_mask"].bool()
        original = torch.where(hit, sample["labels"], sample["tokens"])
        inside = torch.from_numpy(continues[original.numpy()])
        follows = inside[1:] & (original[:-1] >= FIRST_WORD)  # belongs to the token before
        assert (hit[1:] == hit[:-1])[follows].all()


def test_padding_token_other_than_zero(tmp_path: Path):
    # There token types and the padding mask hold the padding token's id behind the end.
    tokens = {**TOKENS, "[PAD]": TOKENS["w39"], "w39": 0}
    config = BERTDataConfig()
    vocabulary = BERTVocabulary.from_tokens(tokens, config)
    indexed = write(tmp_path, [[[40, 41, 42], [43, 44]]])
    data = corpora.BERTDataset(indexed, range(1), None, 32, 1, vocabulary, config)
    sample = data[0]
    end = 3 + 2 + 3
    assert sample["tokens"][end:].eq(39).all()
    assert sample["token_type_ids"][end:].eq(0).all()
    assert sample["padding_mask"].tolist() == [1] * end + [0] * (32 - end)


def test_special_tokens_in_the_text_are_kept(tmp_path: Path):
    special = [TOKENS[name] for name in ("[MASK]", "[PAD]", "[BOS]", "[EOS]", "<extra_id_3>")]
    sentence = [token for word in range(40, 60) for token in (word, special[word % 5])]
    indexed = write(tmp_path, [[sentence, sentence]])
    config = BERTDataConfig(masking=MaskingConfig(probability=0.5), short_seq_prob=0)
    sample = bert(config, indexed, seq_length=100)[0]
    labels = sample["labels"][sample["loss_mask"] > 0]
    assert len(labels) > 20
    assert (labels >= FIRST_WORD).all()
    assert sample["padding_mask"].sum() == 83  # padding tokens within the text are text


def test_exchanged_tokens_need_no_global_random_state():
    config = BERTDataConfig(masking=MaskingConfig(permute=True))
    data = bert(config, samples=50)
    np.random.seed(1)
    first = [data[n]["tokens"] for n in range(20)]
    np.random.seed(2)
    assert all(torch.equal(data[n]["tokens"], first[n]) for n in reversed(range(20)))


def test_pairs_are_exchanged_in_half_of_the_samples(tmp_path: Path):
    documents = [[[40, 41, 42], [50, 51]]] * 400
    config = BERTDataConfig(short_seq_prob=0)
    data = bert(config, write(tmp_path, documents))
    swapped = 0
    for number in range(400):
        sample = data[number]
        hit = sample["loss_mask"].bool()
        original = torch.where(hit, sample["labels"], sample["tokens"])[1:].tolist()
        exchanged = bool(sample["is_random"])
        assert original[:2] == ([50, 51] if exchanged else [40, 41])
        types = [0] * (4 if exchanged else 5) + [1] * (4 if exchanged else 3)
        assert sample["token_type_ids"][:8].tolist() == types
        swapped += exchanged
    assert 160 < swapped < 240


def test_account_of_a_sample(tmp_path: Path):
    indexed = write(tmp_path, [[], [[40, 41], [42], [43] * 3, [44] * 9, [45], [46]]])
    config = BERTDataConfig(short_seq_prob=0)
    data = bert(config, indexed, seq_length=8, samples=4, name="corpus")
    notes = {tuple(data.sample_index[n][:2].tolist()): data.read(n)[1] for n in range(len(data))}
    assert data.source_names == ("corpus",)
    assert notes[0, 3].documents == 1
    assert notes[3, 6].documents == 0
    assert notes[0, 3].truncated == 1  # 6 tokens of a target of 5
    assert {data.read(n)[1].epoch for n in range(len(data))} == {0, 1}
    assert {note.epochs for note in notes.values()} == {2}
    assert notes[0, 3].padding == 0


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("[MASK]", r"mask_token=None: the vocabulary has no token \[MASK\] or <mask>"),
        ("[CLS]", r"cls_token=None: the vocabulary has no token \[CLS\] or <s>"),
    ],
)
def test_vocabulary_without_a_token(gone: str, message: str):
    tokens = {name: number for name, number in TOKENS.items() if name != gone}
    with pytest.raises(ValueError, match=message):
        BERTVocabulary.from_tokens(tokens, BERTDataConfig())


def test_tokens_beyond_the_vocabulary(tmp_path: Path):
    indexed = write(tmp_path, [[[40, 5000], [41]]])
    with pytest.raises(ValueError, match="holds token 5000, but the vocabulary ends at 199"):
        bert(indexed=indexed)[0]


def test_too_short_for_special_tokens():
    with pytest.raises(ValueError, match="seq_length=4 must be at least 5 tokens"):
        bert(seq_length=4)
    data = bert(seq_length=5)
    assert all(data[n]["padding_mask"].sum() <= 5 for n in range(len(data)))


def test_all_wrong_options_are_named():
    with pytest.raises(ValueError, match="probability=1.5") as caught:
        MaskingConfig(probability=1.5, max_ngram=0, geometric=True, permute=True)
    for part in ("MaskingConfig:", "masking.max_ngram=0", "masking.permute=True"):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="short_seq_prob=-0.1: must be between 0 and 1"):
        BERTDataConfig(short_seq_prob=-0.1)
