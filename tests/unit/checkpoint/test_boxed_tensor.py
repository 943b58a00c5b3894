"""BoxedTensor: which memory stands for which part of the global tensor; DCP with it."""

import itertools
import math
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_lightning.checkpoint import Box, BoxedTensor, BoxReader, BoxWriter


def counted(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)


def check_parts(boxed: BoxedTensor, whole: torch.Tensor) -> int:
    """Every part equals its box of the global tensor; returns the number of elements held."""
    assert tuple(boxed.shape) == tuple(whole.shape)
    for box, view in zip(boxed.boxes, boxed.views, strict=True):
        assert torch.equal(view, whole[box.slices()])
    return sum(box.numel for box in boxed.boxes)


def test_a_local_shard_is_one_box_and_shares_its_memory() -> None:
    whole = counted((6, 4))
    local = whole[2:4].clone()
    boxed = BoxedTensor.from_local(local, (6, 4), (2, 0))
    assert check_parts(boxed, whole) == 8
    boxed.view_of(Box((3, 1), (1, 2))).fill_(-1)
    assert local[1].tolist() == [12, -1, -1, 15]


def test_rows_that_pad_the_vocabulary_are_left_out() -> None:
    whole = counted((7, 3))  # two ranks of 4 rows: the second has one row of padding
    padded = torch.cat([whole, torch.full((1, 3), -1.0)])
    last = BoxedTensor.from_local(padded[4:8].clone(), (7, 3), (4, 0), (3, 3))
    assert check_parts(last, whole) == 9


def test_a_rank_with_nothing_but_padding_holds_no_box() -> None:
    nothing = BoxedTensor.from_local(torch.zeros(4, 3), (7, 3), (8, 0), (0, 3))
    assert nothing.boxes == ()


@pytest.mark.parametrize("tp_dim", [0, 1, 2])
@pytest.mark.parametrize("dp", [1, 2, 3, 5])
def test_flat_slices_of_all_ranks_cover_the_tensor_once(tp_dim: int, dp: int) -> None:
    whole, tp = counted((4, 6, 2)), 2
    seen = torch.zeros_like(whole)
    for t, d in itertools.product(range(tp), range(dp)):
        width = whole.shape[tp_dim] // tp
        local = whole.narrow(tp_dim, t * width, width)
        flat = torch.cat([local.reshape(-1), torch.zeros(-local.numel() % dp)])
        size = flat.numel() // dp
        stop = min((d + 1) * size, local.numel())
        start = min(d * size, stop)
        offsets = [t * width if dim == tp_dim else 0 for dim in range(3)]
        boxed = BoxedTensor.from_flat(flat[start:stop], local.shape, offsets, whole.shape, start)
        assert check_parts(boxed, whole) == stop - start
        assert all(v.data_ptr() >= flat.data_ptr() for v in boxed.views)
        assert len(boxed.boxes) <= 5
        for box in boxed.boxes:
            seen[box.slices()] += 1
    assert torch.equal(seen, torch.ones_like(seen))


@pytest.mark.parametrize("padded_dim", [0, 1])
def test_flat_slices_of_a_padded_tensor_leave_the_padding_out(padded_dim: int) -> None:
    whole = counted((5, 3))
    local = torch.nn.functional.pad(whole, (0, 0, 0, 3) if padded_dim == 0 else (0, 2), value=-1)
    flat = local.reshape(-1).contiguous()
    for start, stop in itertools.combinations(range(flat.numel() + 1), 2):
        boxed = BoxedTensor.from_flat(
            flat[start:stop], local.shape, (0, 0), (5, 3), start, sizes=(5, 3)
        )
        assert check_parts(boxed, whole) == int((flat[start:stop] >= 0).sum())


def test_replicated_and_scalar_tensors_are_one_box() -> None:
    assert BoxedTensor.of(torch.ones(2, 3)).boxes == (Box((0, 0), (2, 3)),)
    assert BoxedTensor.of(torch.tensor(3.0)).boxes == (Box((), ()),)
    scalar = BoxedTensor.from_flat(torch.ones(1), (), (), (), 0)
    assert scalar.boxes == (Box((), ()),)
    assert scalar.views[0].shape == ()


def test_parameters_lose_their_gradient() -> None:
    boxed = BoxedTensor.of(torch.nn.Parameter(torch.ones(2)))
    assert not boxed.views[0].requires_grad


def test_wrong_shapes_are_refused_with_the_remedy() -> None:
    local = torch.zeros(4, 3)
    with pytest.raises(ValueError, match="without it"):
        BoxedTensor.from_local(local, (7, 3), (4, 0))
    with pytest.raises(ValueError, match="do not fit in the local shape"):
        BoxedTensor.from_local(local, (7, 3), (0, 0), (5, 3))
    with pytest.raises(ValueError, match="must agree in dims"):
        BoxedTensor.from_local(local, (7, 3), (0,))
    with pytest.raises(ValueError, match="contiguous 1-D"):
        BoxedTensor.from_flat(local, (4, 3), (0, 0), (4, 3), 0)
    with pytest.raises(ValueError, match="slice"):
        BoxedTensor.from_flat(torch.zeros(4), (4, 3), (0, 0), (4, 3), 10)


def test_it_computes_nothing() -> None:
    with pytest.raises(NotImplementedError, match="only says where"):
        BoxedTensor.of(torch.ones(2)) + 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_saves_and_loads_it_with_its_own_planners(tmp_path: Path) -> None:
    state = {
        "flat": BoxedTensor.from_flat(torch.arange(11.0), (3, 4), (0, 0), (3, 4), 0),
        "padded": BoxedTensor.from_local(counted((4, 3)), (3, 3), (0, 0), (3, 3)),
        "plain": torch.randn(3, dtype=torch.bfloat16),
        "scalar": torch.tensor(2.5),
    }
    dcp.save(state, storage_writer=BoxWriter(tmp_path))
    assert sorted(p.name for p in tmp_path.rglob("*")) == [
        "data",
        "metadata.json",
        "rank_00000.bin",
    ]
    state |= {"flat": BoxedTensor.of(torch.arange(12.0).view(3, 4))}
    dcp.save(state, storage_writer=BoxWriter(tmp_path / "whole"))
    loaded = {
        "flat": torch.zeros(3, 4),
        "padded": torch.zeros(3, 3),
        "plain": torch.zeros(3, dtype=torch.bfloat16),
        "scalar": torch.tensor(0.0),
    }
    dcp.load(loaded, storage_reader=BoxReader(tmp_path / "whole"))
    assert torch.equal(loaded["flat"], torch.arange(12.0).view(3, 4))
    assert torch.equal(loaded["padded"], counted((3, 3)))
    assert torch.equal(loaded["plain"], state["plain"])
    assert loaded["scalar"] == 2.5
