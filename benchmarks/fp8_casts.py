"""Which casts to FP8, and which searches for largest values, are fastest on this GPU?

    python benchmarks/fp8_casts.py --out results.json

The matrices are those of shapes (a) and (b) of `shapes.py`: inputs and gradients of all linear
layers. Each kernel is timed alone, with nothing of its matrix in the cache, as the median of some
calls; `share` is the time of a copy of the same bytes in this process over its own. Results of
every setting must be, bit for bit, those of one with nothing clever, in both formats; else it is
told as WRONG, and left out. So must weights that are cast together with the setting that is best.
What is best over a step is printed as the lines of
`megatron_lightning/precision/kernels/choices.py`.

`--write a` puts those of shape (a) into that file. `--seconds` ends it early; settings left out are
told. `--tiny` is a dry run, on a CPU too with `TRITON_INTERPRET=1`, whose times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from fp8_cast_settings import (
    CASTS,
    COMPILED,
    FOREIGN,
    GATE_CASTS,
    GATE_SPANS,
    GATES,
    MATRICES,
    PLAIN,
    SPANS,
    TINY,
    advice,
    best_over,
    name_of,
    write,
)
from torch import Tensor

from megatron_lightning.layers.kernels import gated_silu_fp8, gated_silu_largest
from megatron_lightning.precision.formats import FP8_DTYPES, FP8_MAX
from megatron_lightning.precision.kernels import choices, fp8, fp8_tiles
from megatron_lightning.precision.kernels.choices import Spans, Tiles
from megatron_lightning.precision.weight_casts import WeightCasts

FORMAT = "e5m2"
"""Of gradients: casts to it are timed, those to WEIGHTS only compared."""
WEIGHTS = "e4m3"
"""Of inputs and weights."""


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


def random(rows: int, columns: int, device: torch.device) -> Tensor:
    """Numbers of some magnitudes."""
    x = torch.randn(rows, columns, device=device)
    return (x * torch.randn(rows, 1, device=device).exp2_()).bfloat16()


def same(got: Any, want: Any) -> bool:
    """Whether FP8 matrices, or largest values, are the same to the bit."""
    pairs = zip(got, want, strict=True)
    return all(torch.equal(*(each.flatten().view(torch.uint8) for each in pair)) for pair in pairs)


def compared(
    clock: Clock,
    title: str,
    settings: list[Any],
    call_of: Callable[[Any], Callable[[], Any]],
    copy: float,
    result_of: Callable[[Any], Any],
    reference: Any,
) -> dict[str, float]:
    """Milliseconds by setting, of those with the results of a `reference`."""
    print(f"  {title}: a copy of the same bytes takes {copy:.4f} ms", flush=True)
    times: dict[str, float] = {}
    want = result_of(reference)
    for setting in settings:
        name = name_of(setting)
        if clock.over and times:
            print(f"    {name:<36} left out")
            continue
        if not same(result_of(setting), want):
            print(f"    {name:<36} WRONG")
            continue
        times[name] = took = clock.time(call_of(setting))
        print(f"    {name:<36} {took:8.4f} ms  share {copy / took:.2f}", flush=True)
    return times


def copy_of(clock: Clock, count: float) -> float:
    """Milliseconds of a copy that moves as many bytes, reads and writes together."""
    source = torch.empty(max(1, int(count / 2)), dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    return clock.time(partial(target.copy_, source))


def cast_of(x: Tensor, scale: Tensor, tiles: Tiles, name: str = FORMAT) -> Callable[[], Any]:
    """A cast of a matrix and its transpose."""
    return partial(
        fp8_tiles.cast_both,
        x,
        scale,
        FP8_DTYPES[name],
        FP8_MAX[name],
        itself=True,
        transposed=True,
        padded_rows=len(x),
        bounded=True,
        tiles=tiles,
    )


def of_both_formats(x: Tensor, tiles: Tiles) -> list[Tensor]:
    """Casts to each format, with the scale that it takes."""
    made: list[Tensor] = []
    for name in (FORMAT, WEIGHTS):
        made += cast_of(x, fp8.largest(x, FP8_MAX[name])[1], tiles, name)()
    return made


def weights_are_right(tiles: Tiles, device: torch.device) -> bool:
    """Whether weights cast together with `tiles` are what each is alone."""
    weights = [random(*shape, device) for shape in ((256, 144), (48, 272))]
    with mock.patch.object(choices, "CAST", tiles):
        pairs: list[Any] = WeightCasts(weights).cast()
    for weight, pair in zip(weights, pairs, strict=True):
        _, scale, inverse = fp8.largest(weight, FP8_MAX[WEIGHTS])
        want = (*cast_of(weight, scale, PLAIN, WEIGHTS)(), inverse, inverse)
        if not same([each.values for each in pair] + [each.scale for each in pair], want):
            print(f"  weights cast together with {name_of(tiles)} are WRONG")
            return False
    return True


def casts(clock: Clock, matrices: Mapping[str, tuple[int, int, int]]) -> dict[str, Any]:
    """Times by matrix and setting."""
    rows: dict[str, Any] = {}
    for name, (height, width, count) in matrices.items():
        x = random(height, width, clock.device)
        _, scale, _ = fp8.largest(x, FP8_MAX[FORMAT])
        copy = copy_of(clock, 4 * x.numel())
        title = f"cast of {height} x {width} ({name})"
        results = partial(of_both_formats, x)
        times = compared(clock, title, CASTS, partial(cast_of, x, scale), copy, results, PLAIN)
        rows[f"{height} x {width}"] = {"copy": copy, "times": times, "count": count}
    return rows


def made_by(call_of: Callable[[Any], Callable[[], Any]], setting: Any) -> Any:
    """What a call with a setting gives."""
    return call_of(setting)()


def searches(clock: Clock, matrices: Mapping[tuple[int, int], int]) -> dict[str, Any]:
    """The search for a largest value, and what compiled code does in its place."""
    from megatron_lightning.parallel.quantized.region import largest_of_rows

    compiled: Any = torch.compile(largest_of_rows, dynamic=False)
    limit, rows = FP8_MAX[FORMAT], {}
    for (height, width), count in matrices.items():
        x = random(height, width, clock.device)

        def call_of(setting: Any, x: Tensor = x) -> Callable[[], Any]:
            if isinstance(setting, Spans):
                return lambda: fp8.largest(x, limit, setting)
            return lambda: fp8.join(compiled(x), limit)

        settings: list[Any] = list(SPANS)
        if clock.device.type == "cuda":
            settings.insert(1, COMPILED)
        title = f"largest of {height} x {width}, its scale"
        copy = copy_of(clock, 2 * x.numel())
        results = partial(made_by, call_of)
        times = compared(clock, title, settings, call_of, copy, results, SPANS[0])
        rows[f"{height} x {width}"] = {"copy": copy, "times": times, "count": count}
    return rows


def gates(clock: Clock, rows: int, width: int, of_written: Tiles) -> dict[str, Any]:
    """The gradient of SwiGLU's input: written and cast, or cast as it is computed."""
    grad = random(rows, width, clock.device)
    inner = random(rows, 2 * width, clock.device).view(rows, 2, width)
    limit, places = FP8_MAX[FORMAT], 1024
    count = grad.numel()

    def written() -> Any:
        made, parts = gated_silu_largest.backward(grad, inner, places)
        _, scale, _ = fp8.join(parts, limit)
        return cast_of(made.view(rows, -1), scale, of_written)()

    def largest_of(spans: Spans) -> Callable[[], Tensor]:
        return partial(gated_silu_fp8.largest_gradient, grad, inner, spans)

    def cast_of_gate(scale: Tensor, tiles: Tiles) -> Callable[[], Any]:
        return partial(
            gated_silu_fp8.cast_gradient,
            grad,
            inner,
            scale,
            FP8_DTYPES[FORMAT],
            limit,
            itself=True,
            transposed=True,
            padded_rows=rows,
            bounded=True,
            tiles=tiles,
        )

    title = f"SwiGLU backward of {rows} x {width}"
    parts = compared(
        clock,
        f"{title}, its largest value",
        GATE_SPANS,
        largest_of,
        copy_of(clock, 6 * count),
        lambda spans: (largest_of(spans)().max().view(1),),
        GATE_SPANS[0],
    )
    _, scale, _ = fp8.join(gated_silu_largest.backward(grad, inner, places)[1], limit)
    want, copy = written(), copy_of(clock, 10 * count)
    if not same(cast_of_gate(scale, choices.GATE_CAST)(), want):
        print("    WRONG: casts of what is computed are not those of what was written")
        return {"wrong": True}
    call_of = partial(cast_of_gate, scale)
    results = partial(made_by, call_of)
    cast = compared(
        clock, f"{title}, its cast", GATE_CASTS, call_of, copy, results, choices.GATE_CAST
    )
    best = {
        "spans": next(
            each for each in GATE_SPANS if name_of(each) == min(parts, key=parts.__getitem__)
        ),
        "tiles": next(
            each for each in GATE_CASTS if name_of(each) == min(cast, key=cast.__getitem__)
        ),
    }

    def computed_twice() -> Any:
        _, scale, _ = fp8.join(largest_of(best["spans"])(), limit)
        return cast_of_gate(scale, best["tiles"])()

    whole = {"written": clock.time(written), "cast as it is computed": clock.time(computed_twice)}
    for name, took in whole.items():
        print(f"  {title}, {name}: {took:.4f} ms", flush=True)
    return {"largest": parts, "cast": cast, "whole": whole, "copy": copy}


