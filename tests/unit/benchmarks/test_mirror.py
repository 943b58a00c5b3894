"""One rank of a layout of two, alone: every layout that the benchmark measures so starts."""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.peers import symmetric
from tests.distributed.test_symmetric_turns import _exchange
from tests.harness import run_ranks_fresh

FOLDER = Path(__file__).parents[3] / "benchmarks"


def _train(rank: int, world_size: int, words: list[str], out: str) -> dict[str, Any]:
    sys.path.insert(0, str(FOLDER))
    import train_step

    common = ["--shapes", "tiny", "--mirror", "2", "--warm", "1", "--steps", "2", "--out", out]
    sys.argv = ["train_step.py", *common, *words]
    train_step.main()
    assert not dist.is_initialized()
    return json.loads(Path(out).read_text())


@pytest.mark.parametrize(
    ("words", "trains"),
    [
        ("--tp 2", True),
        ("--tp 2 --rank 1 --set runtime.overlap_tensor_parallel=True", True),
        pytest.param("--sharding optimizer", True, marks=pytest.mark.slow),
        pytest.param(
            "--pp 2 --schedule zb-v --virtual 2 --accumulate 4", True, marks=pytest.mark.slow
        ),
        ("--pp 2 --schedule zb-v --virtual 2 --accumulate 4 --rank 1", False),
        pytest.param("--cp 2 --context all_to_all", True, marks=pytest.mark.slow),
        pytest.param("--pp 2 --accumulate 4 --rank 1", True, marks=pytest.mark.slow),
    ],
)
def test_layout_starts(words: str, trains: bool, tmp_path: Path) -> None:
    (row,) = run_ranks_fresh(_train, 1, words.split(), str(tmp_path / "out.json"))
    assert row["devices"] == 2
    assert row["mirror"] == f"rank {int('--rank 1' in words)} of 2"
    assert 0 < row["host_ms"] <= row["step_ms"]
    assert (4 < row["first_loss"] < 7) is trains  # about log 256; 0 where another rank has it


def _collectives(rank: int, world_size: int, group_rank: int) -> list[list[float]]:
    sys.path.insert(0, str(FOLDER))
    from mirror import mirrored

    own = torch.arange(2.0)
    with mirrored(ranks=2, rank=group_rank):
        joined, part = torch.empty(4), torch.empty(1)
        dist.all_gather_into_tensor(joined, own)
        dist.reduce_scatter_tensor(part, own)
        whole = own.clone()
        dist.all_reduce(whole, group=dist.new_group([0, 1], backend="gloo"), async_op=True).wait()
        highest = own.clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        exchanged, received = torch.empty(2), torch.empty(2)
        dist.all_to_all_single(exchanged, own)
        objects: list[Any] = [None, None]
        dist.all_gather_object(objects, {"a": group_rank})
        assert objects == [{"a": group_rank}] * 2
        peer = 1 - group_rank
        operations = [dist.P2POp(dist.isend, own, peer), dist.P2POp(dist.irecv, received, peer)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        heard = torch.empty(4096)
        dist.recv(heard, peer)
        assert 0.5 < float(heard.std()) < 2
    found = [joined, part, whole, highest, exchanged, received]
    return [tensor.tolist() for tensor in found]


@pytest.mark.parametrize("group_rank", [0, 1])
def test_the_other_rank_is_a_mirror_image(group_rank: int) -> None:
    (found,) = run_ranks_fresh(_collectives, 1, group_rank)
    assert found == [[0, 1, 0, 1], [2 * group_rank], [0, 2], [0, 1], [0, 1], [0, 1]]


def test_a_run_that_fails_gives_itself_signals(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As one rank of several does when it ends alone, so that its own error is shown."""
    monkeypatch.syspath_prepend(str(FOLDER))
    from mirror import OwnMemory

    axis = MeshAxis(name="tp", size=2, ranks=(0, 1))
    before = dict(vars(symmetric))
    try:
        exchange = _exchange(axis, str(tmp_path), writes=True)
        vars(symmetric)["torch"].cuda.stream = contextlib.nullcontext
        vars(symmetric)["_SymmetricMemory"] = OwnMemory
        memory = OwnMemory.empty_strided_p2p((4096,), (1,), torch.uint8, torch.device("cpu"))
        exchange.handle = OwnMemory.rendezvous(memory, "tp")
        exchange.signal(1, 0)
        exchange.give_signals()
    finally:
        vars(symmetric).update(before)
