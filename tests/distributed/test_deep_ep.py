"""The dispatcher over DeepEP, with a stand-in for its buffer that moves the same things by gloo.

What this shows is what this package does around the kernels: layout, order of rows, weights,
gradients. It does not show DeepEP itself.
"""

import dataclasses
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lightning.config import ExpertConfig
from megatron_lightning.config.expert_rules import expert_problems
from megatron_lightning.config.parallel import ParallelConfig
from tests.distributed.test_expert_dispatch import CASES, compare, run_case
from tests.harness import run_ranks

NAMES = ("ep2", "ep4", "ep2_edp2", "ep2_tp2", "one_rank", "dropped", "dropped_tp2", "uneven")


class Buffer:
    """`deep_ep.Buffer` as its documentation says: tokens go once to each rank that they need."""

    def __init__(self, group: Any, nvl_bytes: int, rdma_bytes: int) -> None:
        assert nvl_bytes > 0
        self.group, self.size, self.rank = group, group.size(), group.rank()

    @staticmethod
    def get_dispatch_config(size: int) -> Any:
        hint = SimpleNamespace()
        hint.get_nvl_buffer_size_hint = lambda hidden_bytes, ranks: hidden_bytes * ranks
        hint.get_rdma_buffer_size_hint = lambda hidden_bytes, ranks: 0
        return hint

    get_combine_config = get_dispatch_config

    def _everyone(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        assert topk_idx.dtype is torch.int64
        rank_of = torch.where(topk_idx < 0, -1, topk_idx // (num_experts // self.size))
        in_rank = torch.stack([(rank_of == rank).any(1) for rank in range(self.size)], dim=1)
        chosen = topk_idx[topk_idx >= 0]
        return in_rank.sum(0).int(), None, chosen.bincount(minlength=num_experts), in_rank, None

    def dispatch(
        self,
        x: Tensor,
        handle: Any = None,
        *,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_rank: Any = None,
        num_tokens_per_rdma_rank: Any = None,
        num_tokens_per_expert: Tensor | None = None,
    ) -> tuple[Any, ...]:
        if handle is not None:
            everyone = self._everyone(x)
            rows = [everyone[rank][mask] for rank, mask in enumerate(handle)]
            return torch.cat(rows), None, None, None, None, None
        assert num_tokens_per_expert is not None
        assert topk_weights is not None
        assert topk_weights.dtype is torch.float32
        everyone = self._everyone((x, topk_idx, topk_weights, is_token_in_rank))
        masks = [part[3][:, self.rank] for part in everyone]
        tokens, experts, weights = (
            torch.cat([part[i][mask] for part, mask in zip(everyone, masks, strict=True)])
            for i in range(3)
        )
        local = len(num_tokens_per_expert) // self.size
        experts = experts - self.rank * local
        here = (experts >= 0) & (experts < local)
        experts = experts.masked_fill(~here, -1)
        counts = experts[here].bincount(minlength=local).tolist()
        return tokens, experts, weights.masked_fill(~here, 0.0), counts, masks, None

    def combine(self, x: Tensor, handle: Any, topk_weights: Tensor | None = None) -> tuple:
        everyone = self._everyone((x, handle, topk_weights))
        length = len(everyone[0][1][self.rank])
        sums = x.new_zeros(length, x.shape[1])
        weights = (
            None if topk_weights is None else topk_weights.new_zeros(length, topk_weights.shape[1])
        )
        for rows, masks, given in everyone:
            begin = sum(int(mask.sum()) for mask in masks[: self.rank])
            mask = masks[self.rank]
            part = slice(begin, begin + int(mask.sum()))
            sums[mask] += rows[part]
            if weights is not None:
                weights[mask] += given[part]
        return sums, weights, None


def run_with_stand_in(rank: int, world_size: int, case: Any) -> dict[str, Any]:
    module = ModuleType("deep_ep")
    module.Buffer = Buffer  # type: ignore[attr-defined]
    sys.modules["deep_ep"] = module
    try:
        return run_case(rank, world_size, case)
    finally:
        del sys.modules["deep_ep"]


@pytest.mark.parametrize("name", NAMES)
def test_dispatch_equals_one_process(name: str) -> None:
    """Outputs and all gradients; weights travel in float32, as DeepEP wants them."""
    world_size, case = CASES[name]
    case = dataclasses.replace(case, dispatcher="deep_ep")
    compare(case, run_ranks(run_with_stand_in, world_size, case), tolerance=1e-6)


def test_what_it_needs_is_said_before_a_run() -> None:
    layout = ParallelConfig(
        tensor_parallel_size=2,
        expert_parallel_size=2,
        expert=ExpertConfig(dispatcher="deep_ep", overlap_all_to_all=True),
    )
    found = expert_problems(layout)
    assert any("that package is not installed" in problem for problem in found)
    assert any("expert_tensor_parallel_size=2: it needs whole experts" in one for one in found)
    assert any('"deep_ep" with expert.overlap_all_to_all=True' in problem for problem in found)
