"""Which casts to FP8, and which searches for largest values, are fastest on this GPU?

    python benchmarks/fp8_casts.py --out results.json

The matrices are those of shapes (a) and (b) of `shapes.py`: inputs and gradients of all linear
layers. Each kernel is timed alone, with nothing of its matrix in the cache, as the median of some
calls; `share` is the time of a copy of the same bytes in this process over its own. Results of
every setting must be, bit for bit, those of one of them, in both formats, also where weights are
cast together, and the gate's those of a gradient that was written; else it is told as WRONG, and
left out. What is best over a step is printed as the lines of
`megatron_lightning/precision/kernels/choices.py`.

`--seconds` ends it early; settings left out are told. `--tiny` is a dry run, on a CPU too with
`TRITON_INTERPRET=1`, whose times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from fp8_cast_settings import FOREIGN, GATES, MATRICES, SETTINGS, advice, name_of, tiles
from torch import Tensor

from megatron_lightning.layers.kernels import gated_silu, gated_silu_fp8
from megatron_lightning.precision.formats import FP8_MAX, power_of_two_scale
from megatron_lightning.precision.kernels import choices, fp8, fp8_tiles
from megatron_lightning.precision.kernels.choices import Spans, Tiles
from megatron_lightning.precision.operands import BOTH
from megatron_lightning.precision.weight_casts import WeightCasts

FORMAT = "e5m2"
"""Of gradients: casts to it are timed, those to WEIGHTS only compared."""
WEIGHTS = "e4m3"
"""Of inputs and weights."""
(PLAIN,) = tiles((64, 128, 4))
"""Of casts whose results the others must give."""


@dataclass
class Clock:
    """Times calls on the device, with a cold cache."""

    device: torch.device
    repeats: int
    ends: float
    """When to stop, by `time.monotonic`."""

    def __post_init__(self) -> None:
        self._cuda = self.device.type == "cuda"
        self._swept = torch.empty(2**28 if self._cuda else 1, dtype=torch.uint8, device=self.device)

    @property
    def over(self) -> bool:
        """Whether there is no time for another setting."""
        return time.monotonic() > self.ends

    def time(self, call: Callable[[], Any]) -> float:
        """Milliseconds, the median."""
        call()
        if not self._cuda:
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e3
        torch.cuda.synchronize()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * self.repeats)]
        torch.cuda._sleep(3_000_000)  # the host is ahead
        for begin, end in zip(marks[::2], marks[1::2], strict=True):
            self._swept.zero_()
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize()
        pairs = zip(marks[::2], marks[1::2], strict=True)
        return statistics.median(begin.elapsed_time(end) for begin, end in pairs)

    def time_copy(self, count: int) -> float:
        """Milliseconds of a copy that moves as many bytes, reads and writes together."""
        source = torch.empty(max(1, count // 2), dtype=torch.uint8, device=self.device)
        return self.time(partial(torch.empty_like(source).copy_, source))


@dataclass(kw_only=True)
class Case:
    """What is timed with every setting."""

    title: str
    moved: int
    """Bytes read and written."""
    count: int
    """How often in a layer's forward and backward pass."""
    run: Callable[[Any], Any]
    """Of a setting."""
    results: Callable[[Any], list[Any]]
    """Of a setting: what must be as wanted."""
    wanted: list[Any]


def random(rows: int, columns: int, device: torch.device) -> Tensor:
    """Numbers of some magnitudes."""
    x = torch.randn(rows, columns, device=device)
    return (x * torch.randn(rows, 1, device=device).exp2_()).bfloat16()


def same(got: list[Any], want: list[Any]) -> bool:
    """Whether FP8 matrices, or largest values, are the same to the bit."""
    pairs = zip(got, want, strict=True)
    return all(torch.equal(*(each.flatten().view(torch.uint8) for each in pair)) for pair in pairs)


def of_both_formats(x: Tensor, setting: Tiles) -> list[Any]:
    """Casts to each format, with the scale that it takes."""
    made: list[Any] = []
    for name in (FORMAT, WEIGHTS):
        scale = fp8.largest(x, FP8_MAX[name])[1]
        made += fp8_tiles.cast_both(x, scale, name, BOTH, bounded=True, tiles=setting)
    return made


def together(weights: list[Tensor], setting: Tiles) -> list[Any]:
    """Weights cast together, and their scales."""
    with mock.patch.object(choices, "CAST", setting):
        pairs: list[Any] = WeightCasts(weights).cast()
    return [each for pair in pairs for operand in pair for each in operand]


def one_by_one(weights: list[Tensor]) -> list[Any]:
    """What `together` must give."""
    made: list[Any] = []
    for weight in weights:
        _, scale, inverse = fp8.largest(weight, FP8_MAX[WEIGHTS])
        cast = fp8_tiles.cast_both(weight, scale, WEIGHTS, BOTH, bounded=True, tiles=PLAIN)
        made += [cast[0], inverse, cast[1], inverse]
    return made


