"""Copies on nodes: where they lie, which step is whole, what is kept; folders between ranks."""

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lightning import MegatronStrategy
from megatron_lightning.checkpoint import (
    BoxedTensor,
    CheckpointError,
    load,
    load_objects,
    verify,
)
from megatron_lightning.checkpoint.codec import Codec
from megatron_lightning.checkpoint.commit import begin
from megatron_lightning.checkpoint.data_file import DataFile
from megatron_lightning.checkpoint.exchange import exchange
from megatron_lightning.checkpoint.local import (
    clean,
    copies_in,
    newest_whole,
    own_path,
    partner_of,
    peer_path,
    prune,
)
from megatron_lightning.checkpoint.parts import PartPlan, is_part
from megatron_lightning.checkpoint.ranks import ALONE
from megatron_lightning.checkpoint.saving import encode_objects
from megatron_lightning.config.checkpoint import CheckpointConfig
from megatron_lightning.config.local_checkpoint import LocalCheckpointConfig
from tests.harness import run_ranks


def held(value: float) -> dict[str, torch.Tensor]:
    """Two rows of a tensor of five, three elements of a flat buffer, and a replica."""
    flat = torch.full((3,), value)
    return {
        "rows": BoxedTensor.from_local(torch.full((2, 4), value), (5, 4), (1, 0)),
        "flat": BoxedTensor.from_flat(flat, (2, 4), (0, 0), (4, 4), 2),
        "whole": torch.full((3,), value),
        "none": BoxedTensor.from_local(torch.empty(0, 4), (5, 4), (5, 0), (0, 4)),
    }


def write(path: Path, rank: int, step: int, value: float = 1.0, layout: str = "a") -> None:
    """A part as a rank writes it."""
    large = torch.arange(2000.0)
    metadata = {"global_step": step, "part": rank, "local_layout": layout}
    objects = encode_objects({"text": "x", "large": large}, metadata, Codec())
    plan = PartPlan({**held(value), **objects.tensors})
    staging = begin(path)
    (staging / "data").mkdir()
    boxes = []
    with DataFile(staging / plan.plan.storage_data) as file:
        for item in plan.plan.items:
            data = plan.planner.resolve_data(item).contiguous().numpy().tobytes()
            start = file.begin_box()
            file._append_counted(data)
            boxes.append((start, len(data), zlib.crc32(data)))
    answer = {"boxes": boxes, "size": file.size, "crc32": file.crc32}
    plan.commit(path, staging, answer, objects)


def test_a_part_comes_back(tmp_path: Path) -> None:
    path = own_path(tmp_path, 3, 20)
    write(path, 3, 20, value=7.0)
    assert is_part(path)
    verify(path)
    target = held(0.0)
    report = load(path, target, process_group=ALONE)
    assert not report.describe()
    assert torch.equal(target["whole"], torch.full((3,), 7.0))
    for name in ("rows", "flat"):
        for view in target[name].views:  # type: ignore[attr-defined]
            assert torch.equal(view, torch.full_like(view, 7.0)), name
    assert torch.equal(load_objects(path)["large"], torch.arange(2000.0))


def test_a_part_that_holds_less_than_is_asked_for_is_refused(tmp_path: Path) -> None:
    path = own_path(tmp_path, 0, 1)
    write(path, 0, 1)
    with pytest.raises(CheckpointError, match="only a part of what this rank holds of .rows"):
        load(
            path,
            {"rows": BoxedTensor.from_local(torch.zeros(3, 4), (5, 4), (2, 0))},
            strict="none",
            process_group=ALONE,
        )


def test_copies_that_are_seen(tmp_path: Path) -> None:
    assert copies_in(tmp_path) == []
    write(own_path(tmp_path, 0, 2), 0, 2)
    write(peer_path(tmp_path, 0, 5, 2), 5, 2, layout="b")
    write(own_path(tmp_path, 1, 4), 0, 4)  # of another rank than its place says
    write(own_path(tmp_path, 1, 6), 1, 7)  # of another step
    (own_path(tmp_path, 1, 8)).mkdir()
    torn = own_path(tmp_path, 2, 2)
    write(torn, 2, 2)
    (torn / "data" / "part.bin").write_bytes(b"x")
    found = {(copy.rank, copy.step, copy.layout, copy.path) for copy in copies_in(tmp_path)}
    assert found == {
        (0, 2, "a", own_path(tmp_path, 0, 2)),
        (5, 2, "b", peer_path(tmp_path, 0, 5, 2)),
    }


