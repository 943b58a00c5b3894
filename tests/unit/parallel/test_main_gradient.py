"""Weight gradients that layers add to the main gradients themselves, against autograd's."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn

from megatron_lightning.layers.embedding import VocabularyEmbedding, lookup
from megatron_lightning.layers.linear import Linear
from megatron_lightning.layers.torch_backend import TorchBackend
from megatron_lightning.models.gpt_network import GPTNetwork
from megatron_lightning.parallel import main_gradient
from megatron_lightning.parallel.data import GradientBuckets
from megatron_lightning.parallel.random import Normal
from tests.layout_runs import tiny_config
from tests.unit.parallel.test_data_buckets import buckets_of

MERGING = "aot_eager_decomp_partition"
"""A compiler that merges equal operations and leaves out unused ones, without making code."""
PLAIN: dict[str, Any] = {}
TIED: dict[str, Any] = dict(
    tie_word_embeddings=True,
    norm="layernorm",
    activation="gelu",
    gated_linear_unit=False,
    add_bias_linear=True,
)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def network_of(dtype: torch.dtype, changes: dict[str, Any], layers: int = 2) -> GPTNetwork:
    torch.manual_seed(0)
    config = tiny_config(num_layers=layers, **changes)
    network = GPTNetwork(config, TorchBackend(attention="reference"), device="cpu")
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.05)
    return network.to(dtype)


def batches(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 257, (2, 9), generator=generator) for _ in range(count)]


def served(network: nn.Module, **options: Any) -> GradientBuckets:
    buckets = buckets_of(network, **options)
    buckets.serve(m for m in network.modules() if hasattr(m, "sums_weight_gradient"))
    return buckets


def sums(network: GPTNetwork, buckets: GradientBuckets) -> dict[str, Tensor]:
    buckets.reset()
    for tokens in batches():
        network(tokens[:, :-1], None, tokens[:, 1:]).sum().backward()
    buckets.finish(1.0)
    return {name: grad.clone() for name, grad in buckets.gradients().items()}


@pytest.mark.parametrize("changes", [PLAIN, TIED], ids=["plain", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_those_of_autograd(dtype: torch.dtype, changes: dict[str, Any]) -> None:
    network = network_of(dtype, changes)
    network.decoder.layers["0"].mlp.linear_fc1.weight.requires_grad_(False)
    wanted = sums(network, buckets := buckets_of(network))
    buckets.release()
    found = sums(network, buckets := served(network))
    assert network.decoder.layers["1"].mlp.linear_fc1.sums_weight_gradient
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        if changes is TIED and name.endswith("word_embeddings.weight"):
            # head and look-up are added in float32, not in bfloat16 first
            torch.testing.assert_close(found[name], want, rtol=2e-2, atol=2e-2)
        else:
            assert torch.equal(found[name], want), name
    buckets.release()
    assert not network.decoder.layers["1"].mlp.linear_fc1.sums_weight_gradient


def test_compiled_layers_are_one_graph_that_all_share() -> None:
    network = network_of(torch.bfloat16, PLAIN, layers=3)
    wanted = sums(network, buckets := served(network))
    counter = torch._dynamo.testing.CompileCounterWithBackend(MERGING)
    for layer in network.decoder.layers.values():
        layer.compile(backend=counter, fullgraph=True)
    found = sums(network, buckets)
    assert counter.frame_count == 1
    for name, want in wanted.items():
        torch.testing.assert_close(found[name], want, rtol=2e-2, atol=2e-2)
    again = sums(network, buckets)
    assert counter.frame_count == 1
    assert all(torch.equal(again[name], found[name]) for name in found)


def test_compiled_layers_may_leave_the_mlps_product_to_the_backward_pass() -> None:
    network = network_of(torch.bfloat16, PLAIN)
    wanted = sums(network, buckets := served(network))
    for layer in network.decoder.layers.values():
        layer.mlp.activation.recomputed = True
    found = sums(network, buckets)
    assert all(torch.equal(found[name], want) for name, want in wanted.items())
    counter = torch._dynamo.testing.CompileCounterWithBackend(MERGING)
    for layer in network.decoder.layers.values():
        layer.compile(backend=counter, fullgraph=True)
    compiled = sums(network, buckets)
    assert counter.frame_count == 1
    for name, want in wanted.items():
        torch.testing.assert_close(compiled[name], want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [None, 2])
def test_tables_get_the_rows_that_were_looked_up(offset: int | None, dtype: torch.dtype) -> None:
    """In a window of two micro-batches, bit for bit what autograd gives; once it isn't told of."""
    table = VocabularyEmbedding(9, 4, initial=Normal(1.0))
    nn.init.normal_(table.weight)
    table.to(dtype).vocabulary_offset = offset
    tokens = [torch.tensor([[3, 3, 7], [8, 3, 0]]), torch.tensor([[0, 7, 7], [7, 5, 4]])]
    grads = [torch.randn(3, 2, 4).to(dtype) for _ in tokens]
    results = []
    for own in (False, True):
        buckets = served(table) if own else buckets_of(table)
        for _ in range(2):  # what the first window left is overwritten
            buckets.reset()
            for ids, grad in zip(tokens, grads, strict=True):
                table(ids).backward(grad)
            assert table.sums_weight_gradient is own
            buckets.finish(1.0)
        results.append(next(iter(buckets.gradients().values())).clone())
        buckets.release()
    assert torch.equal(*results)
    assert results[0].any()


