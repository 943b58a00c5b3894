"""All-to-all context attention in which exchanges hide behind attention and copy nothing.

Ranks hold neighbouring tokens (`ContextConfig.contiguous`), so the slices of all ranks, one after
the other, are the whole sequence: what arrives is what attention reads, and what attention gives is
sent as it lies. Heads are dealt before (`dealt`): written in the order in which they are sent,
(groups, ranks, S/ranks, B, heads, D), in a compiled layer by the kernel that rotates them.

Heads don't know of each other. So the heads that a rank gets are dealt to a few groups. All are
sent at once, and while attention of one group is computed the next ones are under way, and outputs
of the former ones travel back. Backward likewise. What is computed is what `context_all_to_all.py`
computes.

An operation in a compiled region is given tensors and numbers only and finds its ranks by name. All
ranks compile the same graph, so their exchanges come in the same order.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lightning.parallel.context_attend import whole_backward, whole_forward
from megatron_lightning.parallel.context_kernels import choose_kernel
from megatron_lightning.parallel.context_plan import Call, gathered_calls
from megatron_lightning.parallel.mesh import MeshAxis

MAX_GROUPS = 4
MIN_TOKENS = 8192
"""Of whole sequences; with fewer an exchange takes no longer than starting it."""


def groups_of(heads: int, tokens: int) -> int:
    """Into how many groups a rank's key/value heads are dealt."""
    if tokens < MIN_TOKENS:
        return 1
    return max(n for n in range(1, MAX_GROUPS + 1) if heads % n == 0)


def dealt(x: Tensor, size: int, groups: int) -> Tensor:
    """(S/size, B, heads, D) -> (groups, size, S/size, B, heads/groups/size, D), contiguous: what
    each rank gets of each group.
    """
    return x.unflatten(2, (size, groups, -1)).permute(3, 2, 0, 1, 4, 5).contiguous()


def collected(x: Tensor) -> Tensor:
    """Undoes `dealt`: -> (S/size, B, heads * D)."""
    return x.permute(2, 3, 1, 0, 4, 5).flatten(2)


@dataclass(frozen=True, eq=False)
class Neighbours:
    """The ranks that exchange heads, by a name that compiled layers know them by."""

    axis: MeshAxis

    @property
    def name(self) -> str:
        """The same for all layers."""
        return f"{self.axis.name} {self.axis.group.group_name}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Neighbours:
        """Itself, as the axis."""
        return self


_by_name: weakref.WeakValueDictionary[str, Neighbours] = weakref.WeakValueDictionary()


def announced(axis: MeshAxis) -> Neighbours:
    """What a layer is to hold, so that operations find the axis."""
    made = Neighbours(axis)
    found = _by_name.get(made.name)
    if found is None or found.axis.group is not axis.group:
        _by_name[made.name] = found = made
    return found


def exchanged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    name: str,
    scale: float,
    window: int,
    lengths: tuple[int, ...] | None = None,
) -> Tensor:
    """Causal attention of dealt queries, keys and values, with gradients; dealt outputs.

    `name`: of the ranks; `lengths`: of the documents of all samples, one sample after the other
    (not in compiled regions); None: one document a sample.
    """
    result: Tensor = _Exchanged.apply(query, key, value, name, scale, window, lengths)
    return result


class Sending:
    """Exchanges under way, and what they read, which must stay as it is until they are done."""

    def __init__(self, axis: MeshAxis) -> None:
        self._axis = axis
        self._begun: list[tuple[Any, Tensor]] = []

    def begin(self, into: Tensor, parts: Tensor) -> None:
        """Part i of `parts` (size, ...) goes to rank i, and `into` gets the parts of all ranks."""
        work = dist.all_to_all_single(into, parts, group=self._axis.group, async_op=True)
        self._begun.append((work, parts))

    def finish(self) -> None:
        """Wait; on CUDA the stream does, not the host."""
        for work, _ in self._begun:
            work.wait()
        self._begun.clear()


def run_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    name: str,
    scale: float,
    window: int,
    lengths: tuple[int, ...] | None = None,
) -> list[Tensor]:
    """Dealt outputs; then what the backward pass needs: queries, keys and values as they arrived,
    and of each group the output (S, B, heads, Dv) and the log-sum-exp (heads, B * S).
    """
    axis = _by_name[name].axis
    calls = _calls(query, lengths, window)
    whole = [torch.empty_like(x) for x in (query, key, value)]
    arriving = []
    for group in range(query.shape[0]):
        sending = Sending(axis)
        for into, x in zip(whole, (query, key, value), strict=True):
            sending.begin(into[group], x[group])
        arriving.append(sending)
    result = value.new_empty(*query.shape[:-1], value.shape[-1])
    kernel = choose_kernel(query, value)
    leaving, kept = Sending(axis), []
    for group, sending in enumerate(arriving):
        sending.finish()
        rows = [_rows(x[group]) for x in whole]
        output, log_sum = whole_forward(rows[0], rows[1], rows[2], None, calls, kernel, scale)
        output = _sequence_first(output, query.shape[3])
        leaving.begin(result[group], _parts(output, axis.size))
        kept += [output, log_sum.contiguous()]
    leaving.finish()
    return [result, *whole, *kept]


