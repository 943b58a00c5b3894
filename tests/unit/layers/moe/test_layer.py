"""The layer of experts against a loop over tokens, and its parts."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lightning.config import GPTConfig, MoEConfig
from megatron_lightning.layers.moe import (
    GroupedExperts,
    MoELayer,
    Routing,
    permute,
    permute_probs,
    sort_by_expert,
    unpermute,
)
from megatron_lightning.layers.moe.remote import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    SharedTokensDispatcher,
)
from megatron_lightning.layers.torch_backend import TorchBackend
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.weight_gradient import WeightGradients, apply_weight_sinks

S, B, H, F_, E, K = 5, 2, 16, 12, 6, 2


def make(moe: dict[str, Any] | None = None, **model: Any) -> MoELayer:
    options = {"num_experts": E, "router_topk": K, "ffn_hidden_size": F_, **(moe or {})}
    config = GPTConfig(
        **{
            "vocab_size": 10,
            "num_layers": 2,
            "hidden_size": H,
            "num_attention_heads": 2,
            "moe": MoEConfig(**options),
            **model,
        }
    )
    assert config.check() == []
    layer = MoELayer(config, TorchBackend())
    torch.manual_seed(1)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer


def inputs(seed: int = 3) -> Tensor:
    return torch.randn(S, B, H, generator=torch.Generator().manual_seed(seed))


def expert_by_hand(layer: MoELayer, e: int, x: Tensor) -> Tensor:
    """One expert on one token, with weights cut out by number."""
    fc1, fc2 = layer.experts.linear_fc1, layer.experts.linear_fc2
    inner = fc1.weight[e] @ x
    if fc1.bias is not None:
        inner = inner + fc1.bias[e]
    gated = inner.dim() == 2
    inner = F.silu(inner[0]) * inner[1] if gated else F.gelu(inner)
    out = fc2.weight[e] @ inner
    return out if fc2.bias is None else out + fc2.bias[e]


def by_loops(layer: MoELayer, hidden: Tensor) -> Tensor:
    routing = layer.router(hidden)
    rows = []
    for t, x in enumerate(hidden.flatten(0, 1)):
        down = x if layer.latent_down is None else layer.latent_down.weight @ x
        total = torch.zeros_like(down)
        for k in range(K):
            if routing.dropped is None or not routing.dropped[t, k]:
                e = int(routing.experts[t, k])
                total = total + routing.probs[t, k] * expert_by_hand(layer, e, down)
        if layer.latent_up is not None:
            total = layer.latent_up.weight @ total
        if layer.shared_experts is not None:
            shared = layer.shared_experts(x)
            if layer.shared_expert_gate is not None:
                shared = shared * torch.sigmoid(layer.shared_expert_gate.weight @ x)
            total = total + shared
        rows.append(total)
    return torch.stack(rows).view_as(hidden)


LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gated": ({}, {}),
    "plain_with_bias": (
        {},
        {"gated_linear_unit": False, "activation": "gelu", "add_bias_linear": True},
    ),
    "gated_with_bias": ({}, {"add_bias_linear": True}),
    "shared": ({"shared_expert_ffn_hidden_size": 20}, {}),
    "shared_with_gate": (
        {"shared_expert_ffn_hidden_size": 20, "shared_expert_gate": True},
        {"add_bias_linear": True},
    ),
    "latent": ({"latent_size": 8}, {}),
    "latent_shared": ({"latent_size": 8, "shared_expert_ffn_hidden_size": 20}, {}),
    "dropped": ({"capacity_factor": 0.5}, {}),
    "dropped_by_position": ({"capacity_factor": 0.5, "drop_policy": "position"}, {}),
    "padded": ({"capacity_factor": 1.0, "pad_to_capacity": True}, {"add_bias_linear": True}),
    "padded_with_room": ({"capacity_factor": 3.0, "pad_to_capacity": True}, {}),
    "latent_padded": ({"capacity_factor": 1.0, "pad_to_capacity": True, "latent_size": 8}, {}),
}


@pytest.mark.parametrize("name", LAYERS)
def test_output_and_all_gradients(name: str) -> None:
    layer = make(*LAYERS[name][:1], **LAYERS[name][1])
    plain = copy.deepcopy(layer)
    hidden, same = inputs().requires_grad_(), inputs().requires_grad_()
    weight = torch.randn(S, B, H)
    out, want = layer(hidden), by_loops(plain, same)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    (out * weight).sum().backward()
    (want * weight).sum().backward()
    torch.testing.assert_close(hidden.grad, same.grad, rtol=1e-4, atol=1e-5)
    for (key, got), expected in zip(layer.named_parameters(), plain.parameters(), strict=True):
        assert got.grad is not None
        reference = torch.zeros_like(expected) if expected.grad is None else expected.grad
        torch.testing.assert_close(got.grad, reference, rtol=1e-4, atol=1e-5, msg=key)


def test_names_and_shapes() -> None:
    layer = make(
        {
            "shared_expert_ffn_hidden_size": 20,
            "shared_expert_gate": True,
            "router_bias": True,
            "router_score_function": "sigmoid",
            "expert_bias": True,
            "load_balancing": "none",
        }
    )
    assert {name: tuple(t.shape) for name, t in layer.state_dict().items()} == {
        "router.weight": (E, H),
        "router.bias": (E,),
        "router.expert_bias": (E,),
        "experts.linear_fc1.weight": (E, 2, F_, H),
        "experts.linear_fc2.weight": (E, H, F_),
        "shared_experts.linear_fc1.weight": (2, 20, H),
        "shared_experts.linear_fc2.weight": (H, 20),
        "shared_expert_gate.weight": (1, H),
    }


def test_idle_experts_have_gradients_of_zero() -> None:
    layer = make({"router_bias": True}, add_bias_linear=True)
    assert layer.router.bias is not None
    with torch.no_grad():
        layer.router.bias[:2] = 50.0  # all tokens go to the first two
    layer(inputs()).sum().backward()
    for linear in (layer.experts.linear_fc1, layer.experts.linear_fc2):
        for parameter in (linear.weight, linear.bias):
            assert parameter is not None
            assert parameter.grad is not None
            assert parameter.grad[:2].abs().max() > 0
            assert parameter.grad[2:].abs().max() == 0


def test_a_rank_without_rows_has_gradients_of_zero() -> None:
    experts = make(add_bias_linear=True).experts
    rows = torch.zeros(0, H, requires_grad=True)
    out = experts(rows, torch.zeros(E, dtype=torch.int64), torch.zeros(0))
    assert out.shape == (0, H)
    out.sum().backward()
    for parameter in experts.parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().max() == 0


def test_rows_behind_the_last_expert_change_nothing() -> None:
    layer = make(add_bias_linear=True)
    counts = torch.tensor([3, 0, 2, 0, 0, 1])
    rows, probs = torch.randn(6, H), torch.rand(6)

    def run(experts: GroupedExperts, junk: float) -> tuple[Tensor, list[Tensor | None]]:
        experts.zero_grad()
        more = torch.full((4, H), junk)
        out = experts(torch.cat([rows, more]), counts, torch.cat([probs, more[:, 0]]))
        out[:6].sum().backward()
        return out[:6].detach(), [p.grad for p in experts.parameters()]

    (clean, grads), (dirty, others) = (
        run(layer.experts, 0.0),
        run(copy.deepcopy(layer.experts), 1e30),
    )
    assert torch.equal(clean, dirty)
    assert all(torch.equal(a, b) for a, b in zip(grads, others, strict=True))  # type: ignore[arg-type]


def routing_of(tokens: int, *, dropped: bool, capacity: int | None) -> Routing:
    experts = torch.stack([torch.randperm(E)[:K] for _ in range(tokens)])
    mask = None
    if dropped or capacity is not None:
        mask = torch.zeros(tokens, K, dtype=torch.bool)
        seen = [0] * E
        for t in range(tokens):
            for k in range(K):
                e = int(experts[t, k])
                mask[t, k] = seen[e] >= (capacity or 3)
                seen[e] += 1
    probs = torch.rand(tokens, K).requires_grad_()
    return Routing(probs=probs, experts=experts, dropped=mask, capacity=capacity)


@pytest.mark.parametrize(
    ("dropped", "capacity"), [(False, None), (True, None), (True, 3), (True, 40)]
)
def test_permutation_there_and_back(dropped: bool, capacity: int | None) -> None:
    torch.manual_seed(2)
    routing = routing_of(20, dropped=dropped, capacity=capacity)
    hidden = torch.randn(20, H, requires_grad=True)
    order = sort_by_expert(routing, E)
    rows, probs = permute(hidden, order), permute_probs(routing.probs, order)
    want_rows, want_probs, counts = [], [], []
    for e in range(E):
        found = [
            (t, k)
            for t in range(20)
            for k in range(K)
            if routing.experts[t, k] == e
            and not (routing.dropped is not None and routing.dropped[t, k])
        ]
        want_rows += [hidden[t] for t, _ in found]
        want_probs += [routing.probs[t, k] for t, k in found]
        if capacity is not None:
            missing = capacity - len(found)
            want_rows += [torch.zeros(H)] * missing
            want_probs += [torch.zeros(())] * missing
        counts.append(len(found) if capacity is None else capacity)
    assert order.counts.tolist() == counts
    used = sum(counts)
    assert torch.equal(rows[:used], torch.stack(want_rows))
    assert torch.equal(probs[:used], torch.stack(want_probs))
    back = unpermute(rows * probs.unsqueeze(1), order)
    kept = torch.ones(20, K) if routing.dropped is None else (~routing.dropped).float()
    want = hidden * (routing.probs * kept).sum(1, keepdim=True)
    torch.testing.assert_close(back, want)
    weight = torch.randn(20, H)
    got = torch.autograd.grad((back * weight).sum(), (hidden, routing.probs), retain_graph=True)
    expected = torch.autograd.grad((want * weight).sum(), (hidden, routing.probs))
    torch.testing.assert_close(got, expected)


def test_dense_and_expert_layers_alternate() -> None:
    moe = MoEConfig(num_experts=4, first_dense_layers=1, layer_pattern="ED")
    config = GPTConfig(vocab_size=10, num_layers=5, hidden_size=H, num_attention_heads=2, moe=moe)
    assert [config.is_moe_layer(i) for i in range(5)] == [False, False, True, False, True]
    assert config.num_moe_layers == 2


class Sums:
    """Main gradients by name, as the gradient buckets keep them."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def add_product(self, name: str, grad: Tensor, x: Tensor) -> None:
        self.add(name, grad.flatten(0, -2).t() @ x.flatten(0, -2))

    def add(self, name: str, grad: Tensor) -> None:
        self.sums[name] = grad

    def arrived(self, name: str) -> None:
        assert name in self.sums


