"""Which way of causal attention is fastest on this GPU, forward and backward, for the shapes of the
benchmarks?

Torch's operator (cuDNN's choice) is timed in several layouts in memory, and, where cuDNN's front
end (`pip install nvidia-cudnn-frontend`) is installed, every execution plan that its heuristics
offer, with every value of each knob of their engines. Prints TFLOP/s of the products of a causal
kernel (2 S^2 N D a sample forward, 2.5 times as many backward) and the largest relative error
against torch's operator.

    python benchmarks/attention_plans.py --out plans.json

`groups of heads` are what all-to-all context parallelism does: the heads of a rank in several
calls, on one stream or on two in turn. Times are medians of device events; the first way is timed
again at the end of each case, since clocks fall as the GPU warms up.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Way = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """Sizes of one attention."""

    name: str
    batch: int
    heads: int
    groups: int
    length: int
    size: int

    def tflops(self, milliseconds: float, backward: bool) -> float:
        """Rate of the products."""
        flops = 2 * self.batch * self.heads * self.length**2 * self.size
        return flops * (2.5 if backward else 1.0) / milliseconds / 1e9


CASES = (
    Case("(a) 32,768 tokens, half of the heads", 1, 16, 4, 32768, 64),
    Case("(a)", 4, 32, 8, 4096, 64),
    Case("(b)", 1, 32, 8, 8192, 128),
)
LAYOUTS = {"BSHD": (0, 2, 1, 3), "SBHD": (1, 2, 0, 3), "BHSD": (0, 1, 2, 3)}
"""Dims of memory, as views (batch, heads, length, size)."""


class Tensors:
    """Random tensors of a case in a layout."""

    def __init__(self, case: Case, layout: str, *, repeated: bool = False) -> None:
        self.case = case
        self.order = LAYOUTS[layout]
        groups = case.heads if repeated else case.groups
        torch.manual_seed(0)
        self.query, self.grad = self.made(case.heads), self.made(case.heads)
        self.key, self.value = self.made(groups), self.made(groups)
        self.scale = case.size**-0.5
        self.output, self.log_sum = self.forward()

    def made(self, heads: int) -> Tensor:
        """(batch, heads, length, size), stored in the layout."""
        shape = (self.case.batch, heads, self.case.length, self.case.size)
        stored = [shape[self.order.index(dim)] for dim in range(4)]
        x = torch.randn(*stored, device="cuda", dtype=torch.bfloat16)
        return x.permute(*self.order)

    def forward(self) -> tuple[Tensor, Tensor]:
        """By torch's operator."""
        return forward_of(self.query, self.key, self.value, self.scale)

    def backward(self) -> tuple[Tensor, Tensor, Tensor]:
        """By torch's operator."""
        return backward_of(
            self.grad, self.query, self.key, self.value, self.output, self.log_sum, self.scale
        )


def forward_of(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp."""
    output, log_sum, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, True, False, scale=scale
    )
    return output, log_sum


def backward_of(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, log_sum: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients."""
    unused = torch.zeros((), dtype=torch.int64, device=q.device)
    nothing: Any = None
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *(grad, q, k, v, output, log_sum, unused, unused, nothing, nothing, nothing),
        *(q.shape[2], k.shape[2], 0.0, True),
        scale=scale,
    )


def milliseconds(way: Way, repeats: int) -> float:
    """Median of one call."""
    times = []
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for call in range(repeats + 2):
        begin.record()
        way()
        end.record()
        torch.cuda.synchronize()
        if call > 1:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def error(got: Tensor, want: Tensor) -> float:
    """Of the first sample's first head and group."""
    got, want = got[0, :1].float(), want[0, :1].float()
    return float((got - want).norm() / want.norm())


def in_groups(tensors: Tensors, parts: int, streams: list[torch.cuda.Stream], back: bool) -> Way:
    """The same heads in `parts` calls, on the streams in turn."""
    split = [
        [x.chunk(parts, 1)[part].contiguous() for part in range(parts)]
        for x in (tensors.grad, tensors.query, tensors.key, tensors.value)
    ]
    split = [[_like(x, tensors.order) for x in xs] for xs in split]
    grads, queries, keys, values = split
    kept = [forward_of(queries[i], keys[i], values[i], tensors.scale) for i in range(parts)]

    def way() -> None:
        current = torch.cuda.current_stream()
        for part in range(parts):
            stream = streams[part % len(streams)]
            if stream != current and part < len(streams):
                stream.wait_stream(current)
            with torch.cuda.stream(stream):
                own = queries[part], keys[part], values[part]
                if back:
                    backward_of(grads[part], *own, *kept[part], tensors.scale)
                else:
                    forward_of(*own, tensors.scale)
        for stream in streams:
            current.wait_stream(stream)

    return way