def run_backward(
    grad: Tensor,
    kept: list[Tensor],
    name: str,
    scale: float,
    window: int,
    lengths: tuple[int, ...] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Dealt gradients of queries, keys and values, from that of the outputs; `kept`: what
    `run_forward` gave after its result.
    """
    axis = _by_name[name].axis
    calls = _calls(grad, lengths, window)
    whole, batch = kept[:3], grad.shape[3]
    arrived = torch.empty_like(grad)
    arriving = []
    for group in range(grad.shape[0]):
        sending = Sending(axis)
        sending.begin(arrived[group], grad[group])
        arriving.append(sending)
    results = [torch.empty_like(x) for x in whole]
    kernel = choose_kernel(whole[0], whole[2])
    leaving = Sending(axis)
    for group, sending in enumerate(arriving):
        query, key, value = (_rows(x[group]) for x in whole)
        output, log_sum = kept[3 + 2 * group : 5 + 2 * group]
        output = output.transpose(0, 1).flatten(0, 1)
        sending.finish()
        own = _rows(arrived[group]), query, key, value, output, log_sum
        for into, x in zip(results, whole_backward(own, calls, kernel, scale), strict=True):
            leaving.begin(into[group], _parts(_sequence_first(x, batch), axis.size))
    leaving.finish()
    return results[0], results[1], results[2]


def _calls(x: Tensor, lengths: tuple[int, ...] | None, window: int) -> tuple[Call, ...]:
    _, size, local, batch, *_ = x.shape
    return gathered_calls(lengths or (size * local,) * batch, 1, 0, True, window)


def _rows(arrived: Tensor) -> Tensor:
    """(size, S/size, B, heads, D) -> (B * S, heads, D): a view of one sample."""
    return arrived.flatten(0, 1).transpose(0, 1).flatten(0, 1)


def _sequence_first(rows: Tensor, batch: int) -> Tensor:
    """(B * S, heads, D) -> (S, B, heads, D), contiguous."""
    return rows.unflatten(0, (batch, -1)).transpose(0, 1).contiguous()


def _parts(whole: Tensor, size: int) -> Tensor:
    """(S, B, heads, D) -> (size, S/size, B, heads, D)."""
    return whole.unflatten(0, (size, -1))


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        name: str,
        scale: float,
        window: int,
        lengths: tuple[int, ...] | None,
    ) -> Tensor:
        if torch.compiler.is_compiling():
            result, *kept = _forward(query, key, value, name, scale, window)
        else:
            result, *kept = run_forward(query, key, value, name, scale, window, lengths)
        ctx.save_for_backward(*kept)
        ctx.settings = name, scale, window, lengths
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad, kept = grad.contiguous(), list(ctx.saved_tensors)
        name, scale, window, lengths = ctx.settings
        if torch.compiler.is_compiling():
            given = _backward(grad, kept, name, scale, window)
        else:
            given = run_backward(grad, kept, name, scale, window, lengths)
        return *given, None, None, None, None


# Defined by hand: `torch.library.custom_op` costs the host some ten microseconds more at each call.
_library = torch.library.Library("megatron_lightning", "FRAGMENT")
_library.define(
    "exchanged_attention(Tensor query, Tensor key, Tensor value, str name, float scale, int window)"
    " -> Tensor[]"
)
_library.define(
    "exchanged_attention_backward(Tensor grad, Tensor[] kept, str name, float scale, int window)"
    " -> (Tensor, Tensor, Tensor)"
)
_forward: Any = torch.ops.megatron_lightning.exchanged_attention.default
_backward: Any = torch.ops.megatron_lightning.exchanged_attention_backward.default


def _forward_shapes(
    query: Tensor, key: Tensor, value: Tensor, name: str, scale: float, window: int
) -> list[Tensor]:
    groups, size, local, batch, heads, _ = query.shape
    result = value.new_empty(*query.shape[:-1], value.shape[-1])
    exact = torch.promote_types(query.dtype, torch.float32)
    kept = [
        (
            value.new_empty(size * local, batch, heads, value.shape[-1]),
            value.new_empty(heads, batch * size * local, dtype=exact),
        )
        for _ in range(groups)
    ]
    whole = (torch.empty_like(x) for x in (query, key, value))
    return [result, *whole, *itertools.chain.from_iterable(kept)]


def _backward_shapes(
    grad: Tensor, kept: list[Tensor], name: str, scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (torch.empty_like(x) for x in kept[:3])
    return query, key, value


for _name, _run, _shape in (
    ("exchanged_attention", run_forward, _forward_shapes),
    ("exchanged_attention_backward", run_backward, _backward_shapes),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"megatron_lightning::{_name}", _shape)
