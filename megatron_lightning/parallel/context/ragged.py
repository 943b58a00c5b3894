"""cuDNN's fused attention for packed sequences of any lengths, where its Python front end has a
plan.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_lightning.parallel.context.plan import Band, Span
from megatron_lightning.parallel.context.ragged_plans import Gradients, Plan, find_plan
from megatron_lightning.parallel.context.ragged_shapes import Indices, PlanKey, indices, plan_key


def knows(band: Band) -> bool:
    """Whether cuDNN has this band: everything, causal, or causal in a window."""
    return band.is_full or (band.right == 0 and (band.left is None or band.left >= 1))


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
        places = _places(plan.key, queries, keys, query.device)
        plan.forward(query, key, value, output, log_sum, places)
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
        places = _places(plan.key, queries, keys, query.device)
        plan.backward(grad, query, key, value, output, log_sum.t().contiguous(), gradients, places)
        return gradients


def _places(
    key: PlanKey, queries: tuple[Span, ...], keys: tuple[Span, ...], device: torch.device
) -> Indices:
    rows = key.heads * key.head_dim, key.groups * key.head_dim
    return indices(queries, keys, key.sequences, *rows, key.heads, device)
