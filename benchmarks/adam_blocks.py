"""Adam's kernel by block, warps and what the cache is told: milliseconds and bytes a second.

    python benchmarks/adam_blocks.py

Tensors of the sizes of two layers and the embedding of shape b; 30 bytes a parameter.
"""

import itertools
import statistics

import torch

from megatron_lightning.layers.kernels import adam

_SIZES = [25165824, 16777216, 117440512, 58720256] * 2 + [525336576]
_BYTES = 30


def tables(block: int) -> tuple[torch.Tensor, ...]:
    """Table, which tensor and which block of it each program works on, and what must live on."""
    held, rows, members, blocks = [], [], [], []
    for number, size in enumerate(_SIZES):
        whole = [torch.zeros(size, device="cuda") for _ in range(4)]
        copy = torch.zeros(size, device="cuda", dtype=torch.bfloat16)
        held += [*whole, copy]
        rows.append([*(one.data_ptr() for one in (*whole, copy)), size])
        count = -(-size // block)
        members.append(torch.full((count,), number, dtype=torch.int32))
        blocks.append(torch.arange(count, dtype=torch.int32))
    table = torch.tensor(rows, dtype=torch.int64, device="cuda")
    return table, torch.cat(members).cuda(), torch.cat(blocks).cuda(), *held


def milliseconds(block: int, warps: int, policy: str) -> float:
    """Median of ten steps."""
    table, member_of, block_of, *held = tables(block)
    corrections = torch.full((len(_SIZES), 2), 0.5, device="cuda")
    one = torch.ones((), device="cuda")
    times = []
    for _ in range(12):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        adam.update(
            table,
            member_of,
            block_of,
            corrections,
            one,
            one,
            lr=1e-4,
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            weight_decay=0.1,
            decoupled=True,
            copy_dtype=torch.bfloat16,
            block=block,
            warps=warps,
            policy=policy,
        )
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    del held
    return statistics.median(times[2:])


def main() -> None:
    """Print a line for each."""
    forms = itertools.product((1024, 2048, 4096, 8192), (4, 8, 16), ("", "evict_first"))
    for block, warps, policy in forms:
        if not 4 <= block // (32 * warps) <= 32:
            continue
        took = milliseconds(block, warps, policy)
        speed = sum(_SIZES) * _BYTES / took / 1e9
        print(f"block {block:5d} warps {warps:2d} {policy:12} {took:7.3f} ms  {speed:.2f} TB/s")


if __name__ == "__main__":
    main()