@pytest.mark.parametrize("count", [0, 9, 10])
def test_rows_are_added_by_themselves_where_that_is_less_than_the_table(count: int) -> None:
    weight = torch.zeros(9, 4, requires_grad=True)
    rows = lookup(torch.zeros(count, dtype=torch.int64), weight, None, sums=True)
    assert rows.grad_fn is not None
    assert ("SummedRows" in rows.grad_fn.name()) is (count == 9)


class Twice(nn.Module):
    """One layer called twice on the same input: equal calls with equal results."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = Linear(6, 5, bias=False, initial=Normal(1.0))
        nn.init.normal_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.linear(x)


@pytest.mark.parametrize("compiled", [False, True])
def test_equal_calls_both_count(compiled: bool) -> None:
    module = Twice()
    served(module).reset()
    if compiled:
        module.compile(backend=MERGING, fullgraph=True)
    x = torch.randn(3, 6, requires_grad=True)
    module(x).sum().backward()
    gradient = main_gradient.main_gradient_of(module.linear.weight)
    expected = 2 * x.detach().sum(0).expand(5, 6)
    torch.testing.assert_close(gradient.main_grad, expected)


def test_bucket_starts_within_the_backward_pass() -> None:
    network = network_of(torch.float32, TIED)
    buckets = served(network, bucket_size=1)
    buckets.reset()
    buckets.arm()
    tokens = batches(1)[0]
    network(tokens[:, :-1], None, tokens[:, 1:]).sum().backward()
    assert buckets.num_launched == len(buckets.buckets)
    with pytest.raises(RuntimeError, match="after its bucket was reduced"):
        network(tokens[:, :-1], None, tokens[:, 1:]).sum().backward()


def test_hook_on_a_weight_sees_its_gradient() -> None:
    module = Twice()
    seen: list[Tensor] = []
    module.linear.weight.register_hook(lambda grad: seen.append(grad))
    buckets = served(module)
    buckets.reset()
    module(torch.ones(3, 6)).sum().backward()
    assert len(seen) == 1
    assert torch.equal(buckets.main_grad("linear.weight"), seen[0])


def test_input_without_gradient() -> None:
    module = Twice()
    buckets = served(module)
    for compiled in (False, True):
        if compiled:
            module.compile(backend=MERGING, fullgraph=True)
        buckets.reset()
        module(torch.ones(3, 6)).sum().backward()
        assert torch.equal(buckets.main_grad("linear.weight"), torch.full((5, 6), 6.0))


def test_gradient_outside_of_training_is_refused() -> None:
    module = Twice()
    buckets = served(module)
    buckets.reset()
    module.linear.weight.data = module.linear.weight.data.clone()
    with pytest.raises(RuntimeError, match="fuse_weight_gradients=False"):
        module(torch.ones(3, 6, requires_grad=True)).sum().backward()
    buckets.reset()  # the next window knows the new address
    module(torch.ones(3, 6)).sum().backward()
    assert buckets.main_grad("linear.weight").sum() == 180
