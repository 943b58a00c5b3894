"""What routers learn of a window's loads, and what one without tokens leaves."""

from typing import Any

import pytest
import torch
from torch import nn

from megatron_lightning.config import GPTConfig, MoEConfig
from megatron_lightning.layers.moe import Router
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.runtime.expert_balance import ExpertBalance


def router(**options: Any) -> Router:
    moe = MoEConfig(num_experts=4, **options)
    config = GPTConfig(
        vocab_size=8, num_layers=1, hidden_size=8, ffn_hidden_size=8, num_attention_heads=1, moe=moe
    )
    return Router(config)


def routers() -> list[Router]:
    biased = dict(expert_bias=True, router_score_function="sigmoid")
    return [
        router(**biased, expert_bias_update_rate=0.5),
        router(load_balancing="global_aux_loss", aux_loss_coeff=0.1),
        router(),
        router(**biased, expert_bias_update_rate=0.25),
    ]


@pytest.mark.parametrize("follow", [True, torch.ones(())])
def test_each_router_follows_its_own_loads(follow: Any) -> None:
    made = routers()
    balance = ExpertBalance(nn.ModuleList(made), ParallelMesh.single(), sequence_parallel=False)
    loads_of = [[4, 0, 2, 2], [1, 3, 0, 4], [8, 0, 0, 0], [0, 0, 0, 8]]
    for one, loads in zip(made, loads_of, strict=True):
        one.statistics.tokens += torch.tensor(loads)
    balance.finish_window(follow=follow)
    first, second, third, fourth = made
    assert first.expert_bias is not None
    assert second.expert_share is not None
    assert fourth.expert_bias is not None
    assert first.expert_bias.tolist() == [-0.5, 0.5, 0.0, 0.0]
    assert second.expert_share.tolist() == [0.125, 0.375, 0.0, 0.5]
    assert fourth.expert_bias.tolist() == [0.25, 0.25, 0.25, -0.25]
    assert all(one.statistics.is_closed for one in made)
    assert third.statistics.tokens.tolist() == [8, 0, 0, 0]  # still to be read
    balance.begin_forward(1.0)
    assert all(not one.statistics.tokens.any() for one in made)


@pytest.mark.parametrize("follow", [False, torch.zeros(())])
def test_a_window_without_loss_tokens_moves_nothing(follow: Any) -> None:
    made = routers()
    balance = ExpertBalance(nn.ModuleList(made), ParallelMesh.single(), sequence_parallel=False)
    for one in made:
        one.statistics.tokens += torch.tensor([4, 0, 2, 2])
    before = [buffer.clone() for one in made for buffer in one.buffers()]
    balance.finish_window(follow=follow)
    after = [buffer for one in made for buffer in one.buffers()]
    assert len(after) == 3
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old, new)


def test_the_weight_of_losses_stays_in_one_place() -> None:
    (made, *_) = routers()
    balance = ExpertBalance(made, ParallelMesh.single(), sequence_parallel=False)
    balance.hold_weight()
    held = made.weight_of_losses.value
    assert isinstance(held, torch.Tensor)
    for weight in (torch.tensor(3), 0.1, torch.tensor(7.0)):
        balance.begin_forward(weight)
        assert made.weight_of_losses.value is held
        assert float(held) == float(weight)
