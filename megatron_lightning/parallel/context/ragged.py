"""cuDNN's fused attention for packed sequences of any lengths, through its own Python front end.

The front end (`nvidia-cudnn-frontend`, an optional package) builds a plan for a graph of static
shapes. Lengths and offsets of the sequences are tensors on the device, so one plan serves every
micro-batch of its size: the number of sequences and the longest of them are rounded up, and the
sequences that are too many are empty.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import threading
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.parallel.context.plan import Band, Span, to_device

Gradients = tuple[Tensor, Tensor, Tensor]

_PLANS = 256
_INDICES = 64
_SMALLEST = 128


@dataclass(frozen=True, kw_only=True)
class PlanKey:
    """What a plan is built for."""

    backward: bool
    device: int
    dtype: torch.dtype
    sequences: int
    """Number of sequences, rounded up."""
    queries: int
    """Longest sequence of queries, rounded up."""
    keys: int
    """Longest sequence of keys, rounded up."""
    query_rows: int
    """All queries together."""
    key_rows: int
    """All keys together."""
    heads: int
    groups: int
    head_dim: int
    scale: float
    causal: bool
    """Whether a query sees no later keys."""
    square: bool
    """Whether each sequence has as many queries as keys; else the last ones are aligned."""
    window: int
    """Keys that a query sees, itself among them; 0: no limit."""


@functools.lru_cache(maxsize=1)
def front_end_installed() -> bool:
    """Whether the front end is there; each call of attention asks."""
    return importlib.util.find_spec("cudnn") is not None


def rounded_up(count: int, smallest: int = 1) -> int:
    """The next 2^k or 3 * 2^(k-1) that is no less, at least `smallest`."""
    power = 1 << max(0, count - 1).bit_length()
    return max(smallest, count and (3 * power // 4 if count <= 3 * power // 4 else power))


def knows(band: Band) -> bool:
    """Whether cuDNN has this band: everything, causal, or causal in a window."""
    return band.is_full or (band.right == 0 and (band.left is None or band.left >= 1))


def plan_key(
    query: Tensor,
    key: Tensor,
    queries: tuple[Span, ...],
    keys: tuple[Span, ...],
    *,
    scale: float,
    band: Band,
    backward: bool,
) -> PlanKey:
    """The plan that a call needs."""
    count, longest, longest_key, square = _sizes(queries, keys)
    return PlanKey(
        backward=backward,
        device=query.device.index or 0,
        dtype=query.dtype,
        sequences=count,
        queries=longest,
        keys=longest_key,
        query_rows=query.shape[0],
        key_rows=key.shape[0],
        heads=query.shape[1],
        groups=key.shape[1],
        head_dim=query.shape[2],
        scale=scale,
        causal=band.right == 0,
        square=square,
        window=0 if band.left is None else band.left + 1,
    )


@functools.lru_cache(256)
def _sizes(queries: tuple[Span, ...], keys: tuple[Span, ...]) -> tuple[int, int, int, bool]:
    lengths = [stop - start for start, stop in queries]
    others = [stop - start for start, stop in keys]
    return (
        rounded_up(len(lengths), 8),
        rounded_up(max(lengths), _SMALLEST),
        rounded_up(max(others), _SMALLEST),
        lengths == others,
    )


@dataclass(frozen=True)
class Indices:
    """Lengths (int32) and offsets (int64, in elements) of the sequences of one call."""

    query_lengths: Tensor
    key_lengths: Tensor
    query_offsets: Tensor
    key_offsets: Tensor
    log_sum_offsets: Tensor


@functools.lru_cache(_INDICES)
def indices(
    queries: tuple[Span, ...],
    keys: tuple[Span, ...],
    sequences: int,
    query_row: int,
    key_row: int,
    heads: int,
    device: torch.device,
) -> Indices:
    """For `sequences` sequences, the last ones empty; rows of `query_row` and `key_row` elements
    in the tensors, and of `heads` in the log-sum-exp.
    """
    tables = []
    for spans in (queries, keys):
        lengths = [stop - start for start, stop in spans]
        lengths += [0] * (sequences - len(lengths))
        tables.append((lengths, list(itertools.accumulate(lengths, initial=0))))
    (query_lengths, query_rows), (key_lengths, key_rows) = tables
    lengths = to_device([query_lengths, key_lengths], torch.int32, device)
    # One entry more than there are, so that each row begins at a multiple of 16 bytes.
    offsets = to_device(
        [
            [row * size for row in rows] + [0]
            for rows, size in ((query_rows, query_row), (key_rows, key_row), (query_rows, heads))
        ],
        torch.int64,
        device,
    )
    return Indices(*lengths.unbind(), *(row[:-1] for row in offsets.unbind()))


# What a graph reads and writes, by the numbers that the front end is given for them.
_QUERY, _KEY, _VALUE, _OUTPUT, _LOG_SUM, _GRAD, _D_QUERY, _D_KEY, _D_VALUE = range(1, 10)
_QUERY_LENGTHS, _KEY_LENGTHS, _QUERY_OFFSETS, _KEY_OFFSETS, _LOG_SUM_OFFSETS = range(10, 15)


class Plan:
    """A built graph."""

    def __init__(self, key: PlanKey) -> None:
        import cudnn  # pyright: ignore[reportMissingImports]

        self._cudnn: Any = cudnn
        self.key = key
        self.graph = self._described()
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        self.graph.check_support()
        self.graph.build_plans()
        self.workspace = self.graph.get_workspace_size()

    def __call__(self, tensors: dict[int, Tensor]) -> None:
        """Run on the current stream."""
        device = tensors[_QUERY].device
        handle = _handle(self.key.device, threading.get_ident())
        stream = torch.cuda.current_stream(device).cuda_stream
        self._cudnn.set_stream(handle=handle, stream=stream)
        workspace = torch.empty(max(1, self.workspace), dtype=torch.uint8, device=device)
        self.graph.execute(tensors, workspace, handle=handle)

    def _described(self) -> Any:
        cudnn, key = self._cudnn, self.key
        kind = cudnn.data_type.HALF if key.dtype == torch.float16 else cudnn.data_type.BFLOAT16
        graph = cudnn.pygraph(
            handle=_handle(key.device, threading.get_ident()),
            io_data_type=kind,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
        )

        def index(uid: int, size: int, kind: Any) -> Any:
            return graph.tensor(
                dim=[size, 1, 1, 1], stride=[1, 1, 1, 1], data_type=kind, uid=uid, name=f"i{uid}"
            )

        lengths = [
            index(uid, key.sequences, cudnn.data_type.INT32)
            for uid in (_QUERY_LENGTHS, _KEY_LENGTHS)
        ]
        of_query, of_key, of_log_sum = (
            index(uid, key.sequences + 1, cudnn.data_type.INT64)
            for uid in (_QUERY_OFFSETS, _KEY_OFFSETS, _LOG_SUM_OFFSETS)
        )
        queries = _Rows(key.sequences, key.heads, key.queries, key.head_dim, of_query)
        keys = _Rows(key.sequences, key.groups, key.keys, key.head_dim, of_key)
        sums = _Rows(key.sequences, key.heads, key.queries, 1, of_log_sum)
        options = dict(
            attn_scale=key.scale,
            use_padding_mask=True,
            seq_len_q=lengths[0],
            seq_len_kv=lengths[1],
            **self._mask(),
        )
        query, key_, value = (
            rows.tensor(graph, uid, kind)
            for rows, uid in ((queries, _QUERY), (keys, _KEY), (keys, _VALUE))
        )
        if not key.backward:
            output, log_sum = graph.sdpa(query, key_, value, generate_stats=True, **options)
            queries.give(output, _OUTPUT, kind)
            sums.give(log_sum, _LOG_SUM, cudnn.data_type.FLOAT)
            return graph
        gradients = graph.sdpa_backward(
            query,
            key_,
            value,
            queries.tensor(graph, _OUTPUT, kind),
            queries.tensor(graph, _GRAD, kind),
            sums.tensor(graph, _LOG_SUM, cudnn.data_type.FLOAT),
            max_total_seq_len_q=key.query_rows,
            max_total_seq_len_kv=key.key_rows,
            **options,
        )
        for gradient, uid, rows in zip(
            gradients, (_D_QUERY, _D_KEY, _D_VALUE), (queries, keys, keys), strict=True
        ):
            rows.give(gradient, uid, kind)
        return graph

    def _mask(self) -> dict[str, Any]:
        if not self.key.causal:
            return {}
        align = self._cudnn.diagonal_alignment
        mask = {
            "diagonal_alignment": align.TOP_LEFT if self.key.square else align.BOTTOM_RIGHT,
            "diagonal_band_right_bound": 0,
        }
        if self.key.window:
            mask["diagonal_band_left_bound"] = self.key.window
        return mask


@dataclass(frozen=True)
class _Rows:
    """A packed tensor as the front end sees it: (sequences, heads, longest, size)."""

    sequences: int
    heads: int
    longest: int
    size: int
    offsets: Any

    @property
    def dim(self) -> list[int]:
        return [self.sequences, self.heads, self.longest, self.size]

    @property
    def stride(self) -> list[int]:
        row = self.heads * self.size
        return [self.longest * row, self.size, row, 1]

    def tensor(self, graph: Any, uid: int, kind: Any) -> Any:
        return graph.tensor(
            dim=self.dim,
            stride=self.stride,
            data_type=kind,
            ragged_offset=self.offsets,
            uid=uid,
            name=f"t{uid}",
        )

    def give(self, tensor: Any, uid: int, kind: Any) -> None:
        tensor.set_output(True).set_uid(uid).set_data_type(kind)
        tensor.set_dim(self.dim).set_stride(self.stride).set_ragged_offset(self.offsets)


@functools.lru_cache
def _handle(device: int, thread: int) -> Any:
    """The handle of a device, one a thread: autograd has threads of its own."""
    import cudnn  # pyright: ignore[reportMissingImports]

    with torch.cuda.device(device):
        return cudnn.create_handle()


@functools.lru_cache(_PLANS)
def find_plan(key: PlanKey) -> Plan | None:
    """A plan for `key`; None where cuDNN has none."""
    try:
        import cudnn  # pyright: ignore[reportMissingImports]

        refusals: tuple[type[Exception], ...] = (cudnn.cudnnGraphNotSupportedError,)
    except (ImportError, AttributeError, OSError) as broken:
        warnings.warn(
            "the installed package `cudnn` is no usable front end of cuDNN"
            f" (nvidia-cudnn-frontend>=1.18 is): {broken}; the flash kernel is used",
            stacklevel=2,
        )
        return None
    try:
        with torch.cuda.device(key.device):
            return Plan(key)
    except refusals as refusal:
        warnings.warn(
            f"cuDNN has no kernel for packed attention of {key}, so the flash kernel is used:"
            f" {refusal}",
            stacklevel=2,
        )
        return None


class RaggedKernel:
    """cuDNN for packed sequences, as a `BlockKernel` where `plans` finds one."""

    def plans(
        self,
        query: Tensor,
        key: Tensor,
        queries: tuple[Span, ...],
        keys: tuple[Span, ...],
        scale: float,
        band: Band,
    ) -> tuple[Plan, Plan] | None:
        """Plans of the forward and backward pass; None where cuDNN lacks either."""
        if not knows(band):
            return None
        wanted = plan_key(query, key, queries, keys, scale=scale, band=band, backward=False)
        forward, backward = find_plan(wanted), find_plan(replace(wanted, backward=True))
        return None if forward is None or backward is None else (forward, backward)

    def forward(
        self,
        plan: Plan,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        queries: tuple[Span, ...],
        keys: tuple[Span, ...],
    ) -> tuple[Tensor, Tensor]:
        """See `BlockKernel.forward`."""
        query, key, value = (x.contiguous() for x in (query, key, value))
        output = torch.empty_like(query)
        log_sum = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        plan(
            {
                _QUERY: query,
                _KEY: key,
                _VALUE: value,
                _OUTPUT: output,
                _LOG_SUM: log_sum,
                **_placed(plan.key, queries, keys, query.device),
            }
        )
        return output, log_sum.t()

    def backward(
        self,
        plan: Plan,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        log_sum: Tensor,
        queries: tuple[Span, ...],
        keys: tuple[Span, ...],
    ) -> Gradients:
        """See `BlockKernel.backward`."""
        grad, query, key, value, output = (
            x.contiguous() for x in (grad, query, key, value, output)
        )
        gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        plan(
            {
                _GRAD: grad,
                _QUERY: query,
                _KEY: key,
                _VALUE: value,
                _OUTPUT: output,
                _LOG_SUM: log_sum.t().contiguous(),
                **dict(zip((_D_QUERY, _D_KEY, _D_VALUE), gradients, strict=True)),
                **_placed(plan.key, queries, keys, query.device),
            }
        )
        return gradients


def _placed(
    key: PlanKey, queries: tuple[Span, ...], keys: tuple[Span, ...], device: torch.device
) -> dict[int, Tensor]:
    rows = key.heads * key.head_dim, key.groups * key.head_dim
    found = indices(queries, keys, key.sequences, *rows, key.heads, device)
    return {
        _QUERY_LENGTHS: found.query_lengths,
        _KEY_LENGTHS: found.key_lengths,
        _QUERY_OFFSETS: found.query_offsets,
        _KEY_OFFSETS: found.key_offsets,
        _LOG_SUM_OFFSETS: found.log_sum_offsets,
    }
