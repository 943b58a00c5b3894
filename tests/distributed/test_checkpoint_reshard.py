"""A checkpoint written in one layout loads bitwise in any other: weights and flat optimizer shards.

The model is small but has every awkward thing: layers that do not divide over the stages, a padded
vocabulary, tied embeddings on the first and last stage (replicas of one tensor lie at different
places of flat buffers), tensors split on each dim, replicated ones, and steps without dims.
"""

import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megatron_lightning.checkpoint import (
    BoxedTensor,
    BoxReader,
    BoxWriter,
    CheckpointError,
    list_tensors,
    load,
    load_objects,
    save,
    verify,
)
from megatron_lightning.checkpoint.index import index_from_json
from tests.harness import run_ranks

Layout = tuple[int, int, int]  # sizes of pp, dp, tp; tp fastest
LAYERS, VOCABULARY, HIDDEN = 5, 13, 8
LAYER = {  # shape and the dim that tensor parallelism splits
    "qkv": ((12, 8), 0),
    "proj": ((8, 12), 1),
    "fc1": ((2, 8, 8), 1),
    "experts": ((3, 8, 4), 2),
    "norm": ((7,), None),
}


@dataclass(frozen=True)
class Local:
    """One parameter of a rank."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    global_shape: tuple[int, ...]


def value(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The global tensor of this name: values that depend on name and place."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator).to(dtype)


def split(name: str, shape: tuple[int, ...], dim: int | None, tp: int, t: int) -> Local:
    offsets, local, sizes = [0] * len(shape), list(shape), list(shape)
    if dim is not None:
        local[dim] = -(-shape[dim] // tp)
        offsets[dim] = t * local[dim]
        sizes[dim] = max(0, min(local[dim], shape[dim] - offsets[dim]))
    return Local(name, tuple(offsets), tuple(local), tuple(sizes), shape)


def parameters(rank: int, layout: Layout) -> Iterator[Local]:
    """The parameters of this rank's stage in order; the vocabulary is padded to a multiple."""
    pp, dp, tp = layout
    stage, t = rank // (dp * tp), rank % tp
    first, last = stage * LAYERS // pp, (stage + 1) * LAYERS // pp
    if stage == 0:
        yield split("embedding", (VOCABULARY, HIDDEN), 0, tp, t)
    for layer in range(first, last):
        for name, (shape, dim) in LAYER.items():
            yield split(f"layers.{layer}.{name}", shape, dim, tp, t)
    if stage == pp - 1 and pp > 1:
        yield split("embedding", (VOCABULARY, HIDDEN), 0, tp, t)


def local_value(local: Local, name: str, dtype: torch.dtype) -> torch.Tensor:
    padded = torch.full(local.shape, math.nan, dtype=dtype)
    part = tuple(slice(o, o + n) for o, n in zip(local.offsets, local.sizes, strict=True))
    inside = tuple(slice(0, n) for n in local.sizes)
    if math.prod(local.sizes):
        padded[inside] = value(name, local.global_shape, dtype)[part]
    return padded