def _like(x: Tensor, order: tuple[int, ...]) -> Tensor:
    back = [order.index(dim) for dim in range(4)]
    return x.permute(*back).contiguous().permute(*order)


class Plans:
    """cuDNN's execution plans for one direction of a case."""

    def __init__(self, tensors: Tensors, *, backward: bool) -> None:
        import cudnn  # pyright: ignore[reportMissingImports]

        self.cudnn: Any = cudnn
        self.backward = backward
        self.handle = cudnn.create_handle()
        cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream().cuda_stream)
        self.inputs = [tensors.query, tensors.key, tensors.value]
        if backward:
            self.inputs += [tensors.output, tensors.grad, tensors.log_sum]
            self.outputs = [torch.empty_like(x) for x in self.inputs[:3]]
            self.wanted = tensors.backward()
        else:
            self.outputs = [torch.empty_like(tensors.output), torch.empty_like(tensors.log_sum)]
            self.wanted = (tensors.output, tensors.log_sum)
        self.scale = tensors.scale

    def graph(self, **options: Any) -> Any:
        """The operation graph, without plans."""
        cudnn = self.cudnn
        kind, wide = cudnn.data_type.BFLOAT16, cudnn.data_type.FLOAT
        graph = cudnn.pygraph(
            handle=self.handle,
            io_data_type=kind,
            intermediate_data_type=wide,
            compute_data_type=wide,
        )
        kinds = {torch.bfloat16: kind, torch.float32: wide}
        tensors = [
            graph.tensor(
                dim=list(x.shape), stride=list(x.stride()), data_type=kinds[x.dtype], uid=i + 1
            )
            for i, x in enumerate(self.inputs)
        ]
        options |= dict(
            attn_scale=self.scale,
            diagonal_alignment=cudnn.diagonal_alignment.TOP_LEFT,
            diagonal_band_right_bound=0,
        )
        if self.backward:
            given = graph.sdpa_backward(*tensors, **options)
        else:
            given = graph.sdpa(*tensors, generate_stats=True, **options)
        for i, (tensor, x) in enumerate(zip(given, self.outputs, strict=True)):
            tensor.set_output(True).set_uid(11 + i).set_data_type(kinds[x.dtype])
            tensor.set_dim(list(x.shape)).set_stride(list(x.stride()))
        graph.validate()
        graph.build_operation_graph()
        return graph

    def ways(self) -> Iterator[tuple[str, Way | str]]:
        """Name and call of each plan, or why there is none."""
        modes = self.cudnn.heur_mode
        kinds: list[dict[str, Any]] = [{}]
        if not self.backward:
            choices = self.cudnn.attention_implementation
            kinds = [{"implementation": choices.COMPOSITE}, {"implementation": choices.UNIFIED}]
        for options in kinds:
            label = str(options.get("implementation", "")).rsplit(".", 1)[-1]
            try:
                graph = self.graph(**options)
                graph.create_execution_plans([modes.A, modes.B, modes.FALLBACK])
                graph.check_support()
            except Exception as refusal:  # noqa: BLE001
                yield f"{label} plans", str(refusal)[:120]
                continue
            count = graph.get_execution_plan_count()
            seen: set[int] = set()
            for index in range(count):
                yield self.at(graph, index, label)
                seen.add(graph.get_engine_and_knobs_at_index(index)[0])
            for engine, knobs in self.settings(graph, seen):
                try:
                    graph.create_execution_plan(engine, knobs)
                except Exception as refusal:  # noqa: BLE001
                    yield f"{label} engine {engine} {knobs}", str(refusal)[:80]
                    continue
                yield self.at(graph, graph.get_execution_plan_count() - 1, label)

    def settings(self, graph: Any, engines: set[int]) -> Iterator[tuple[int, dict[Any, int]]]:
        """Every combination of knobs, at most 16 an engine."""
        for engine in sorted(engines | set(range(min(16, graph.get_engine_count())))):
            try:
                knobs = list(graph.get_knobs_for_engine(engine))
            except Exception:  # noqa: BLE001, S112
                continue
            values = [
                range(knob.min_value, knob.max_value + 1, max(1, knob.stride)) for knob in knobs
            ]
            for chosen in itertools.islice(itertools.product(*values), 16):
                yield engine, {knob.type: v for knob, v in zip(knobs, chosen, strict=True)}

    def at(self, graph: Any, index: int, label: str) -> tuple[str, Way | str]:
        """Plan number `index`, built."""
        name = f"{label} #{index}"
        try:
            name += " " + str(graph.get_plan_name_at_index(index))
            graph.build_plan_at_index(index)
            room = graph.get_workspace_size_plan_at_index(index)
            workspace = torch.empty(max(1, room), dtype=torch.uint8, device="cuda")
        except Exception as refusal:  # noqa: BLE001
            return name, str(refusal)[:80]
        tensors = {i + 1: x for i, x in enumerate(self.inputs)}
        tensors |= {i + 11: x for i, x in enumerate(self.outputs)}

        def way() -> None:
            graph.execute_plan_at_index(tensors, workspace, index, handle=self.handle)

        return f"{name} ({room / 2**20:.0f} MiB)", way

    def error(self) -> float:
        """Largest of the outputs of the last call."""
        return max(error(x, y) for x, y in zip(self.outputs, self.wanted, strict=True))


