"""Memory of a rank that torch's allocator doesn't hold."""

from __future__ import annotations

from megatron_lightning.cli.plan_request import PlanRequest
from megatron_lightning.parallel.context.exchange import groups_of
from megatron_lightning.parallel.overlap.choice import LEAST_BYTES_ON_GPU
from megatron_lightning.parallel.peers.exchange import shared_bytes
from megatron_lightning.precision.policy import policy_for

RESERVED_BYTES = 3 << 29
"""CUDA context, code, NCCL; not in the peak, but in what must fit."""


def outside_bytes(request: PlanRequest) -> int:
    """What a rank needs outside of torch's allocator: `RESERVED_BYTES`, and the memory that tensor
    ranks and context ranks share, where they move parts of the sequence and heads through it.
    """
    return RESERVED_BYTES + _shared_by_tensor_ranks(request) + _shared_by_context_ranks(request)


def _shared_by_tensor_ranks(request: PlanRequest) -> int:
    parallel, tensor = request.parallel, request.parallel.tensor_parallel_size
    if parallel.overlaps_tensor_parallel is False or parallel.expert.overlap_all_to_all:
        return 0
    part = _context_tokens(request) // tensor * request.model.hidden_size * _element(request)
    return shared_bytes(tensor, part, sums=True) if part >= LEAST_BYTES_ON_GPU else 0


def _shared_by_context_ranks(request: PlanRequest) -> int:
    """For what one rank sends another of queries, keys and values."""
    parallel, model = request.parallel, request.model
    context, size = parallel.context, parallel.context_parallel_size
    ranks = parallel.tensor_parallel_size * size
    groups = groups_of(model.num_query_groups // ranks, context.head_groups)
    if size == 1 or not (context.contiguous and context.peer_memory) or groups > 1:
        return 0
    queries = model.num_attention_heads * model.head_dim
    keys_values = model.num_query_groups * (model.head_dim + model.value_dim)
    part = _context_tokens(request) * (queries + keys_values) // ranks * _element(request)
    return shared_bytes(size, part, sums=False)


def _context_tokens(request: PlanRequest) -> int:
    """Of one micro-batch on one context rank."""
    tokens = request.seq_length * request.micro_batch_size
    return tokens // request.parallel.context_parallel_size


def _element(request: PlanRequest) -> int:
    return policy_for(request.precision).params_dtype.itemsize
