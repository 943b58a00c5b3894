"""All-to-all context attention in which exchanges hide behind attention and copy nothing.

Ranks hold neighbouring tokens (`ContextConfig.contiguous`), so the slices of all ranks, one after
the other, are the whole sequence: what arrives is what attention reads, and what attention gives is
sent as it lies. Heads are dealt before (`dealt`): written in the order in which they are sent,
(groups, ranks, S/ranks, B, heads, D), in a compiled layer by the kernel that rotates them.

Heads don't know of each other. So the heads that a rank gets may be dealt to a few groups. All are
sent at once, and while attention of one group is computed the next ones are under way, and outputs
of the former ones travel back. It isn't for nothing: at the end of each call of attention some of
the device is idle (`BACKWARD_GROUPS`). What is computed is what `context_all_to_all.py` computes.

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

BACKWARD_GROUPS = 2
"""On an H200 (32,768 tokens, 16 heads of 64, 4 of keys) two groups take 5 % longer forward and
0.6 % backward than one, four 13 % and 2.5 %; half of an exchange over NVLink is 3 % and 1 %."""
MIN_TOKENS = 8192
"""Of whole sequences; with fewer an exchange takes no longer than starting it."""


def groups_of(heads: int, tokens: int, wanted: int | None) -> tuple[int, int]:
    """Into how many groups a rank's key/value heads are dealt forward and backward: the same, or
    forward one. `tokens`: of whole sequences; `wanted`: see `ContextConfig.head_groups`.
    """
    if wanted is not None:
        number = max(n for n in range(1, wanted + 1) if heads % n == 0)
        return number, number
    several = tokens >= MIN_TOKENS and heads % BACKWARD_GROUPS == 0
    return 1, BACKWARD_GROUPS if several else 1


def dealt(x: Tensor, size: int, groups: int) -> Tensor:
    """(S/size, B, heads, D) -> (groups, size, S/size, B, heads/groups/size, D), contiguous: what
    each rank gets of each group.
    """
    return x.unflatten(2, (size, groups, -1)).permute(3, 2, 0, 1, 4, 5).contiguous()


def collected(x: Tensor) -> Tensor:
    """Undoes `dealt`: a copy, where there is more than one group or rank."""
    return x.permute(2, 3, 1, 0, 4, 5).flatten(2, 4)


@dataclass(frozen=True, eq=False)
class Neighbours:
    """The ranks that exchange heads, by a name that compiled layers know them by."""

    axis: MeshAxis
    name: str

    def __deepcopy__(self, memo: dict[int, Any]) -> Neighbours:
        """Itself, as the axis."""
        return self


_by_name: weakref.WeakValueDictionary[str, Neighbours] = weakref.WeakValueDictionary()


def announced(axis: MeshAxis) -> Neighbours:
    """What a layer is to hold, so that operations find the axis."""
    made = Neighbours(axis, f"{axis.name} {axis.group.group_name}")
    found = _by_name.get(made.name)
    if found is None or found.axis.group is not axis.group:
        _by_name[made.name] = found = made
    return found


def exchanged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ranks: Neighbours,
    groups: tuple[int, int],
    scale: float,
    window: int,
    lengths: tuple[int, ...] | None = None,
) -> Tensor:
    """Causal attention, with gradients: (S/size, B, N, D), (S/size, B, G, D), (S/size, B, G, Dv) of
    neighbouring tokens -> (S/size, B, N * Dv).

    `groups`: see `groups_of`; `lengths`: of the documents of all samples, one sample after the
    other (not in compiled regions); None: one document a sample.
    """
    result: Tensor = _Exchanged.apply(
        query, key, value, ranks.name, ranks.axis.size, *groups, scale, window, lengths
    )
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
    groups, batch = grad.shape[0], grad.shape[3]
    heads = _by_group(kept, groups)
    arrived = torch.empty_like(grad)
    arriving = []
    for group in range(groups):
        sending = Sending(axis)
        sending.begin(arrived[group], grad[group])
        arriving.append(sending)
    results = [
        torch.empty(_gradient_shape(x, groups), dtype=x.dtype, device=x.device) for x in kept[:3]
    ]
    kernel = choose_kernel(kept[0], kept[2])
    leaving = Sending(axis)
    for group, sending in enumerate(arriving):
        query, key, value, output, log_sum = heads[group]
        sending.finish()
        own = _rows(arrived[group]), query, key, value, output, log_sum
        for into, x in zip(results, whole_backward(own, calls, kernel, scale), strict=True):
            leaving.begin(into[group], _parts(_sequence_first(x, batch), axis.size))
    leaving.finish()
    return results[0], results[1], results[2]


def _calls(x: Tensor, lengths: tuple[int, ...] | None, window: int) -> tuple[Call, ...]:
    _, size, local, batch, *_ = x.shape
    return gathered_calls(lengths or (size * local,) * batch, 1, 0, True, window)


def _by_group(kept: list[Tensor], groups: int) -> list[list[Tensor]]:
    """Queries, keys, values, output, (B * S, heads, D) each, and log-sum-exp (heads, B * S) of each
    group: views, of one sample, of what was kept in as many groups, or in one.
    """
    if kept[0].shape[0] == groups:
        made = []
        for group in range(groups):
            output, log_sum = kept[3 + 2 * group : 5 + 2 * group]
            whole = (_rows(x[group]) for x in kept[:3])
            made.append([*whole, output.transpose(0, 1).flatten(0, 1), log_sum])
        return made
    [(query, key, value, output, log_sum)] = _by_group(kept, 1)
    split = [x.chunk(groups, 1) for x in (query, key, value, output)]
    return [[*own] for own in zip(*split, log_sum.chunk(groups), strict=True)]


def _gradient_shape(whole: Tensor, groups: int) -> tuple[int, ...]:
    """(n, size, S/size, B, heads, D) -> the same heads in other groups."""
    number, size, local, batch, heads, width = whole.shape
    return groups, size, local, batch, number * heads // groups, width


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
        size: int,
        groups: int,
        backward_groups: int,
        scale: float,
        window: int,
        lengths: tuple[int, ...] | None,
    ) -> Tensor:
        query, key, value = (dealt(x, size, groups) for x in (query, key, value))
        if torch.compiler.is_compiling():
            result, *kept = _forward(query, key, value, name, scale, window)
        else:
            result, *kept = run_forward(query, key, value, name, scale, window, lengths)
        ctx.save_for_backward(*kept)
        ctx.settings = name, size, backward_groups, value.shape[-1], scale, window, lengths
        return collected(result).flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        name, size, groups, width, scale, window, lengths = ctx.settings
        grad, kept = dealt(grad.unflatten(2, (-1, width)), size, groups), list(ctx.saved_tensors)
        if torch.compiler.is_compiling():
            given = _backward(grad, kept, name, scale, window)
        else:
            given = run_backward(grad, kept, name, scale, window, lengths)
        query, key, value = (collected(x) for x in given)
        return query, key, value, *(None,) * 7


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
    groups = grad.shape[0]
    query, key, value = (x.new_empty(_gradient_shape(x, groups)) for x in kept[:3])
    return query, key, value


for _name, _run, _shape in (
    ("exchanged_attention", run_forward, _forward_shapes),
    ("exchanged_attention_backward", run_backward, _backward_shapes),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"megatron_lightning::{_name}", _shape)
