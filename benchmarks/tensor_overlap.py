"""What hides the collectives of tensor parallelism: each layer's products with and without overlap.

The four linear layers of shape (a) (16,384 tokens, hidden size 2048), split over the ranks with
sequence parallelism, forward and backward, by each transport:

    torchrun --nproc-per-node 2 benchmarks/tensor_overlap.py

alone: the products without any communication. plain: a collective, then the whole product (in the
backward pass begun early, as the layers do). messages: parts by NCCL's point-to-point calls.
symmetric: parts written to the peers' memory, signals by kernels or by the stream. fused: torch's
own operations (forward only). Prints medians in milliseconds, on the device and to launch a call,
and the largest difference from plain.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.collectives import (
    all_gather,
    begin_all_gather,
    begin_reduce_scatter,
    reduce_scatter,
)
from megatron_lightning.parallel.main_gradient import add_product_
from megatron_lightning.parallel.overlap.by_parts import (
    gather_product,
    gather_product_backward,
    product_scatter,
    product_scatter_backward,
)
from megatron_lightning.parallel.peers.exchange import Exchange, MessageExchange, release_exchanges
from megatron_lightning.parallel.peers.symmetric import SymmetricExchange

LAYERS = {  # kind, in, out of the whole layer
    "qkv": ("column", 2048, 3072),
    "proj": ("row", 2048, 2048),
    "fc1": ("column", 2048, 16384),
    "fc2": ("row", 8192, 2048),
}
Form = tuple[Callable[[], Any], Callable[[], Any] | None]


def median_ms(call: Callable[[], Any], repeats: int = 15, calls: int = 5) -> tuple[float, float]:
    """Milliseconds of one call, of several in a row, on the device and to launch it. The ranks
    start together, and only when all is launched, so that the first is what a busy device takes.
    """
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times, launches = [], []
    for repeat in range(repeats + 3):
        dist.barrier()
        torch.cuda._sleep(20_000_000)  # some 10 ms
        begin.record()
        started = time.perf_counter()
        for _ in range(calls):
            call()
        launched = 1e3 * (time.perf_counter() - started) / calls
        end.record()
        torch.cuda.synchronize()
        if repeat >= 3:
            times.append(begin.elapsed_time(end) / calls)
            launches.append(launched)
    return round(statistics.median(times), 4), round(statistics.median(launches), 4)


class Layer:
    """One rank's part of a layer, its input, its output's gradient and its main gradient."""

    def __init__(self, kind: str, fan_in: int, fan_out: int, tokens: int, axis: MeshAxis) -> None:
        self.kind, self.axis = kind, axis
        n = axis.size
        column = kind == "column"
        shape = (fan_out // n, fan_in) if column else (fan_out, fan_in // n)
        make = dict(device="cuda", dtype=torch.bfloat16)
        rows_in, rows_out = (tokens // n, tokens) if column else (tokens, tokens // n)
        self.weight = torch.randn(shape, **make) * fan_in**-0.5
        self.x = torch.randn(rows_in, shape[1], **make)
        self.grad = torch.randn(rows_out, shape[0], **make)
        self.total = torch.zeros(shape, device="cuda")

    def add(self, grad: Tensor, x: Tensor) -> None:
        """The weight's gradient, to the float32 sum."""
        add_product_(self.total, grad, x, first=False)

    def alone(self) -> Form:
        """Without communication."""
        whole_x = self.x if self.kind == "row" else self.x.repeat(self.axis.size, 1)
        whole_grad = self.grad if self.kind == "column" else self.grad.repeat(self.axis.size, 1)

        def backward() -> Tensor:
            grad_x = whole_grad @ self.weight
            self.add(whole_grad, whole_x)
            return grad_x

        return lambda: whole_x @ self.weight.t(), backward

    def plain(self) -> Form:
        """One collective before or behind the product."""
        axis, weight = self.axis, self.weight

        def column_backward() -> Tensor:
            gathered = begin_all_gather(self.x, axis, 0)
            grad_x = self.grad @ weight
            whole = gathered()
            reduced = begin_reduce_scatter(grad_x, axis, 0)
            self.add(self.grad, whole)
            return reduced()

        def row_backward() -> Tensor:
            grad = all_gather(self.grad, axis, 0)
            grad_x = grad @ weight
            self.add(grad, self.x)
            return grad_x

        if self.kind == "column":
            return lambda: all_gather(self.x, axis, 0) @ weight.t(), column_backward
        return lambda: reduce_scatter(self.x @ weight.t(), axis, 0), row_backward

    def overlapped(self, exchange: Exchange) -> Form:
        """Part by part."""
        x, weight, grad = self.x, self.weight, self.grad
        if self.kind == "column":
            return (
                lambda: gather_product(x, weight, None, exchange),
                lambda: gather_product_backward(grad, x, weight, self.add, exchange)[0],
            )
        return (
            lambda: product_scatter(x, weight, exchange),
            lambda: product_scatter_backward(grad, x, weight, self.add, exchange)[0],
        )

    def fused(self) -> Form:
        """The same by operations of torch."""
        name = self.axis.group.group_name
        ops = torch.ops.symm_mem
        factor = self.weight.t()
        if self.kind == "column":
            return lambda: ops.fused_all_gather_matmul(self.x, [factor], 0, name)[1][0], None
        return lambda: ops.fused_matmul_reduce_scatter(self.x, factor, "sum", 0, name), None