def measure(case: Case, args: argparse.Namespace, until: float) -> list[dict[str, Any]]:
    """All ways of a case."""
    rows: list[dict[str, Any]] = []

    def add(name: str, way: Way | str, backward: bool, check: Callable[[], float] | None) -> None:
        row: dict[str, Any] = {"case": case.name, "way": name, "backward": backward}
        if isinstance(way, str):
            row["refused"] = way
        else:
            try:
                row["ms"] = round(milliseconds(way, args.repeats), 3)
                row["tflops"] = round(case.tflops(row["ms"], backward), 1)
                row["error"] = None if check is None else round(check(), 5)
            except Exception as refusal:  # noqa: BLE001
                row["refused"] = str(refusal)[:120]
        rows.append(row)
        said = row.get("refused") or f"{row['tflops']:6.1f} TFLOP/s  error {row['error']}"
        print(f"{case.name} {'backward' if backward else 'forward '} {name}: {said}", flush=True)

    base = Tensors(case, "BSHD")
    main = [torch.cuda.current_stream()]
    pair = [torch.cuda.Stream(), torch.cuda.Stream()]
    for back in (False, True):
        first = base.backward if back else base.forward
        add("torch BSHD", first, back, None)
        for layout, repeated in (("SBHD", False), ("BHSD", False), ("BSHD", True)):
            other = Tensors(case, layout, repeated=repeated)
            way = other.backward if back else other.forward
            add(f"torch {layout}{', keys repeated' * repeated}", way, back, None)
        if case is CASES[0]:
            for parts, streams in itertools.product((2, 4), (main, pair)):
                name = f"{parts} groups of heads on {len(streams)} streams"
                add(name, in_groups(base, parts, streams, back), back, None)
        if not args.torch_only and time.monotonic() < until:
            plans = Plans(base, backward=back)
            for name, way in plans.ways():
                add(name, way, back, plans.error)
                if time.monotonic() > until:
                    print("out of time", flush=True)
                    break
        add("torch BSHD again", first, back, None)
    return rows


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="Ways of causal attention")
    parser.add_argument("--out", default="", help="JSON file of all rows")
    parser.add_argument("--repeats", type=int, default=8, help="calls of each way")
    parser.add_argument("--seconds", type=float, default=50, help="no further plan after so many")
    parser.add_argument("--torch-only", action="store_true", help="without cuDNN's front end")
    args = parser.parse_args()
    begin = time.monotonic()
    rows: list[dict[str, Any]] = []
    for number, case in enumerate(CASES):
        until = begin + args.seconds * (number + 1) / len(CASES)
        rows += measure(case, args, until)
        if args.out:
            with open(args.out, "w", encoding="utf-8") as file:
                json.dump(
                    {
                        "gpu": torch.cuda.get_device_name(),
                        "torch": torch.__version__,
                        "cuda": torch.version.cuda,
                        "cudnn": torch.backends.cudnn.version(),
                        "rows": rows,
                    },
                    file,
                    indent=1,
                )


if __name__ == "__main__":
    main()
