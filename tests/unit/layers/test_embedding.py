"""Lookups and head on one process; split tables held one at a time."""

import pytest
import torch
from torch import Tensor

from megatron_lightning.layers.embedding import (
    PositionEmbedding,
    VocabularyEmbedding,
    VocabularyHead,
)
from megatron_lightning.parallel.random import Normal

INITIAL = Normal(1.0)


def _fill(module: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        module.weight.normal_(generator=torch.Generator().manual_seed(0))
    return module.weight.detach()


def test_words_come_sequence_first() -> None:
    embedding = VocabularyEmbedding(11, 4, initial=INITIAL)
    weight = _fill(embedding)
    tokens = torch.tensor([[1, 2, 3], [10, 0, 1]])
    assert torch.equal(embedding(tokens), weight[tokens.t()])


def test_parts_of_a_split_table_sum_to_the_whole() -> None:
    whole = VocabularyEmbedding(11, 4, initial=INITIAL)
    weight = _fill(whole)
    tokens = torch.tensor([[1, 2, 3, 5], [10, 0, 6, 5]])
    total = torch.zeros(4, 2, 4)
    for offset, stop in ((0, 6), (6, 12)):  # the last row is padding
        part = VocabularyEmbedding(11, 4, initial=INITIAL)
        rows = torch.zeros(6, 4)
        rows[: min(stop, 11) - offset] = weight[offset:stop]
        part.weight = torch.nn.Parameter(rows)
        part.vocabulary_offset = offset
        x = part(tokens)
        x.sum().backward()
        counts = torch.bincount(tokens.flatten(), minlength=12)[offset:stop]
        assert torch.equal(part.weight.grad, counts[:, None].expand(6, 4).float())
        total += x.detach()
    assert torch.equal(total, weight[tokens.t()])


@pytest.mark.parametrize("bad", [-1, 11])
def test_ids_out_of_range_are_explained(bad: int) -> None:
    tokens = torch.tensor([[0, bad]])
    for module in (
        VocabularyEmbedding(11, 4, initial=INITIAL),
        PositionEmbedding(11, 4, initial=INITIAL),
    ):
        with pytest.raises(ValueError, match=r"table of 11 rows; use ids in \[0, 11\)"):
            module(tokens)


def test_padded_rows_are_no_tokens() -> None:
    embedding = VocabularyEmbedding(11, 4, initial=INITIAL)
    embedding.weight = torch.nn.Parameter(torch.zeros(16, 4))
    with pytest.raises(ValueError, match="from 12 to 12"):
        embedding(torch.tensor([[12]]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [None, 0])
def test_gradients_of_frequent_tokens_are_summed_in_float32(
    dtype: torch.dtype, offset: int | None
) -> None:
    """4096 times the same token: a sum in bfloat16 would stop at 256 times its addend."""
    embedding = VocabularyEmbedding(11, 4, initial=INITIAL)
    _fill(embedding)
    embedding.vocabulary_offset = offset
    embedding.to(dtype)
    tokens = torch.full((2, 2048), 3)
    tokens[0, 0] = 5
    embedding(tokens).sum().backward()
    expected = torch.zeros(11, 4)
    expected[3], expected[5] = 4095, 1
    assert torch.equal(embedding.weight.grad, expected.to(dtype))


def test_positions() -> None:
    embedding = PositionEmbedding(8, 4, initial=INITIAL)
    weight = _fill(embedding)
    assert torch.equal(embedding(torch.arange(5)[None]), weight[:5, None])


def test_head_without_padding_columns() -> None:
    head = VocabularyHead(4, 11, initial=INITIAL)
    head.weight = torch.nn.Parameter(torch.randn(16, 4))
    hidden = torch.randn(3, 2, 4)
    logits = head(hidden)
    assert logits.shape == (3, 2, 16)
    assert torch.equal(head.whole(logits), logits[..., :11])


def test_tied_head_sums_both_gradients() -> None:
    embedding = VocabularyEmbedding(11, 4, initial=INITIAL)
    _fill(embedding)
    head = VocabularyHead(4, 11, initial=INITIAL)
    head.weight = embedding.weight
    tokens = torch.tensor([[1, 2]])
    head(embedding(tokens)).sum().backward()
    weight = embedding.weight.detach().clone().requires_grad_()
    (weight[tokens.t()] @ weight.t()).sum().backward()
    torch.testing.assert_close(embedding.weight.grad, weight.grad)