def test_partners() -> None:
    assert [partner_of(rank, 4, 4) for rank in range(4)] == [1, 2, 3, 0]
    assert [partner_of(rank, 6, 2) for rank in range(6)] == [2, 3, 4, 5, 0, 1]
    for size, node in ((4, 4), (6, 2), (16, 8)):  # each keeps one, of another node if there is one
        partners = [partner_of(rank, size, node) for rank in range(size)]
        assert sorted(partners) == list(range(size))
        if size > node:
            assert all(partner // node != rank // node for rank, partner in enumerate(partners))


def test_newest_whole_step() -> None:
    assert newest_whole([[], []]) is None
    assert newest_whole([[(0, 4)], [(1, 2)]]) is None
    choice = newest_whole([[(0, 2), (0, 4), (1, 2)], [(1, 4), (0, 2), (1, 2)]])
    assert choice is not None
    assert (choice.step, choice.providers) == (4, {0: 0, 1: 1})
    lost = newest_whole([[(0, 4), (2, 4)], [], [(1, 4)]])
    assert lost is not None
    assert (lost.step, lost.providers) == (4, {0: 0, 1: 2, 2: 0})


def test_what_is_kept(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        write(own_path(tmp_path, 0, step), 0, step)
        write(peer_path(tmp_path, 0, 1, step), 1, step)
    write(own_path(tmp_path, 1, 2), 1, 2)
    prune(tmp_path, 0, keep=2, complete=6)
    kept = [(0, 4), (0, 6), (0, 8), (1, 2), (1, 4), (1, 6), (1, 8)]
    assert sorted((copy.rank, copy.step) for copy in copies_in(tmp_path)) == kept
    begin(own_path(tmp_path, 0, 10))  # interrupted
    clean(tmp_path, 0, keep_step=6)
    assert [(c.rank, c.step) for c in copies_in(tmp_path)] == [(0, 6), (1, 6), (1, 2)]
    assert len(list((tmp_path / "rank_00000").iterdir())) == 2


def pass_on(rank: int, world_size: int, folder: str) -> list[tuple[int, int]]:
    """Each rank gives its part to the next."""
    node = Path(folder) / f"node{rank}"
    write(own_path(node, rank, 5), rank, 5, value=float(rank))
    before = (rank - 1) % world_size
    kept = peer_path(node, rank, before, 5)
    group: Any = torch.distributed.new_group(backend="gloo")
    exchange(
        group,
        send=(own_path(node, rank, 5), (rank + 1) % world_size),
        receive=(kept, before),
    )
    verify(kept)
    target = held(-1.0)
    load(kept, target, process_group=ALONE)
    assert torch.equal(target["whole"], torch.full((3,), float(before)))
    return [(copy.rank, copy.step) for copy in copies_in(node)]


def test_folders_between_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    views = run_ranks(pass_on, 4, str(tmp_path))
    assert views == [[(rank, 5), ((rank - 1) % 4, 5)] for rank in range(4)]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (dict(folder=""), "checkpoint.local.folder=''"),
        (dict(folder="relative"), "give an absolute path"),
        (dict(folder="/dev/null/x"), "can't be written"),
        (dict(every_n_steps=0), "checkpoint.local.every_n_steps=0"),
        (dict(keep=True), "checkpoint.local.keep=True"),
    ],
)
def test_wrong_values(values: dict[str, object], said: str, tmp_path: Path) -> None:
    right = LocalCheckpointConfig(folder=str(tmp_path / "a" / "b"))
    assert right.check() == []
    (problem,) = LocalCheckpointConfig(**{"folder": str(tmp_path), **values}).check()  # type: ignore[arg-type]
    assert said in problem


def test_a_number_is_no_switch(tmp_path: Path) -> None:
    wrong = LocalCheckpointConfig(folder=str(tmp_path), peer_copies=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"checkpoint\.local\.peer_copies=1 must be True or False"):
        MegatronStrategy(checkpoint=CheckpointConfig(local=wrong))