def transports(axis: MeshAxis, device: torch.device) -> dict[str, Any]:
    """Exchanges that work here."""
    found: dict[str, Any] = {"messages": MessageExchange(axis)}
    for name, writes in (("symmetric", False), ("symmetric, writes", True)):
        exchange = SymmetricExchange(axis, device, writes=writes)
        try:
            x = torch.full((1024, 64), float(axis.rank), device=device, dtype=torch.bfloat16)
            turn = exchange.begin(x.shape[0], x.shape[1], x.dtype)
            turn.gather(x, joins=True)
            seen = turn.whole().view(axis.size, -1)[:, 0].tolist()
            turn.end()
            assert seen == list(range(axis.size)), seen
            found[name] = exchange
        except (RuntimeError, AssertionError) as error:
            print(f"rank {axis.rank}: {name} does not work: {error}", flush=True)
    return found


def measure(name: str, tokens: int, axis: MeshAxis, exchanges: dict[str, Any]) -> dict[str, Any]:
    """Times of one layer by each form."""
    layer = Layer(*LAYERS[name], tokens, axis)
    forms: dict[str, Form] = {"alone": layer.alone(), "plain": layer.plain()}
    forms |= {key: layer.overlapped(exchange) for key, exchange in exchanges.items()}
    if "symmetric" in exchanges:
        forms["fused"] = layer.fused()
    expected = [call() for call in forms["plain"] if call is not None]
    result: dict[str, Any] = {}
    for key, calls in forms.items():
        row: dict[str, float] = {}
        for label, call, right in zip(("forward", "backward"), calls, expected, strict=True):
            if call is None:
                continue
            if key != "alone":
                off = (call() - right).abs().max() / right.abs().max()
                row[f"{label}_difference"] = round(float(off), 5)
            row[f"{label}_ms"], row[f"{label}_launch_ms"] = median_ms(call)
        result[key] = row
    return result


def moves(tokens: int, axis: MeshAxis, exchanges: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds, and those to launch it, of an all-gather of all tokens by each transport."""
    x = torch.randn(tokens // axis.size, 2048, device="cuda", dtype=torch.bfloat16)

    def turn(exchange: Exchange) -> None:
        one = exchange.begin(x.shape[0], x.shape[1], x.dtype)
        one.gather(x, joins=True)
        one.whole()
        one.end()

    times = {"nccl": median_ms(lambda: all_gather(x, axis, 0))}
    for key, exchange in exchanges.items():
        times[key] = median_ms(lambda one=exchange: turn(one))
    return times


def main() -> None:
    """Measure all layers and print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), choices=list(LAYERS))
    args = parser.parse_args()
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=60))
    size = dist.get_world_size()
    group: Any = dist.group.WORLD
    axis = MeshAxis(name="tp", rank=rank, size=size, ranks=tuple(range(size)), group=group)
    multicast = symmetric_memory._SymmetricMemory.has_multicast_support(
        torch._C._autograd.DeviceType.CUDA, device.index
    )
    if multicast:
        raise SystemExit("set TORCH_SYMM_MEM_DISABLE_MULTICAST=1: multicast is not measured here")
    torch.manual_seed(rank)
    exchanges = transports(axis, device)
    result = {"moves": moves(args.tokens, axis, exchanges)}
    result |= {name: measure(name, args.tokens, axis, exchanges) for name in args.layers}
    if rank == 0:
        for name, forms in result.items():
            print(name, flush=True)
            for key, value in forms.items():
                print(f"  {key:20} {value}", flush=True)
        print(json.dumps(result), flush=True)
    release_exchanges()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
