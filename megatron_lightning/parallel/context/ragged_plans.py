"""Plans of cuDNN's own Python front end for attention over packed sequences.

The front end (`nvidia-cudnn-frontend`, an optional package) builds a plan for a graph of static
shapes (`ragged_shapes.py`). Lengths and offsets of the sequences are tensors on the device, so one
plan serves every micro-batch of its size.
"""

from __future__ import annotations

import functools
import importlib.util
import threading
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.parallel.context.ragged_shapes import Indices, PlanKey

Gradients = tuple[Tensor, Tensor, Tensor]

_PLANS = 256

# What a graph reads and writes, by the numbers that the front end is given for them.
_QUERY, _KEY, _VALUE, _OUTPUT, _LOG_SUM, _GRAD, _D_QUERY, _D_KEY, _D_VALUE = range(1, 10)
_QUERY_LENGTHS, _KEY_LENGTHS, _QUERY_OFFSETS, _KEY_OFFSETS, _LOG_SUM_OFFSETS = range(10, 15)


@functools.lru_cache(maxsize=1)
def front_end_installed() -> bool:
    """Whether the front end is there; each call of attention asks."""
    return importlib.util.find_spec("cudnn") is not None


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

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        log_sum: Tensor,
        places: Indices,
    ) -> None:
        """Fill `output` and `log_sum` (T, N)."""
        self(
            {
                _QUERY: query,
                _KEY: key,
                _VALUE: value,
                _OUTPUT: output,
                _LOG_SUM: log_sum,
                **_indices_by_number(places),
            }
        )

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        log_sum: Tensor,
        gradients: Gradients,
        places: Indices,
    ) -> None:
        """Fill the `gradients` of query, key and value; `log_sum` is (T, N)."""
        self(
            {
                _GRAD: grad,
                _QUERY: query,
                _KEY: key,
                _VALUE: value,
                _OUTPUT: output,
                _LOG_SUM: log_sum,
                **dict(zip((_D_QUERY, _D_KEY, _D_VALUE), gradients, strict=True)),
                **_indices_by_number(places),
            }
        )

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


def _indices_by_number(places: Indices) -> dict[int, Tensor]:
    return {
        _QUERY_LENGTHS: places.query_lengths,
        _KEY_LENGTHS: places.key_lengths,
        _QUERY_OFFSETS: places.query_offsets,
        _KEY_OFFSETS: places.key_offsets,
        _LOG_SUM_OFFSETS: places.log_sum_offsets,
    }
