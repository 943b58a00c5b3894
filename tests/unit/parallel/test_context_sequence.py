"""Packed documents: lengths, positions, and bad input."""

import pytest
import torch

from megatron_lightning.parallel.sequence import SequenceInfo


def test_from_boundaries_and_back() -> None:
    cu_seqlens = torch.tensor([[0, 3, 8, 8], [0, 2, 4, 8]], dtype=torch.int32)
    info = SequenceInfo.from_cu_seqlens(cu_seqlens)
    assert info.lengths == ((3, 5), (2, 2, 4))
    assert info.flat == (3, 5, 2, 2, 4)
    assert torch.equal(info.cu_seqlens(), cu_seqlens)
    assert info.positions().tolist() == [[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 0, 1, 0, 1, 2, 3]]
    assert info.documents().tolist() == [[0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 2, 2, 2, 2]]
    assert not info.is_uniform


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1, 4]], "must begin with 0"),
        ([[0, 4, 3]], "ascend"),
        ([[0, 8], [0, 6]], "end with the sequence length, which other rows give as 8"),
    ],
)
def test_bad_boundaries(rows: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SequenceInfo.from_cu_seqlens(torch.tensor(rows))


def test_one_dim_is_refused() -> None:
    with pytest.raises(ValueError, match="one row a sample"):
        SequenceInfo.from_cu_seqlens(torch.tensor([0, 4]))
