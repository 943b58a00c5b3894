"""Micro-batches cut for context ranks: which token lands where, with which target and position."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.runtime.batch import BATCH_DIMS, MicroBatch
from megatron_lightning.runtime.context_batch import SEQUENCE_DIMS, ContextSlicer


def place(size: int, rank: int, tensor_size: int = 1) -> ParallelMesh:
    """A mesh as one context rank sees it; without groups, since slicing is local."""
    single = ParallelMesh.single()
    cp = MeshAxis(name="cp", rank=rank, size=size, ranks=tuple(range(size)))
    tp = MeshAxis(name="tp", size=tensor_size, ranks=tuple(range(tensor_size)))
    return replace(single, axes={**single.axes, "cp": cp, "tp": tp})


def cut(
    data: Any,
    size: int,
    rank: int,
    *,
    tensor_size: int = 1,
    dims: Mapping[str, int | None] = SEQUENCE_DIMS,
    contiguous: bool = False,
) -> MicroBatch:
    slicer = ContextSlicer(
        place(size, rank, tensor_size),
        batch_dims=BATCH_DIMS,
        sequence_dims=dims,
        sequence_parallel=tensor_size > 1,
        contiguous=contiguous,
    )
    return slicer(MicroBatch(data=data, num_samples=2, share=1.0))


def tokens_of(length: int) -> dict[str, Tensor]:
    tokens = torch.arange(length + 1).repeat(2, 1)
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": torch.ones(2, length),
    }


def test_labels_are_shifted_before_the_cut() -> None:
    """C22."""
    data = tokens_of(8)
    data["labels"][:, -1] = -100
    held = [cut(data, 2, rank).data for rank in range(2)]
    assert [part["tokens"][0].tolist() for part in held] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [part["labels"][0].tolist() for part in held] == [[1, 2, 7, -100], [3, 4, 5, 6]]
    assert [part["position_ids"].tolist() for part in held] == [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]


def test_documents_are_cut_one_by_one() -> None:
    """C20."""
    data = tokens_of(8) | {"cu_seqlens": torch.tensor([[0, 4, 8]] * 2)}
    held = [cut(data, 2, rank).data for rank in range(2)]
    assert [part["tokens"][1].tolist() for part in held] == [[0, 3, 4, 7], [1, 2, 5, 6]]
    assert [part["position_ids"][0].tolist() for part in held] == [[0, 3, 0, 3], [1, 2, 1, 2]]
    assert held[0]["cu_seqlens"].tolist() == [[0, 4, 8]] * 2


def test_slices_of_neighbouring_tokens() -> None:
    """Documents are neither cut nor padded one by one; what doesn't divide is at the end."""
    data = tokens_of(7) | {"cu_seqlens": torch.tensor([[0, 3, 7], [0, 7, 7]])}
    parts = [cut(data, 2, rank, contiguous=True) for rank in range(2)]
    held = [part.data for part in parts]
    assert [part["tokens"].tolist() for part in held] == [[[0, 1, 2, 3]] * 2, [[4, 5, 6, 0]] * 2]
    assert [part["labels"][0].tolist() for part in held] == [[1, 2, 3, 4], [5, 6, 7, -100]]
    assert [part["position_ids"].tolist() for part in held] == [
        [[0, 1, 2, 0], [0, 1, 2, 3]],
        [[1, 2, 3, 0], [4, 5, 6, 0]],
    ]
    assert held[0]["cu_seqlens"].tolist() == [[0, 3, 7, 8], [0, 7, 8, 8]]
    assert [float(part.context.share) for part in parts] == pytest.approx([4 / 7, 3 / 7])
    assert parts[0].context.restore.tolist() == [list(range(7))] * 2


def test_padding_lies_outside_the_loss() -> None:
    parts = [cut(tokens_of(6), 2, rank) for rank in range(2)]
    assert parts[0].data["tokens"][0].tolist() == [0, 1, 0, 0]
    assert parts[0].data["labels"][0].tolist() == [1, 2, -100, -100]
    assert parts[0].data["loss_mask"][0].tolist() == [1, 1, 0, 0]
    assert parts[0].data["position_ids"].tolist() == [[0, 1, 0, 0]]
    assert [float(part.context.share) for part in parts] == pytest.approx([2 / 6, 4 / 6])
    assert parts[0].context.held.positions.tolist() == [0, 1, 8, 9]  # none is another token's


