"""What do products lose while another kernel holds some multiprocessors, as NCCL's kernels do?

    python benchmarks/products_beside.py --out results.json

Products of shape (a) (16,384 tokens, hidden size 2048, weight gradients added in float32),
attention forward and backward, and an Adam-like pass over memory run in a row of calls while a
kernel on a stream of its own holds 1 to 32 multiprocessors (512 threads a block, spinning) from
before the first call to after the last. `ratio` is their time over that alone; `warp`: the kernel
is one warp, as one that waits for a signal. `told`: cuBLAS was told to leave that many
multiprocessors out (torch's carve-out), beside the same kernel, and alone. `short_lost_ms`: the
kernel holds 16 of them for 0.5 ms, about a bucket's reduction, ten times in a row of calls; what
each time costs, for a stream of usual and of high priority. `copies`: host memory is copied by a
copy engine meanwhile. One GPU.
"""

# Triton is optional, and a kernel is indexed by its grid.
# pyright: reportMissingImports=false, reportIndexIssue=false

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.language.extra.cuda import globaltimer

from megatron_lightning.parallel.main_gradient import add_product_

TOKENS, HIDDEN, FFN = 16384, 2048, 8192
HELD = (1, 2, 4, 8, 16, 24, 32)
CALLS, REPEATS = 10, 3
Call = Callable[[], Any]


@triton.jit
def _hold(nanoseconds):
    begin = globaltimer()
    now = begin
    while now - begin < nanoseconds:
        now = globaltimer()


def hold(multiprocessors: int, milliseconds: float, warps: int = 16) -> None:
    """Launch the kernel on the current stream."""
    _hold[(multiprocessors,)](int(milliseconds * 1e6), num_warps=warps)


def random(*shape: int) -> Tensor:
    """Bfloat16 numbers."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / 8


def calls() -> dict[str, Call]:
    """What runs beside the kernel."""
    x, wide, pair = random(TOKENS, HIDDEN), random(TOKENS, FFN), random(TOKENS, 2 * FFN)
    w1, w2, wq = random(2 * FFN, HIDDEN), random(HIDDEN, FFN), random(3072, HIDDEN)
    sum1 = torch.zeros(2 * FFN, HIDDEN, device="cuda")
    q = random(4, 32, 4096, 64).requires_grad_()
    k, v = (random(4, 8, 4096, 64).requires_grad_() for _ in range(2))
    grad = random(4, 32, 4096, 64)
    a, b = (torch.zeros(2**27, device="cuda") for _ in range(2))

    def attend() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    out = attend()
    return {
        "fc1 forward": lambda: x @ w1.t(),
        "fc2 forward": lambda: wide @ w2.t(),
        "qkv forward": lambda: x @ wq.t(),
        "fc1 input gradient": lambda: pair @ w1,
        "fc2 input gradient": lambda: x @ w2,
        "fc1 weight gradient": lambda: add_product_(sum1, pair, x, first=False),
        "attention forward": attend,
        "attention backward": lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True),
        "pass over memory": lambda: a.add_(b),
    }


def time_of(
    call: Call, beside: Call | None = None, calls: int = CALLS, priority: int = -1
) -> float:
    """Milliseconds of a call among several in a row, median of a few rows; `beside` is launched
    before, on a stream of `priority`.
    """
    stream = torch.cuda.Stream(priority=priority)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        if beside is not None:
            with torch.cuda.stream(stream):
                beside()
            torch.cuda._sleep(200_000)  # until it runs
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / calls)
    return statistics.median(times)


@contextmanager
def told(multiprocessors: int) -> Iterator[None]:
    """CuBLAS leaves some multiprocessors out."""
    torch._C._set_sm_carveout_experimental(multiprocessors)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(None)


def copies_of(source: Tensor, target: Tensor) -> Call:
    """Copies by an engine, for long enough."""

    def copy() -> None:
        for _ in range(16):
            target.copy_(source, non_blocking=True)

    return copy


def row_of(call: Call, copy: Call) -> dict[str, Any]:
    """All that is measured of one call."""
    for _ in range(3):
        call()
    alone = time_of(call)
    enough = 3 * CALLS * alone + 1
    row: dict[str, Any] = {"alone_ms": round(alone, 4)}

    def ratio(held: int, warps: int = 16) -> float:
        return round(time_of(call, lambda: hold(held, enough, warps)) / alone, 3)

    row["ratio"] = {held: ratio(held) for held in HELD}
    row["warp"] = ratio(1, warps=1)
    row["told"] = {}
    for held in (8, 16):
        with told(held):
            row["told"][held] = {"beside": ratio(held), "alone": round(time_of(call) / alone, 3)}
    many = max(CALLS, int(20 / alone))
    plain = time_of(call, calls=many) * many

    def short() -> None:
        for _ in range(10):
            hold(16, 0.5)
            torch.cuda._sleep(1_500_000)

    row["short_lost_ms"] = [
        round((time_of(call, short, calls=many, priority=priority) * many - plain) / 10, 3)
        for priority in (0, -1)
    ]
    row["copies"] = round(time_of(call, copy) / alone, 3)
    return row


def main() -> None:
    """A row for each call."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    for warps in (1, 16):
        hold(1, 0.1, warps)
    source = torch.zeros(2**28, dtype=torch.uint8, pin_memory=True)
    copy = copies_of(source, source.to("cuda"))
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count,
        "rows": {},
    }
    for name, call in calls().items():
        result["rows"][name] = row = row_of(call, copy)
        print(name, json.dumps(row), flush=True)
    if args.out:
        with open(args.out, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
