"""Plans of cuDNN's front end for packed sequences: what they are built for, how often, what they
are given; with a stand-in for the front end that records the graphs.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lightning.parallel.context import ragged_plans
from megatron_lightning.parallel.context.cudnn_attention import CudnnKernel
from megatron_lightning.parallel.context.plan import CAUSAL, FULL, Band, Span
from megatron_lightning.parallel.context.ragged import RaggedKernel, knows
from megatron_lightning.parallel.context.ragged_plans import Plan
from megatron_lightning.parallel.context.ragged_shapes import indices, plan_key, rounded_up


def spans(*lengths: int) -> tuple[Span, ...]:
    ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return tuple(zip(ends[:-1], ends[1:], strict=True))


class Described:
    """A tensor of the stand-in."""

    def __init__(self, **given: Any) -> None:
        self.__dict__.update(given)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("set_"):
            raise AttributeError(name)

        def put(value: Any) -> "Described":
            setattr(self, name.removeprefix("set_"), value)
            return self

        return put


class Refusal(Exception):
    """What the front end raises for a graph that no kernel runs."""


class Graph:
    """Records what it is made of and what it is run with."""

    def __init__(self, made: list["Graph"], refused: bool) -> None:
        self.tensors: dict[int, Described] = {}
        self.refused = refused
        self.runs: list[dict[int, torch.Tensor]] = []
        made.append(self)

    def tensor(self, *, uid: int, **given: Any) -> Described:
        self.tensors[uid] = Described(uid=uid, **given)
        return self.tensors[uid]

    def sdpa(self, *_: Any, **options: Any) -> list[Described]:
        self.options = options
        self.outputs = [Described(), Described()]
        return self.outputs

    def sdpa_backward(self, *_: Any, **options: Any) -> list[Described]:
        self.options = options
        self.outputs = [Described(), Described(), Described()]
        return self.outputs

    def check_support(self) -> None:
        if self.refused:
            raise Refusal("no engine")

    def validate(self, *_: Any) -> None: ...

    build_operation_graph = create_execution_plans = build_plans = validate

    def get_workspace_size(self) -> int:
        return 16


@pytest.fixture
def front_end(monkeypatch: pytest.MonkeyPatch) -> Any:
    made: list[Graph] = []
    module: Any = ModuleType("cudnn")
    module.made, module.refused, module.cudnnGraphNotSupportedError = made, False, Refusal
    module.data_type = SimpleNamespace(HALF="h", BFLOAT16="b", FLOAT="f", INT32="i", INT64="l")
    module.heur_mode = SimpleNamespace(A="a", FALLBACK="b")
    module.diagonal_alignment = SimpleNamespace(TOP_LEFT="top", BOTTOM_RIGHT="bottom")
    module.pygraph = lambda **_: Graph(made, module.refused)
    module.create_handle = lambda: None
    monkeypatch.setitem(sys.modules, "cudnn", module)
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.inference_mode(False))

    def run(plan: Plan, tensors: dict[int, torch.Tensor]) -> None:
        plan.graph.runs.append(tensors)

    monkeypatch.setattr(Plan, "__call__", run)
    for cached in (ragged_plans.find_plan, ragged_plans._handle):
        cached.cache_clear()
    yield module
    for cached in (ragged_plans.find_plan, ragged_plans._handle):
        cached.cache_clear()


def key_of(n: tuple[Span, ...], m: tuple[Span, ...], band: Band = CAUSAL) -> Any:
    query, key = torch.empty(n[-1][1], 4, 64), torch.empty(m[-1][1], 2, 64)
    return plan_key(query, key, n, m, scale=0.5, band=band, backward=False)


def test_rounding_up() -> None:
    assert [rounded_up(n) for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 17)] == [
        1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 16, 24,
    ]  # fmt: skip
    assert rounded_up(3, 8) == 8
    for count in range(1, 3000):
        assert count <= rounded_up(count) <= max(2, 1.5 * count)


def test_one_key_for_many_lengths() -> None:
    keys = [
        key_of(spans(*lengths), spans(*lengths))
        for lengths in [(700, 300, 24), (1000, 24), (512, 511, 1), (800, 10, 10, 200, 4)]
    ]
    assert [key.queries for key in keys] == [768, 1024, 512, 1024]
    assert len({(k.query_rows, k.sequences, k.square, k.causal) for k in keys}) == 1
    assert len(set(keys)) == 3
    assert key_of(spans(700, 324), spans(700, 324)) == key_of(spans(600, 424), spans(600, 424))
    assert key_of(spans(700, 324), spans(700, 324)) != key_of(spans(200, 824), spans(200, 824))


def test_bands() -> None:
    assert all(knows(band) for band in (FULL, CAUSAL, Band(1, 0), Band(100, 0)))
    assert not any(knows(band) for band in (Band(0, 0), Band(3, None), Band(None, 4), Band(3, 4)))


def test_too_many_sequences_are_empty() -> None:
    found = indices(spans(5, 1, 7), spans(6, 1, 7), 8, 256, 128, 4, torch.device("cpu"))
    assert found.query_lengths.tolist() == [5, 1, 7, 0, 0, 0, 0, 0]
    assert found.key_lengths.tolist() == [6, 1, 7, 0, 0, 0, 0, 0]
    assert found.query_offsets.tolist() == [256 * n for n in (0, 5, 6, 13, 13, 13, 13, 13, 13)]
    assert found.key_offsets.tolist() == [128 * n for n in (0, 6, 7, 14, 14, 14, 14, 14, 14)]
    assert found.log_sum_offsets.tolist() == [4 * n for n in (0, 5, 6, 13, 13, 13, 13, 13, 13)]
    assert found.query_lengths.dtype == torch.int32
    assert found.query_offsets.dtype == torch.int64
    start = found.query_offsets.data_ptr()
    assert (found.key_offsets.data_ptr() - start) % 16 == 0
    assert (found.key_lengths.data_ptr() - found.query_lengths.data_ptr()) % 16 == 0


def call(kernel: CudnnKernel, n: tuple[Span, ...], m: tuple[Span, ...], band: Band) -> None:
    query, key = torch.zeros(n[-1][1], 4, 64), torch.zeros(m[-1][1], 2, 64)
    places: Any = dict(queries=n, keys=m, scale=0.5, band=band)
    output, log_sum = kernel.forward(query, key, key.clone(), **places)
    assert output.shape == query.shape
    assert log_sum.shape == query.shape[1::-1]
    gradients = kernel.backward(query, query, key, key, output, log_sum, **places)
    assert [g.shape for g in gradients] == [query.shape, key.shape, key.shape]


def test_plans_are_kept(front_end: Any) -> None:
    for lengths in [(700, 324), (600, 400, 24), (760, 200, 60, 4)]:
        call(CudnnKernel(ragged=True), spans(*lengths), spans(*lengths), CAUSAL)
    assert [len(graph.runs) for graph in front_end.made] == [3, 3]  # forward, backward
    forward, backward = front_end.made
    assert forward.options["diagonal_alignment"] == "top"
    assert forward.options["diagonal_band_right_bound"] == 0
    assert backward.options["max_total_seq_len_q"] == 1024
    # (sequences, heads, longest, size) over rows of all heads.
    assert forward.tensors[1].dim == [8, 4, 768, 64]
    assert forward.tensors[1].stride == [768 * 256, 64, 256, 1]
    assert forward.outputs[1].stride == [768 * 4, 1, 4, 1]
    run = forward.runs[-1]
    assert run[10].tolist() == [760, 200, 60, 4, 0, 0, 0, 0]
    assert set(run) == set(forward.tensors) | {4, 5}
    assert set(backward.runs[0]) == set(backward.tensors) | {7, 8, 9}


def test_masks(front_end: Any) -> None:
    call(CudnnKernel(ragged=True), spans(5, 9), spans(10, 9), CAUSAL)
    assert front_end.made[0].options["diagonal_alignment"] == "bottom"
    call(CudnnKernel(ragged=True), spans(5, 9), spans(5, 9), Band(3, 0))
    assert front_end.made[2].options["diagonal_band_left_bound"] == 4  # itself and three before
    call(CudnnKernel(ragged=True), spans(5, 9), spans(10, 9), FULL)
    assert not {"diagonal_alignment", "diagonal_band_right_bound"} & set(front_end.made[4].options)


def test_what_has_no_kernel_is_asked_for_once(front_end: Any) -> None:
    front_end.refused = True
    kernel = RaggedKernel()
    query, key = torch.zeros(14, 4, 64), torch.zeros(14, 2, 64)
    with pytest.warns(UserWarning, match="flash kernel is used: no engine"):
        assert kernel.plans(query, key, spans(5, 9), spans(5, 9), 0.5, CAUSAL) is None
    made = len(front_end.made)
    assert kernel.plans(query, key, spans(4, 10), spans(4, 10), 0.5, CAUSAL) is None
    assert len(front_end.made) == made
    assert kernel.plans(query, key, spans(5, 9), spans(5, 9), 0.5, Band(3, None)) is None