@pytest.mark.parametrize("name", ["gated", "gated_with_bias", "shared", "dropped", "padded"])
def test_weight_gradients_put_off(name: str) -> None:
    """What a split backward computes later is what it would have computed at once."""
    layer = make(*LAYERS[name][:1], **LAYERS[name][1])
    plain = copy.deepcopy(layer)
    hidden, same = inputs().requires_grad_(), inputs().requires_grad_()
    plain(same).square().sum().backward()
    gradients = WeightGradients()
    gradients.target = Sums()
    names = {id(p): key for key, p in layer.named_parameters()}
    apply_weight_sinks(layer, gradients, names)
    with gradients.collect((0, 0)):
        layer(hidden).square().sum().backward()
    put_off = gradients.names((0, 0))
    assert {"experts.linear_fc1.weight", "experts.linear_fc2.weight"} <= put_off
    gradients.compute((0, 0))
    torch.testing.assert_close(hidden.grad, same.grad)
    for key, parameter in plain.named_parameters():
        got = layer.get_parameter(key).grad
        assert (got is None) == (key in put_off), key
        if got is None:
            got = gradients.target.sums[key].view_as(parameter)
        torch.testing.assert_close(got, parameter.grad, msg=key)


def test_sizes_that_follow_from_the_number_of_tokens() -> None:
    padded = {"capacity_factor": 1.0, "pad_to_capacity": True}
    assert make(padded).is_static
    assert not make().is_static  # the CPU computes expert by expert, by their numbers of rows
    assert not make({"capacity_factor": 1.0}).is_static
    ranks: Any = None
    for kind, static in ((AllToAllDispatcher, True), (AllGatherDispatcher, False)):
        layer = make(padded)
        layer.dispatcher = kind(E, ranks)
        assert layer.is_static is static
    layer = make(padded)
    layer.dispatcher = SharedTokensDispatcher(layer.dispatcher, MeshAxis(name="tp"))
    assert not layer.is_static