def test_the_local_length_divides_by_tensor_ranks() -> None:
    data = tokens_of(10)
    assert cut(data, 2, 0, tensor_size=4).data["tokens"].shape == (2, 8)
    assert cut(data, 2, 0).data["tokens"].shape == (2, 6)


def test_samples_that_are_packed_differently() -> None:
    """Each document is padded for itself; tokens, targets and positions stay together."""
    data = tokens_of(8) | {"cu_seqlens": torch.tensor([[0, 3, 8], [0, 8, 8]])}
    parts = [cut(data, 2, rank) for rank in range(2)]
    # padded: 3 -> 4, 5 -> 8, so 12 tokens; the other sample's 8 get a document of padding
    assert parts[0].data["cu_seqlens"].tolist() == [[0, 4, 12], [0, 8, 12]]
    assert parts[0].data["tokens"].tolist() == [[0, 0, 3, 4, 0, 0], [0, 1, 6, 7, 0, 0]]
    assert parts[0].data["position_ids"].tolist() == [[0, 0, 0, 1, 0, 0], [0, 1, 6, 7, 0, 0]]
    assert parts[0].context.held.positions is None
    for part in parts:
        counted = part.data["loss_mask"] == 1
        assert torch.equal(part.data["labels"][counted], part.data["tokens"][counted] + 1)
    assert sum(float(part.data["loss_mask"].sum()) for part in parts) == 16
    assert sum(float(part.context.share) for part in parts) == pytest.approx(1)
    joined = torch.cat([part.data["tokens"] for part in parts], dim=1)
    assert torch.equal(joined.gather(1, parts[0].context.restore), data["tokens"])


@pytest.mark.parametrize("length", [16, 13])
@pytest.mark.parametrize("size", [2, 4])
def test_parts_make_up_the_whole(size: int, length: int) -> None:
    data = tokens_of(length)
    parts = [cut(data, size, rank) for rank in range(size)]
    joined = torch.cat([part.data["tokens"] for part in parts], dim=1)
    assert torch.equal(joined.index_select(1, parts[0].context.restore[0]), data["tokens"])
    positions = torch.cat([part.context.held.positions for part in parts])
    assert positions.unique().numel() >= length


def test_one_label_gives_its_rank_all_the_weight() -> None:
    data = tokens_of(8)
    data["loss_mask"] = torch.zeros(2, 8)
    data["loss_mask"][:, 2] = 1.0
    assert [float(cut(data, 2, rank).context.share) for rank in range(2)] == [0.0, 1.0]
    data["loss_mask"].zero_()
    assert [float(cut(data, 2, rank).context.share) for rank in range(2)] == [0.5, 0.5]
    del data["loss_mask"]
    data["labels"] = data["labels"].clone().fill_(-100)
    data["labels"][:, 1] = 5
    assert [float(cut(data, 2, rank).context.share) for rank in range(2)] == [1.0, 0.0]


def test_own_fields() -> None:
    data = tokens_of(8) | {"weights": torch.rand(2, 8), "source": torch.tensor([3, 4]), "name": "x"}
    dims = {**SEQUENCE_DIMS, "weights": 1, "source": None}
    part = cut(data, 2, 1, dims=dims).data
    assert torch.equal(part["weights"], data["weights"][:, 2:6])
    assert torch.equal(part["source"], data["source"])
    assert part["name"] == "x"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (tokens_of(8) | {"weights": torch.rand(2, 8)}, r"batch\['weights'\] of shape \(2, 8\)"),
        (tokens_of(8) | {"labels": torch.zeros(2, 7)}, "dim 1 has 7 entries .* 8 tokens"),
        ({"pixels": torch.rand(2, 3)}, "none has a known sequence dim"),
        ([torch.rand(2, 3)], "make it a dict of tensors"),
        (tokens_of(8) | {"cu_seqlens": torch.tensor([[0, 6]] * 2)}, "ends at 6"),
    ],
)
def test_bad_batches(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cut(data, 2, 0)


def test_one_rank_changes_nothing() -> None:
    whole = MicroBatch(data=[1, 2], num_samples=2, share=1.0)
    slicer = ContextSlicer(ParallelMesh.single(), batch_dims=BATCH_DIMS)
    assert slicer(whole) is whole