def build(rank: int, layout: Layout, *, filled: bool) -> dict[str, BoxedTensor]:
    """Weights as local shards, both moments as slices of flat buffers cut over dp."""
    _, dp, tp = layout
    d = rank // tp % dp
    state: dict[str, BoxedTensor] = {}
    locals_ = list(parameters(rank, layout))
    for local in locals_:
        name, dtype = f"model.{local.name}", torch.bfloat16
        weight = (
            local_value(local, name, dtype) if filled else torch.zeros(local.shape, dtype=dtype)
        )
        state[name] = BoxedTensor.from_local(weight, local.global_shape, local.offsets, local.sizes)
    for moment in ("exp_avg", "exp_avg_sq"):
        contents = [local_value(p, f"optim.{p.name}.{moment}", torch.float32) for p in locals_]
        flat = torch.cat([tensor.reshape(-1) for tensor in contents])
        size = -(-flat.numel() // dp)
        low, high = d * size, min((d + 1) * size, flat.numel())
        shard = torch.nn.functional.pad(flat, (0, size * dp - flat.numel()))[d * size :][
            :size
        ].clone()
        if not filled:
            shard.zero_()
        start = 0
        for local in locals_:
            stop = start + math.prod(local.shape)
            a, b = max(low, start), min(high, stop)
            name = f"optim.{local.name}.{moment}"
            if a < b and name not in state:
                state[name] = BoxedTensor.from_flat(
                    shard[a - low : b - low],
                    local.shape,
                    local.offsets,
                    local.global_shape,
                    a - start,
                    local.sizes,
                )
            start = stop
    state["optim.step"] = BoxedTensor.of(torch.tensor(3.0 if filled else 0.0))
    return state


def save_layout(rank: int, _: int, layout: Layout, path: Path) -> None:
    # Parts of a tensor that a rank holds twice (both ends of a pipeline) are saved once.
    save(path, build(rank, layout, filled=True), {"layout": layout}, metadata={"step": 3})


def load_layout(rank: int, _: int, layout: Layout, path: Path) -> int:
    state = build(rank, layout, filled=False)
    report = load(path, state)
    assert report.describe() == ""
    elements = 0
    for name, boxed in state.items():
        shape = tuple(boxed.shape)
        dtype = torch.bfloat16 if name.startswith("model.") else torch.float32
        whole = torch.tensor(3.0) if name == "optim.step" else value(name, shape, dtype)
        for box, view in zip(boxed.boxes, boxed.views, strict=True):
            assert torch.equal(view, whole[box.slices()]), (name, box)
            elements += box.numel
    return elements


LAYOUTS: list[Layout] = [
    *((1, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 1), (1, 3, 1), (3, 1, 1)),
    *((1, 2, 2), (2, 2, 1), (2, 1, 2), (4, 1, 1), (1, 4, 1), (1, 1, 4)),
]
SAVED = [(1, 2, 2), (2, 2, 1), (2, 1, 2), (4, 1, 1), (1, 4, 1), (1, 1, 4), (1, 1, 1)]


def name_of(layout: Layout) -> str:
    return "pp{}-dp{}-tp{}".format(*layout)


@pytest.mark.parametrize("saved", SAVED, ids=name_of)
def test_any_layout_loads_any_layout_bitwise(tmp_path: Path, saved: Layout) -> None:
    path = tmp_path / "a.ckpt"
    run_ranks(save_layout, math.prod(saved), saved, path)
    verify(path)
    assert load_objects(path) == {"layout": saved}
    elements = sum(math.prod(shape) for shape, _ in LAYER.values()) * LAYERS + VOCABULARY * HIDDEN
    stored = list_tensors(path)
    assert sum(math.prod(tensor.shape) for tensor in stored.values()) == 3 * elements + 1
    for layout in LAYOUTS:
        loaded = run_ranks(load_layout, math.prod(layout), layout, path)
        assert sum(loaded) >= 3 * elements + math.prod(layout)


def test_every_element_is_written_once_and_every_rank_writes(tmp_path: Path) -> None:
    run_ranks(save_layout, 4, (1, 2, 2), tmp_path / "a.ckpt")
    sizes = [file.stat().st_size for file in sorted((tmp_path / "a.ckpt" / "data").iterdir())]
    assert len(sizes) == 4
    assert max(sizes) < 1.2 * min(sizes)
    table = index_from_json((tmp_path / "a.ckpt" / "metadata.json").read_bytes(), "")
    numel = sum(box.length for tensor in table.values() for box in tensor.boxes)
    assert numel == sum(math.prod(t.shape) * t.dtype.itemsize for t in table.values())


# ---- replicas


def replicas() -> dict[str, torch.Tensor]:
    return {f"w{i}": value(f"w{i}", (97 * (i + 1),), torch.float32) for i in range(24)}


def save_replicas(_: int, __: int, path: Path, planner: str) -> None:
    if planner == "ours":
        save(path, replicas(), {})
    else:
        dcp.save(replicas() | {"b": BoxedTensor.of(torch.ones(96))}, storage_writer=BoxWriter(path))


@pytest.mark.parametrize("planner", ["ours", "dcp"])
def test_eight_replicas_are_written_once_in_about_equal_parts(tmp_path: Path, planner: str) -> None:
    run_ranks(save_replicas, 8, tmp_path / "a", planner)
    table = index_from_json((tmp_path / "a" / "metadata.json").read_bytes(), "")
    load_bytes = dict.fromkeys(range(8), 0)
    for stored in itertools.chain.from_iterable(tensor.boxes for tensor in table.values()):
        load_bytes[int(stored.file[-9:-4])] += stored.length
    total = sum(t.numel() for t in replicas().values()) * 4 + (384 if planner == "dcp" else 0)
    assert sum(load_bytes.values()) == total
    assert max(load_bytes.values()) <= (1.1 if planner == "ours" else 1.3) * total / 8
    assert all(len(tensor.boxes) == 1 for tensor in table.values())


# ---- DTensor, torch's own drivers, sub-groups


def dtensor_there(_: int, world: int, path: Path) -> None:
    mesh = init_device_mesh("cpu", (world,))
    whole = value("w", (10, 6), torch.float32)  # 10 rows over 4 ranks: 3, 3, 3, 1
    save(path, {"w": distribute_tensor(whole, mesh, [Shard(0)])}, {})


def dtensor_back(_: int, world: int, path: Path) -> None:
    mesh = init_device_mesh("cpu", (world,))
    whole = value("w", (10, 6), torch.float32)
    target = distribute_tensor(torch.zeros(10, 6), mesh, [Shard(1)])
    load(path, {"w": target})
    assert torch.equal(target.full_tensor(), whole)
    again = distribute_tensor(torch.zeros(10, 6), mesh, [Shard(0)])
    dcp.load({"w": again}, storage_reader=BoxReader(path))
    assert torch.equal(again.full_tensor(), whole)


def test_dtensors_are_saved_and_loaded_by_their_local_shards(tmp_path: Path) -> None:
    run_ranks(dtensor_there, 4, tmp_path / "a")
    run_ranks(dtensor_back, 2, tmp_path / "a")
    run_ranks(dtensor_back, 3, tmp_path / "a")


def sub_group(rank: int, _: int, path: Path) -> list[str]:
    group = dist.new_group([1, 3])
    if rank in (1, 3):
        local = value("w", (4, 3), torch.float32)[rank // 2 * 2 :][:2].clone()
        part = BoxedTensor.from_local(local, (4, 3), (rank // 2 * 2, 0))
        save(path, {"w": part}, {"writer": rank}, process_group=group)
        whole = torch.zeros(4, 3)
        load(path, {"w": whole}, process_group=group)
        assert torch.equal(whole, value("w", (4, 3), torch.float32))
    dist.barrier()
    return os.listdir(path / "data")


def test_a_sub_group_saves_by_itself(tmp_path: Path) -> None:
    files = run_ranks(sub_group, 4, tmp_path / "a")
    assert sorted(files[0]) == ["rank_00000.bin", "rank_00001.bin"]
    assert load_objects(tmp_path / "a") == {"writer": 1}


# ---- GPUs


def on_gpus(rank: int, world: int, path: Path) -> None:
    """NCCL carries the plan and the errors; the data go from and to device memory."""
    device = torch.device("cuda", rank)
    whole = value("w", (8, 6), torch.float32)
    rows = 8 // world
    local = whole[rank * rows :][:rows].to(device)
    flat = value("m", (5, 5), torch.float32).reshape(-1)[12 * rank : 12 + 13 * rank].to(device)
    state = {
        "w": BoxedTensor.from_local(local, (8, 6), (rank * rows, 0)),
        "m": BoxedTensor.from_flat(flat, (5, 5), (0, 0), (5, 5), 12 * rank),
        "replica": torch.arange(5.0, device=device),
    }
    save(path, state, {"rng": torch.cuda.get_rng_state(device)})
    columns = torch.zeros(8, 6 // world, dtype=torch.bfloat16, device=device)
    moments, replica = torch.zeros(5, 5, device=device), torch.zeros(5, device=device)
    part = BoxedTensor.from_local(columns, (8, 6), (0, rank * 6 // world))
    report = load(path, {"w": part, "m": moments, "replica": replica})
    expected = whole.bfloat16().narrow(1, rank * 6 // world, 6 // world)
    assert list(report.converted) == ["w"]
    assert torch.equal(columns.cpu(), expected)
    assert torch.equal(moments.cpu(), value("m", (5, 5), torch.float32))
    assert torch.equal(replica.cpu(), torch.arange(5.0))
    with pytest.raises(CheckpointError, match="of another shape or dtype"):
        load(path, {"w": torch.zeros(1 + rank)})


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_on_gpus_with_nccl(tmp_path: Path) -> None:
    run_ranks(on_gpus, 2, tmp_path / "a", backend="nccl")
    verify(tmp_path / "a")