def plain(value: Any) -> Any:
    """Rounded for a file."""
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    return round(value, 5) if isinstance(value, float) else value


def main() -> None:
    """A table for each shape, and what is best."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--shapes", nargs="*", default=["a", "b"], choices=["a", "b"])
    parser.add_argument("--seconds", type=float, default=55.0, help="no new setting after that")
    parser.add_argument("--repeats", type=int, default=15, help="calls of which the median counts")
    parser.add_argument("--write", choices=["a", "b"], help="put what is best into place")
    parser.add_argument("--tiny", action="store_true", help="a dry run")
    parser.add_argument("--out", type=Path, help="where to write times as JSON")
    args = parser.parse_args()
    if args.write and (args.tiny or args.write not in args.shapes):
        parser.error(f"--write {args.write} needs that shape to be timed")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    clock = Clock(device, args.repeats, time.monotonic() + args.seconds)
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "present": {
            name: asdict(getattr(choices, name))
            for name in ("CAST", "LARGEST", "GATE_CAST", "GATE_LARGEST")
        },
        "shapes": {},
    }
    for shape in ["tiny"] if args.tiny else args.shapes:
        print(f"shape {shape}")
        tiny = shape == "tiny"
        found: dict[str, Any] = {"casts": casts(clock, (TINY if tiny else MATRICES)[shape])}
        best, _ = best_over(found["casts"], CASTS, 1)
        found["weights"] = weights_are_right(best, device)
        found["gates"] = gates(clock, *((48, 128) if tiny else GATES[shape]), best)
        found["searches"] = searches(clock, {(64, 128): 1} if tiny else FOREIGN[shape])
        found["advice"] = list(advice(shape, found))
        print(f"best for {shape}, as lines of choices.py:")
        for line in found["advice"]:
            print(f"  {line}")
        if args.write == shape:
            write(found["advice"], Path(choices.__file__))
        result["shapes"][shape] = plain(found)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