def casts(shape: str, device: torch.device) -> Iterator[Case]:
    """Of matrices in memory."""
    weights = [random(*size, device) for size in ((256, 144), (48, 272))]
    for name, (height, width, count) in MATRICES[shape].items():
        x = random(height, width, device)
        scale = fp8.largest(x, FP8_MAX[FORMAT])[1]
        cast = partial(fp8_tiles.cast_both, x, scale, FORMAT, BOTH, bounded=True)
        yield Case(
            title=f"cast of {height} x {width} ({name})",
            moved=4 * x.numel(),
            count=count,
            run=lambda setting, cast=cast: cast(tiles=setting),
            results=lambda setting, x=x: of_both_formats(x, setting) + together(weights, setting),
            wanted=of_both_formats(x, PLAIN) + one_by_one(weights),
        )


def searches(shape: str, device: torch.device) -> Iterator[Case]:
    """For the largest value of a matrix, with its scale."""
    limit = FP8_MAX[FORMAT]
    for name, (height, width, count) in FOREIGN[shape].items():
        x = random(height, width, device)
        most = x.abs().max().float()
        scale = power_of_two_scale(most, limit)
        search = partial(fp8.largest, x, limit)
        yield Case(
            title=f"largest of {height} x {width} ({name})",
            moved=2 * x.numel(),
            count=count,
            run=search,
            results=lambda setting, search=search: list(search(setting)),
            wanted=[most, scale, scale.reciprocal()],
        )


def gates(shape: str, device: torch.device) -> tuple[Tensor, Tensor, str]:
    """A gradient of SwiGLU's product, SwiGLU's input, and their title."""
    rows, width = GATES[shape]
    inner = random(rows, 2 * width, device).view(rows, 2, width)
    return random(rows, width, device), inner, f"SwiGLU backward of {rows} x {width}"


def gate_casts(shape: str, device: torch.device) -> Iterator[Case]:
    """Of SwiGLU's gradient as it is computed."""
    grad, inner, title = gates(shape, device)
    written = gated_silu.backward(grad, inner).flatten(1)
    scale = fp8.largest(written, FP8_MAX[FORMAT])[1]
    cast = partial(gated_silu_fp8.cast_gradient, grad, inner, scale, FORMAT, BOTH, bounded=True)
    wanted = fp8_tiles.cast_both(written, scale, FORMAT, BOTH, bounded=True, tiles=PLAIN)
    yield Case(
        title=f"{title}, its cast",
        moved=10 * grad.numel(),
        count=1,
        run=lambda setting: cast(tiles=setting),
        results=lambda setting: list(cast(tiles=setting)),
        wanted=list(wanted),
    )


def gate_searches(shape: str, device: torch.device) -> Iterator[Case]:
    """For the largest value of SwiGLU's gradient, which is nowhere."""
    grad, inner, title = gates(shape, device)
    search = partial(gated_silu_fp8.largest_gradient, grad, inner)
    yield Case(
        title=f"{title}, its largest value",
        moved=6 * grad.numel(),
        count=1,
        run=search,
        results=lambda setting: [search(setting).max()],
        wanted=[gated_silu.backward(grad, inner).abs().max().float()],
    )


CASES: dict[str, Callable[[str, torch.device], Iterator[Case]]] = {
    "CAST": casts,
    "LARGEST": searches,
    "GATE_CAST": gate_casts,
    "GATE_LARGEST": gate_searches,
}


def compared(clock: Clock, case: Case, settings: list[Tiles | Spans]) -> dict[str, Any]:
    """Milliseconds by setting, of those whose results are right."""
    copy = clock.time_copy(case.moved)
    print(f"  {case.title}: a copy of the same bytes takes {copy:.4f} ms", flush=True)
    times: dict[str, float] = {}
    for setting in settings:
        name = name_of(setting)
        if clock.over and times:
            print(f"    {name:<24} left out")
            continue
        if not same(case.results(setting), case.wanted):
            print(f"    {name:<24} WRONG")
            continue
        times[name] = took = clock.time(partial(case.run, setting))
        print(f"    {name:<24} {took:8.4f} ms  share {copy / took:.2f}", flush=True)
    return {"copy": copy, "times": times, "count": case.count}


def rounded(value: Any) -> Any:
    """For a file."""
    if isinstance(value, dict):
        return {str(name): rounded(each) for name, each in value.items()}
    return round(value, 5) if isinstance(value, float) else value


def main() -> None:
    """A table for each shape, and what is best."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--shapes", nargs="*", default=["a", "b"], choices=["a", "b"])
    parser.add_argument("--seconds", type=float, default=55.0, help="no new setting after that")
    parser.add_argument("--repeats", type=int, default=15, help="calls of which the median counts")
    parser.add_argument("--tiny", action="store_true", help="a dry run")
    parser.add_argument("--out", type=Path, help="where to write times as JSON")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    clock = Clock(device, args.repeats, time.monotonic() + args.seconds)
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "present": {name: asdict(getattr(choices, name)) for name in SETTINGS},
        "shapes": {},
    }
    for shape in ["tiny"] if args.tiny else args.shapes:
        print(f"shape {shape}")
        found: dict[str, Any] = {
            name: {
                case.title: compared(clock, case, SETTINGS[name]) for case in cases(shape, device)
            }
            for name, cases in CASES.items()
        }
        lines = list(advice(shape, found))
        print(f"best for {shape}, as lines of choices.py:", *lines, sep="\n  ")
        result["shapes"][shape] = rounded(found) | {"advice": lines}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
