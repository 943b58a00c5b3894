"""Losses and bias of the router against sums written as loops, and how their gradients are
weighed.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_lightning.config import GPTConfig, MoEConfig
from megatron_lightning.layers.moe import AuxiliaryWeight, Router
from megatron_lightning.layers.moe.balance import update_expert_biases_

S, B, H, E, K = 6, 3, 8, 6, 2


def make(**options: Any) -> Router:
    moe = MoEConfig(**{"num_experts": E, "router_topk": K, **options})
    config = GPTConfig(vocab_size=10, num_layers=2, hidden_size=H, num_attention_heads=2, moe=moe)
    assert config.check() == []
    router = Router(config)
    torch.manual_seed(0)
    nn.init.normal_(router.weight)
    return router


def inputs() -> Tensor:
    return torch.randn(S, B, H, generator=torch.Generator().manual_seed(7))


def plain_scores(router: Router, hidden: Tensor) -> Tensor:
    """(S, B, E), differentiable by the weight, sums 1."""
    logits = hidden @ router.weight.t()
    if router.config.router_score_function == "softmax":
        return logits.softmax(-1)
    scores = logits.sigmoid()
    if router.config.router_score_function == "sqrtsoftplus":
        scores = (1 + logits.exp()).log().sqrt()
    return scores / scores.sum(-1, keepdim=True)


def loss_by_loops(scores: Tensor, tokens: list[tuple[int, int]]) -> Tensor:
    """E sum_e f_e P_e over `tokens`, with the K largest scores of each as its experts."""
    count, mean = [0] * E, [torch.zeros(()) for _ in range(E)]
    for s, b in tokens:
        ranked = sorted(range(E), key=lambda e: -float(scores[s, b, e].detach()))
        for e in ranked[:K]:
            count[e] += 1
        for e in range(E):
            mean[e] = mean[e] + scores[s, b, e] / len(tokens)
    total = torch.zeros(())
    for e in range(E):
        total = total + E * (count[e] / (K * len(tokens))) * mean[e]
    return total


def gradient(router: Router, hidden: Tensor) -> Tensor:
    """Of the losses alone: the probabilities are not used for anything."""
    router.weight.grad = None
    (router(hidden).probs * 0.0).sum().backward()
    assert router.weight.grad is not None
    return router.weight.grad.clone()


SCORES: list[Any] = ["softmax", "sigmoid", "sqrtsoftplus"]


@pytest.mark.parametrize("scores", SCORES)
def test_auxiliary_loss_over_the_micro_batch(scores: Any) -> None:
    router = make(router_score_function=scores, aux_loss_coeff=0.1)
    hidden = inputs()
    tokens = [(s, b) for s in range(S) for b in range(B)]
    want = 0.1 * loss_by_loops(plain_scores(router, hidden), tokens)
    (expected,) = torch.autograd.grad(want, router.weight)
    torch.testing.assert_close(gradient(router, hidden), expected)
    assert float(router.statistics.aux_loss) == pytest.approx(float(want.detach()), rel=1e-5)


@pytest.mark.parametrize("scores", SCORES)
def test_auxiliary_loss_over_each_sequence(scores: Any) -> None:
    router = make(router_score_function=scores, aux_loss_coeff=0.1, load_balancing="seq_aux_loss")
    hidden = inputs()
    plain = plain_scores(router, hidden)
    want = torch.zeros(())
    for b in range(B):
        want = want + 0.1 * loss_by_loops(plain, [(s, b) for s in range(S)]) / B
    (expected,) = torch.autograd.grad(want, router.weight)
    torch.testing.assert_close(gradient(router, hidden), expected)
    assert float(router.statistics.aux_loss) == pytest.approx(float(want.detach()), rel=1e-5)


def test_auxiliary_loss_with_loads_of_the_global_batch() -> None:
    router = make(aux_loss_coeff=0.1, load_balancing="global_aux_loss")
    hidden = inputs()
    assert gradient(router, hidden).abs().max() < 1e-6  # even shares say nothing
    assert router.expert_share is not None
    share = torch.tensor([0.4, 0.3, 0.1, 0.1, 0.1, 0.0])
    router.expert_share.copy_(share)
    scores = plain_scores(router, hidden)
    want = torch.zeros(())
    for s in range(S):
        for b in range(B):
            for e in range(E):
                want = want + 0.1 * E * share[e] * scores[s, b, e] / (S * B)
    (expected,) = torch.autograd.grad(want, router.weight)
    torch.testing.assert_close(gradient(router, hidden), expected)


def test_the_choice_of_the_loss_ignores_bias_and_groups() -> None:
    """DeepSeek-V3 counts the K largest scores, not the experts that tokens were sent to."""
    router = make(router_score_function="sigmoid", aux_loss_coeff=0.1, expert_bias=True)
    assert router.expert_bias is not None
    router.expert_bias[0] = 100.0
    hidden = inputs()
    tokens = [(s, b) for s in range(S) for b in range(B)]
    want = 0.1 * loss_by_loops(plain_scores(router, hidden), tokens)
    (expected,) = torch.autograd.grad(want, router.weight)
    torch.testing.assert_close(gradient(router, hidden), expected)
    assert int(router.statistics.tokens[0]) == S * B  # while all go to the first


def test_z_loss() -> None:
    router = make(z_loss_coeff=0.01)
    hidden = inputs()
    want = torch.zeros(())
    for row in (hidden @ router.weight.t()).flatten(0, 1):
        want = want + 0.01 * sum(x.exp() for x in row).log() ** 2 / (S * B)
    (expected,) = torch.autograd.grad(want, router.weight)
    torch.testing.assert_close(gradient(router, hidden), expected)
    assert float(router.statistics.z_loss) == pytest.approx(float(want.detach()), rel=1e-5)


def test_losses_are_one_when_even_and_larger_when_not() -> None:
    router = make(aux_loss_coeff=1.0)
    with torch.no_grad():
        router.weight.copy_(torch.eye(E, H) * 4)
    even = torch.eye(H)[:E].unsqueeze(1) + torch.eye(H)[[1, 2, 3, 4, 5, 0]].unsqueeze(1) * 0.5
    router(even)
    assert float(router.statistics.aux_loss) == pytest.approx(1.0, abs=1e-5)
    router.statistics.reset()
    router(torch.eye(H)[:1].expand(S, H).unsqueeze(1))
    assert float(router.statistics.aux_loss) > 2


def test_gradients_are_weighed_by_the_micro_batch_of_the_forward() -> None:
    router = make(aux_loss_coeff=0.1, z_loss_coeff=0.1)
    hidden = inputs()
    plain = gradient(router, hidden)
    weight = router.weight_of_losses = AuxiliaryWeight()
    weight.value = torch.tensor(3.0, dtype=torch.float64)
    router.weight.grad = None
    probs = router(hidden).probs
    weight.value = 100.0  # another micro-batch's forward, before this one's backward
    (probs * 0.0).sum().backward()
    torch.testing.assert_close(router.weight.grad, 3 * plain)


def test_a_recomputed_forward_keeps_weight_and_statistics() -> None:
    router = make(aux_loss_coeff=0.1)
    hidden = inputs()
    plain = gradient(router, hidden)
    router.statistics.reset()
    router.weight.grad = None
    weight = router.weight_of_losses
    weight.value = 2.0
    probs = torch.utils.checkpoint.checkpoint(
        lambda x: router(x).probs * 0.0, hidden.requires_grad_(), use_reentrant=False
    )
    weight.value = 50.0
    probs.sum().backward()
    torch.testing.assert_close(router.weight.grad, 2 * plain)
    assert router.statistics.num_forwards == 1
    assert int(router.statistics.num_tokens) == S * B


def test_losses_are_for_training() -> None:
    router = make(aux_loss_coeff=0.1).eval()
    assert gradient(router, inputs()).abs().max() == 0
    assert router.statistics.num_forwards == 0
    with torch.no_grad():
        router.train()(inputs())
    assert router.statistics.num_forwards == 0


def test_expert_bias_moves_towards_experts_with_few_tokens() -> None:
    bias = torch.tensor([0.1, 0.0, -0.1, 0.0])
    tokens = [5, 20, 10, 5]  # mean 10
    update_expert_biases_([bias], torch.tensor([tokens]), 0.01)
    want = []
    for old, load in zip([0.1, 0.0, -0.1, 0.0], tokens, strict=True):
        step = 0.01 if load < 10 else -0.01 if load > 10 else 0.0
        want.append(old + step)
    assert bias.tolist() == pytest.approx(want, abs=1e-7)


def test_statistics_of_a_window() -> None:
    router = make(aux_loss_coeff=0.1, capacity_factor=1.0)
    hidden = inputs()
    experts = router(hidden).experts.flatten().tolist()
    router(hidden)
    seen = router.statistics
    assert seen.num_forwards == 2
    assert seen.tokens.tolist() == [2 * experts.count(e) for e in range(E)]
    assert int(seen.num_tokens) == 2 * S * B
    entropy = 0.0
    for row in plain_scores(router, hidden).detach().flatten(0, 1).tolist():
        entropy -= 2 * sum(p * math.log(p) for p in row)
    assert float(seen.entropy) == pytest.approx(entropy, rel=1e-5)
    seen.close()
    assert seen.num_forwards == 2  # still to be read
    router(hidden)
    assert router.statistics.num_forwards == 1
