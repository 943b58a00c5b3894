"""Routing options, each against numbers computed token by token with Python loops."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_lightning.config import GPTConfig, MoEConfig
from megatron_lightning.layers.dropout import apply_random
from megatron_lightning.layers.moe import Router, Routing
from megatron_lightning.layers.moe.exact_linear import exact_linear
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.sequence import HeldTokens

S, B, H, E, K = 7, 3, 16, 8, 4


def make(seed: int = 0, **options: Any) -> Router:
    moe = MoEConfig(**{"num_experts": E, "router_topk": K, **options})
    config = GPTConfig(vocab_size=10, num_layers=2, hidden_size=H, num_attention_heads=2, moe=moe)
    assert config.check() == []
    router = Router(config)
    torch.manual_seed(seed)
    for parameter in router.parameters():
        nn.init.normal_(parameter)
    return router


def inputs(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(S, B, H, generator=torch.Generator().manual_seed(7)).to(dtype)


def logits_of(router: Router, hidden: Tensor) -> list[list[float]]:
    """Token t = s * B + b, in float64 on lists."""
    weight = router.weight.detach().double().tolist()
    bias = [0.0] * E if router.bias is None else router.bias.detach().double().tolist()
    tokens = hidden.detach().double().flatten(0, 1).tolist()
    return [
        [
            sum(x * w for x, w in zip(token, row, strict=True)) + bias[e]
            for e, row in enumerate(weight)
        ]
        for token in tokens
    ]


def softmax(values: list[float]) -> list[float]:
    exponentials = [math.exp(v - max(values)) for v in values]
    return [x / sum(exponentials) for x in exponentials]


def score(name: str, logits: list[float]) -> list[float]:
    if name == "softmax":
        return softmax(logits)
    if name == "sigmoid":
        return [1 / (1 + math.exp(-x)) for x in logits]
    return [math.sqrt(math.log(1 + math.exp(x))) for x in logits]


def best(values: list[float], count: int) -> list[int]:
    return sorted(range(len(values)), key=lambda i: -values[i])[:count]


def check(routing: Routing, experts: list[list[int]], probs: list[list[float]]) -> None:
    assert routing.experts.tolist() == experts
    torch.testing.assert_close(
        routing.probs.double(), torch.tensor(probs, dtype=torch.float64), rtol=2e-5, atol=2e-6
    )


@pytest.mark.parametrize("factor", [1.0, 2.5])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_scores_taken_before_the_choice(scores: Any, normalize: bool, factor: float) -> None:
    router = make(
        router_score_function=scores,
        router_pre_softmax=scores == "softmax",
        router_normalize_topk=normalize,
        router_topk_scaling_factor=factor,
    )
    hidden = inputs()
    experts, probs = [], []
    for logits in logits_of(router, hidden):
        all_scores = score(scores, logits)
        chosen = best(all_scores, K)
        total = sum(all_scores[e] for e in chosen) if normalize else 1.0
        experts.append(chosen)
        probs.append([factor * all_scores[e] / total for e in chosen])
    check(router(hidden), experts, probs)


@pytest.mark.parametrize("bias", [False, True])
def test_softmax_over_the_chosen(bias: bool) -> None:
    router = make(router_bias=bias)
    assert (router.bias is not None) == bias
    hidden = inputs()
    logits = logits_of(router, hidden)
    experts = [best(row, K) for row in logits]
    probs = [softmax([row[e] for e in chosen]) for row, chosen in zip(logits, experts, strict=True)]
    check(router(hidden), experts, probs)


@pytest.mark.parametrize("expert_bias", [False, True])
@pytest.mark.parametrize(("groups", "chosen_groups"), [(4, 2), (2, 1), (4, 4)])
def test_groups_and_a_bias_that_only_chooses(
    groups: int, chosen_groups: int, expert_bias: bool
) -> None:
    router = make(
        router_score_function="sigmoid",
        router_num_groups=groups,
        router_group_topk=chosen_groups,
        expert_bias=expert_bias,
        load_balancing="none",
    )
    shift = [0.0] * E
    if expert_bias:
        assert router.expert_bias is not None
        router.expert_bias.copy_(torch.randn(E))
        shift = router.expert_bias.double().tolist()
    hidden = inputs()
    size, experts, probs = E // groups, [], []
    for logits in logits_of(router, hidden):
        scores = score("sigmoid", logits)
        choosing = [s + b for s, b in zip(scores, shift, strict=True)]
        sums = []
        for g in range(groups):
            inside = sorted(choosing[g * size : (g + 1) * size], reverse=True)
            sums.append(sum(inside[: K // chosen_groups]))
        open_groups = best(sums, chosen_groups)
        allowed = [v if i // size in open_groups else -math.inf for i, v in enumerate(choosing)]
        chosen = best(allowed, K)
        total = sum(scores[e] for e in chosen)
        experts.append(chosen)
        probs.append([scores[e] / total for e in chosen])
    check(router(hidden), experts, probs)
    assert {e // size for e in experts[0]} <= set(range(groups))


def test_the_bias_that_only_chooses_has_no_gradient_and_is_kept_in_float32() -> None:
    router = make(router_score_function="sigmoid", expert_bias=True, load_balancing="none")
    assert "expert_bias" in router.state_dict()
    assert "expert_bias" not in dict(router.named_parameters())
    assert router.expert_bias is not None
    assert router.expert_bias.dtype == torch.float32


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_routing_dtype_does_not_follow_the_model(dtype: Any) -> None:
    router = make(router_dtype=dtype).bfloat16()
    hidden = inputs(torch.bfloat16)
    routing = router(hidden)
    assert routing.probs.dtype == getattr(torch, dtype)
    logits = logits_of(router, hidden)
    exact = torch.tensor([softmax([row[e] for e in best(row, K)]) for row in logits])
    limit = 1e-6 if dtype == "float32" else 1e-7  # the reference is made float32 here
    assert (routing.probs - exact).abs().max() < 5 * limit
    routing.probs.square().sum().backward()
    assert router.weight.grad is not None
    assert router.weight.grad.dtype == torch.bfloat16


def test_forced_balance_gives_every_expert_equally_many() -> None:
    router = make(load_balancing="forced")
    hidden = inputs()[:, :2].repeat(4, 1, 1)  # 56 tokens
    routing = router(hidden)
    loads = [0] * E
    for row, logits, probs in zip(
        routing.experts.tolist(), logits_of(router, hidden), routing.probs.tolist(), strict=True
    ):
        assert len(set(row)) == K
        assert probs == pytest.approx(softmax([logits[e] for e in row]), rel=1e-4)
        for expert in row:
            loads[expert] += 1
    assert set(loads) == {56 * K // E}


def sinkhorn_by_loops(logits: list[list[float]], rounds: int) -> list[list[float]]:
    """Scale rows and columns of exp(logits) in turn, as matrices."""
    cost = [[math.exp(x) for x in row] for row in logits]
    for _ in range(rounds):
        cost = [[x / sum(row) for x in row] for row in cost]
        sums = [sum(row[e] for row in cost) for e in range(E)]
        cost = [[x / sums[e] for e, x in enumerate(row)] for row in cost]
    return cost


def test_sinkhorn_balances_in_training_only() -> None:
    router = make(load_balancing="sinkhorn")
    with torch.no_grad():
        router.weight[2] += 1.0  # one expert would get all
    hidden = inputs() + 1.0
    logits = logits_of(router, hidden)
    cost = sinkhorn_by_loops(logits, 60)
    experts = [best(row, K) for row in cost]
    routing = router(hidden)
    assert [set(row) for row in routing.experts.tolist()] == [set(row) for row in experts]
    chosen = routing.experts.tolist()
    probs = [softmax([row[e] for e in picked]) for row, picked in zip(logits, chosen, strict=True)]
    check(routing, chosen, probs)
    plain = router.eval()(hidden)
    assert plain.experts.tolist() == [best(row, K) for row in logits]
    balanced, greedy = (r.experts.flatten().bincount(minlength=E) for r in (routing, plain))
    assert balanced.max() < greedy.max()


@pytest.mark.parametrize("exact", [False, True])
def test_jitter_is_uniform_noise_on_the_routers_input(exact: bool) -> None:
    router = make(input_jitter=0.25)
    holder = nn.ModuleDict({"router": router})
    streams = apply_random(holder, ParallelMesh.single(), seed=3, exact=exact)
    hidden = torch.ones(200, 5, H)
    streams.begin(1, 0, 0)
    with torch.no_grad():
        router.weight.copy_(torch.eye(E, H))
    seen = router.logits(hidden)  # the first E features of the jittered input
    assert seen.min() >= 0.75
    assert seen.max() <= 1.25
    assert seen.mean().item() == pytest.approx(1.0, abs=0.005)
    assert seen.var().item() == pytest.approx(0.5**2 / 12, rel=0.05)
    streams.begin(1, 0, 0)
    assert torch.equal(router.logits(hidden), seen)
    streams.begin(1, 1, 5)
    assert not torch.equal(router.logits(hidden), seen)
    assert torch.equal(router.eval().logits(hidden), torch.ones(1000, E))


def test_exact_jitter_depends_on_sample_and_position_alone() -> None:
    router = make(input_jitter=0.25)
    streams = apply_random(
        nn.ModuleDict({"router": router}), ParallelMesh.single(), seed=3, exact=True
    )
    hidden = inputs()
    streams.begin(0, 0, 10)
    whole = router.logits(hidden).unflatten(0, (S, B))
    streams.begin(0, 1, 11)  # the second sample, as a micro-batch of its own
    alone = router.logits(hidden[:, 1:2]).unflatten(0, (S, 1))
    torch.testing.assert_close(alone, whole[:, 1:2])
    places = torch.tensor([[4, 5, 6]])
    streams.begin(0, 0, 10, held=HeldTokens(places=places, length=S, is_padded=False))
    part = router.logits(hidden[4:]).unflatten(0, (3, B))
    torch.testing.assert_close(part, whole[4:])


@pytest.mark.parametrize("policy", ["probability", "position"])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.5])
def test_capacity_drops_what_has_no_room(policy: Any, factor: float) -> None:
    router = make(capacity_factor=factor, drop_policy=policy)
    routing = router(inputs())
    tokens = S * B
    capacity = min(tokens, math.ceil(tokens * K / E * factor))
    want = [[True] * K for _ in range(tokens)]
    for expert in range(E):
        places = [
            (t, k)
            for t, row in enumerate(routing.experts.tolist())
            for k, e in enumerate(row)
            if e == expert
        ]
        if policy == "probability":
            places.sort(key=lambda place: -float(routing.probs[place].detach()))
        for t, k in places[:capacity]:
            want[t][k] = False
    assert routing.dropped is not None
    assert routing.dropped.tolist() == want
    assert any(map(any, want)) or factor > 1
    assert int(router.statistics.dropped) == sum(map(sum, want))


def test_dropless_has_no_mask() -> None:
    assert make()(inputs()).dropped is None


def test_an_even_load_loses_nothing_at_capacity_one() -> None:
    routing = make(capacity_factor=1.0, load_balancing="forced")(torch.randn(4, 2, H))
    assert routing.dropped is not None
    assert not routing.dropped.any()


def test_routers_start_over_from_the_meta_device() -> None:
    config = MoEConfig(
        num_experts=E,
        router_score_function="sigmoid",
        expert_bias=True,
        load_balancing="global_aux_loss",
        aux_loss_coeff=0.1,
    )
    model = GPTConfig(vocab_size=10, num_layers=2, hidden_size=H, num_attention_heads=2, moe=config)
    router = Router(model, device="meta").to_empty(device="cpu")
    router.reset_buffers()
    assert router.expert_bias is not None
    assert router.expert_share is not None
    assert router.expert_bias.tolist() == [0.0] * E
    assert router.expert_share.tolist() == [1 / E] * E


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_linear_of_low_precision_tensors(dtype: torch.dtype) -> None:
    """Products and sums in the wide dtype, forward and backward; one rounding at the end."""
    torch.manual_seed(0)
    x = torch.randn(50, H).bfloat16().requires_grad_()
    weight = torch.randn(E, H).bfloat16().requires_grad_()
    bias = torch.randn(E).bfloat16().requires_grad_()
    y = exact_linear(x, weight, bias, dtype)
    wide = [t.detach().to(torch.float64).requires_grad_() for t in (x, weight, bias)]
    want = wide[0] @ wide[1].t() + wide[2]
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)
    grad = torch.randn(50, E, dtype=dtype)
    y.backward(grad)
    want.backward(grad.double())
    for got, exact in zip((x, weight, bias), wide, strict=True):
        assert got.grad is not None
        assert exact.grad is not None
        assert got.grad.dtype == torch.bfloat16
        torch.testing.assert_close(got.grad.double(), exact.grad, rtol=2**-8, atol=1e-4)
