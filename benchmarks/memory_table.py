"""Who holds the memory at a training step's peak?

Takes the options of `train_step.py` and runs it with torch's record of allocations on. Then prints,
for the moment at which this process held most, what was alive: GiB, number of pieces, the size of
one, and the line that allocated it (of this package, and the innermost one where that is another).

    python benchmarks/memory_table.py --compile --warm 1 --steps 1
    python benchmarks/memory_table.py --compile --devices 2 --pp 2 --accumulate 8 --warm 1 --steps 1

Each process prints its own table. Steps are slower than without the record.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Frame = Mapping[str, Any]
Event = Mapping[str, Any]

PACKAGE = "megatron_lightning"
FREED = "free_requested"
"""From then on torch counts memory as free, though another stream may use it still."""


def alive_at_peak(events: Iterable[Event]) -> tuple[int, list[Event]]:
    """(bytes, allocations) alive when their sum was largest, of a trace that begins with nothing
    allocated.
    """
    alive: dict[int, Event] = {}
    total = peak = 0
    freed_since: dict[int, Event] = {}
    made_since: set[int] = set()
    for event in events:
        address = event["addr"]
        if event["action"] == "alloc":
            alive[address] = event
            made_since.add(address)
            total += event["size"]
            if total > peak:
                peak = total
                freed_since, made_since = {}, set()
        elif event["action"] == FREED and address in alive:
            gone = alive.pop(address)
            total -= gone["size"]
            if address in made_since:
                made_since.remove(address)
            else:
                freed_since.setdefault(address, gone)
    then = [event for address, event in alive.items() if address not in made_since]
    return peak, then + list(freed_since.values())


def place_of(frames: Sequence[Frame]) -> str:
    """The innermost line of this package, and the innermost of all; frames as torch gives them."""
    if not frames:
        return "(no Python: autograd or the allocator's own)"
    inner = _line(frames[0])
    own = next((_line(frame) for frame in frames if PACKAGE in frame["filename"]), None)
    if own is None or own == inner:
        return inner
    return f"{own} < {inner}"


def _line(frame: Frame) -> str:
    path = Path(frame["filename"])
    folder = "" if path.parent.name in ("", ".") else f"{path.parent.name}/"
    return f"{folder}{path.name}:{frame['line']} {frame['name']}"


def table(events: Iterable[Event], rows: int = 60) -> str:
    """A line for each place and size, the largest sums first."""
    peak, alive = alive_at_peak(events)
    count: Counter[tuple[int, str]] = Counter()
    for event in alive:
        count[event["size"], place_of(event.get("frames", ()))] += 1
    lines = [f"peak {peak / 2**30:.2f} GiB in {len(alive)} pieces"]
    order = sorted(count, key=lambda key: -key[0] * count[key])
    for size, place in order[:rows]:
        number = count[size, place]
        lines.append(f"{number * size / 2**30:8.3f} GiB {number:5d} x {_size(size)}  {place}")
    left = sum(count[key] * key[0] for key in order[rows:])
    lines.append(f"{left / 2**30:8.3f} GiB in smaller sums")
    return "\n".join(lines)


def _size(size: int) -> str:
    return f"{size / 2**20:9.2f} MiB" if size >= 1 << 20 else f"{size / 2**10:9.2f} KiB"


def main() -> None:
    """Run `train_step.py` under the record and print the table of this process."""
    import torch
    import train_step

    torch.cuda.memory._record_memory_history(
        context="alloc", stacks="python", max_entries=4_000_000
    )
    try:
        train_step.main()
    finally:
        device = torch.cuda.current_device()
        snapshot: Any = torch.cuda.memory._snapshot(device)
        trace = snapshot["device_traces"][device]
        torch.cuda.memory._record_memory_history(enabled=None)
        print(f"rank {os.environ.get('LOCAL_RANK', '0')}: {table(trace)}", flush=True)


if __name__ == "__main__":
    main()
