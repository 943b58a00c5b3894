"""Turns through the peers' memory, where memory and signals are files that processes share: who
waits for whom, and that nothing is written over before it has been read.
"""

import contextlib
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.overlap.by_parts import (
    gather_product,
    gather_product_backward,
    product_scatter,
    product_scatter_backward,
)
from megatron_lightning.parallel.peers import exchange as exchanges
from megatron_lightning.parallel.peers import symmetric
from megatron_lightning.parallel.peers.exchange import abandon_exchanges
from megatron_lightning.parallel.peers.symmetric import SymmetricExchange
from megatron_lightning.parallel.quantized import by_parts as eight_bits
from megatron_lightning.precision.fp8 import FP8TensorRecipe
from megatron_lightning.precision.operands import Operand
from tests.harness import run_ranks

BYTES = 1 << 16


class Stream:
    """In place of a CUDA stream: everything is done at once."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def nothing(self, *args: Any) -> None:
        pass

    record = wait_event = wait_stream = nothing


class Handle:
    """In place of the handle of symmetric memory."""

    def __init__(self, axis: MeshAxis, directory: str) -> None:
        self.axis = axis
        self.memory = [self._file(f"{directory}/memory{r}", BYTES) for r in range(axis.size)]
        self.pads = [self._file(f"{directory}/pad{r}", 256) for r in range(axis.size)]

    def _file(self, path: str, size: int) -> Tensor:
        return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)

    def get_buffer(
        self, rank: int, shape: Any, dtype: torch.dtype, storage_offset: int = 0
    ) -> Tensor:
        count = torch.Size(shape).numel()
        return self.memory[rank].view(dtype)[storage_offset : storage_offset + count].view(shape)

    def get_signal_pad(self, rank: int, shape: Any, dtype: torch.dtype) -> Tensor:
        return self.pads[rank].view(torch.int32)

    def put_signal(self, peer: int, channel: int, timeout_ms: int) -> None:
        pad = self.pads[peer].view(torch.int32)
        _write(pad, channel * self.axis.size + self.axis.rank, 1)

    def wait_signal(self, source: int, channel: int, timeout_ms: int) -> None:
        pad = self.pads[self.axis.rank].view(torch.int32)
        number = channel * self.axis.size + source
        until = time.monotonic() + timeout_ms / 1000
        while int(pad[number]) != 1:
            assert time.monotonic() < until, f"no signal from {source} on channel {channel}"
            time.sleep(0)
        pad[number] = 0


def _write(pad: Tensor, offset: int, value: int) -> None:
    assert int(pad[offset]) == 0, "a signal before the last one has been seen"
    pad[offset] = value


def _exchange(axis: MeshAxis, directory: str, writes: bool, sums: bool = True) -> SymmetricExchange:
    stream = Stream()
    stand_in = SimpleNamespace(
        Stream=Stream,
        Event=Stream,
        current_stream=lambda device=None: stream,
        set_stream=lambda stream: None,
        synchronize=lambda device=None: None,
    )
    vars(symmetric)["torch"] = SimpleNamespace(**{**vars(torch), "cuda": stand_in})
    vars(symmetric)["_SymmetricMemory"] = SimpleNamespace(stream_write_value32=_write)
    exchange = SymmetricExchange(
        axis, torch.device("cpu"), timeout_seconds=20, writes=writes, sums=sums
    )
    exchange.handle, exchange.part_bytes = Handle(axis, directory), 512
    return exchange


def _turns(rank: int, size: int, directory: str, writes: bool) -> None:
    """Many layers one after the other, each rank now and then late."""
    axis = ParallelMesh.build(device=torch.device("cpu"), tensor=size).tp
    before = dict(vars(symmetric))
    try:
        exchange = _exchange(axis, directory, writes)
        late = random.Random(rank)
        for number in range(30):
            generator = torch.Generator().manual_seed(number)
            whole, weights, narrow = (
                torch.randn(shape, generator=generator)
                for shape in ((4 * size, 6), (size, 5, 6), (size, 6, 3))
            )
            time.sleep(late.random() * 0.004)
            part, weight = whole.chunk(size)[rank], weights[rank]
            y = gather_product(part, weight, None, exchange)
            torch.testing.assert_close(y, whole @ weight.t())
            grad_x, grad_weight = gather_product_backward(
                y, part, weight, lambda g, x: g.t() @ x, exchange
            )
            want = sum(whole @ w.t() @ w for w in weights)
            torch.testing.assert_close(grad_x, want.chunk(size)[rank], rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(grad_weight, y.t() @ whole, rtol=1e-5, atol=1e-4)
            if number % 3 == 0:
                time.sleep(late.random() * 0.004)
            z = product_scatter(whole @ weights[rank].t(), weights[rank].t(), exchange)
            torch.testing.assert_close(z, want.chunk(size)[rank], rtol=1e-5, atol=1e-4)
            inner = whole[:, :3] + rank
            grad_x, grad_weight = product_scatter_backward(
                part, inner, narrow[rank], lambda g, x: g.t() @ x, exchange
            )
            torch.testing.assert_close(grad_x, whole @ narrow[rank])
            torch.testing.assert_close(grad_weight, whole.t() @ inner, rtol=1e-5, atol=1e-4)
    finally:
        vars(symmetric).update(before)


@pytest.mark.parametrize(("size", "writes"), [(2, False), (2, True), (3, False), (4, True)])
def test_turns(size: int, writes: bool, tmp_path: Path) -> None:
    for rank in range(size):
        (tmp_path / f"memory{rank}").write_bytes(bytes(BYTES))
        (tmp_path / f"pad{rank}").write_bytes(bytes(256))
    run_ranks(_turns, size, str(tmp_path), writes)


def _turns_of_eight_bits(rank: int, size: int, directory: str) -> None:
    """What is gathered has another dtype and shape than the partial sums of the same turn."""
    axis = ParallelMesh.build(device=torch.device("cpu"), tensor=size).tp
    before, recipe, dtype = dict(vars(symmetric)), FP8TensorRecipe("e5m2"), torch.bfloat16
    try:
        exchange = _exchange(axis, directory, writes=False)
        exchange.part_bytes = 1024
        late = random.Random(rank)
        for number in range(10):
            generator = torch.Generator().manual_seed(number)
            x, *weights = (
                recipe.pair(torch.randn(*shape, generator=generator).to(dtype), "input")
                for shape in ((16 * size, 32), *([(16, 32)] * size))
            )
            itself, turned, factor = x.itself, x.transposed, weights[rank].itself
            assert itself is not None
            assert turned is not None
            assert factor is not None
            own = Operand(itself.values.chunk(size)[rank], itself.scale)
            time.sleep(late.random() * 0.004)
            y = eight_bits.gather_product(recipe, own, factor, dtype, exchange)
            assert torch.equal(y, recipe.product(itself, factor, dtype, forward=True))
            time.sleep(late.random() * 0.004)
            z = eight_bits.product_scatter(recipe, itself, factor, dtype, exchange)
            time.sleep(late.random() * 0.004)
            turn = exchange.begin(16, 16, dtype)
            part = Operand(turned.values.chunk(size, 1)[rank].contiguous(), turned.scale)
            eight_bits.begin_gather_transposed(turn, part)
            sums = eight_bits.partial_sums(recipe, itself, factor, dtype, turn, axis, forward=True)
            joined = eight_bits.gathered_transposed(turn, part, axis)
            sums = turn.add_to(sums)
            turn.end()
            assert torch.equal(joined.values.float(), turned.values.float())
            want = sum(
                recipe.product(itself, w.itself, torch.float32, forward=True) for w in weights
            ).chunk(size)[rank]
            for got in (z, sums):
                torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=0.2)
    finally:
        vars(symmetric).update(before)


@pytest.mark.parametrize("size", [2, 3])
def test_turns_of_eight_bits(size: int, tmp_path: Path) -> None:
    for rank in range(size):
        (tmp_path / f"memory{rank}").write_bytes(bytes(BYTES))
        (tmp_path / f"pad{rank}").write_bytes(bytes(256))
    run_ranks(_turns_of_eight_bits, size, str(tmp_path))


def test_a_rank_that_ends_alone_waits_for_no_signal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It gives itself the signals that it waits for, and takes back those that nobody takes."""
    before = dict(vars(symmetric))
    axis = MeshAxis(name="tp", rank=1, size=2, ranks=(0, 1))
    try:
        exchange = _exchange(axis, str(tmp_path), writes=False)
        vars(symmetric)["torch"].cuda.stream = contextlib.nullcontext
        vars(symmetric)["_SymmetricMemory"].stream_write_value32 = Tensor.__setitem__
        pads = [exchange.handle.pads[rank].view(torch.int32) for rank in (0, 1)]
        pads[0][1], pads[0][2] = 1, 1  # the second is no signal of this rank
        asked = iter([False, True])
        monkeypatch.setattr(exchange, "is_idle", lambda: next(asked))
        monkeypatch.setattr(exchanges, "holding", {exchange})
        abandon_exchanges()
    finally:
        vars(symmetric).update(before)
    assert pads[1][:8].tolist() == [1] * 8
    assert pads[0][:8].tolist() == [0, 0, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(("sums", "parts"), [(True, 2 * 5), (False, 2 * 3)])
def test_room_is_made_for_what_is_used(sums: bool, parts: int, tmp_path: Path) -> None:
    before = dict(vars(symmetric))
    axis = MeshAxis(name="tp", size=3, ranks=(0, 1, 2), group=SimpleNamespace(group_name="tp"))
    try:
        exchange = _exchange(axis, str(tmp_path), writes=False, sums=sums)
        memory = SimpleNamespace(
            empty_strided_p2p=lambda size, *_: torch.empty(size, dtype=torch.uint8),
            rendezvous=lambda memory, group: object(),
        )
        vars(symmetric)["_SymmetricMemory"] = memory
        exchange.begin(2, 256, torch.float32)
        assert exchange.held_bytes == parts * 2048
    finally:
        vars(symmetric).update(before)
