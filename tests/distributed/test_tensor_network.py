"""A small network of our layers, split by its plan, against the same network on one process."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lightning.config.plan import (
    Gradient,
    ParallelPlan,
    ParameterInfo,
    column,
    follows,
    replicated,
    row,
    vocabulary,
)
from megatron_lightning.layers.embedding import (
    PositionEmbedding,
    VocabularyEmbedding,
    VocabularyHead,
)
from megatron_lightning.layers.linear import Linear
from megatron_lightning.layers.loss import CrossEntropy
from megatron_lightning.layers.norm import RMSNorm
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.checks import check_replicas, replicated_tensors
from megatron_lightning.parallel.collectives import all_gather, all_reduce_
from megatron_lightning.parallel.materialise import materialise
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.random import Normal
from megatron_lightning.parallel.tensor import apply_tensor_parallel
from tests.harness import run_ranks
from tests.tolerances import TOLERANCES

SEQUENCE = replicated(Gradient.SEQUENCE)
PLAN = ParallelPlan(
    splits={
        "words.weight": vocabulary(),
        "positions.weight": SEQUENCE,
        "layers.*.norm.weight": SEQUENCE,
        "layers.*.gate.weight": replicated(Gradient.PARTIAL),
        "layers.*.fc1.weight": column(1),
        "layers.*.fc1.bias": follows(1),
        "layers.*.fc2.weight": row(),
        "layers.*.fc2.bias": SEQUENCE,
        "norm.weight": SEQUENCE,
        "head.weight": vocabulary(),
    },
    tied=(("words.weight", "head.weight"),),
)


class Layer(nn.Module):
    """Gated MLP with biases, and a norm shared by blocks of 4 split features (as query norms)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(16, 1e-5, device="meta")
        initial = Normal(0.2)
        self.fc1 = Linear(16, (2, 32), bias=True, initial=initial, device="meta")
        self.gate = RMSNorm(4, 1e-5, device="meta")
        self.fc2 = Linear(32, 16, bias=True, initial=initial, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fc1(self.norm(x)).unbind(-2)
        inner = self.gate((F.silu(gate) * up).unflatten(-1, (-1, 4))).flatten(-2)
        return x + self.fc2(inner)


class Network(nn.Module):
    def __init__(self, vocab_size: int, tied: bool, smoothing: float, pad_multiple: int) -> None:
        super().__init__()
        initial = Normal(0.5)
        self.words = VocabularyEmbedding(
            vocab_size, 16, initial=initial, pad_multiple=pad_multiple, device="meta"
        )
        self.positions = PositionEmbedding(8, 16, initial=initial, device="meta")
        self.layers = nn.ModuleDict({"0": Layer(), "1": Layer()})
        self.norm = RMSNorm(16, 1e-5, device="meta")
        self.head = VocabularyHead(
            16, vocab_size, initial=initial, pad_multiple=pad_multiple, device="meta"
        )
        if tied:
            self.head.weight = self.words.weight
        self.loss = CrossEntropy(vocab_size, label_smoothing=smoothing)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device)[None]
        )
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.logits(tokens), labels)


def build(
    axis: MeshAxis,
    *,
    sequence_parallel: bool = False,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    **options: Any,
) -> tuple[Network, dict[str, ParameterInfo]]:
    settings = {"vocab_size": 257, "smoothing": 0.0, "pad_multiple": 8} | options
    network = Network(tied=tied, **settings)
    plan = PLAN if tied else ParallelPlan(splits=PLAN.splits)
    table = apply_tensor_parallel(network, plan, axis, sequence_parallel=sequence_parallel)
    materialise(network, table, seed=7, device=device, dtype=dtype)
    return network, table


def batch(vocab_size: int = 257) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(vocab_size, (3, 9), generator=generator)
    weights = torch.rand(3, 8, generator=generator)
    return tokens[:, :-1], tokens[:, 1:], weights


def reduced_gradients(
    network: nn.Module, table: dict[str, ParameterInfo], axis: MeshAxis
) -> dict[str, Tensor]:
    """What the gradient buckets do over the tensor axis."""
    gradients = {}
    for name, parameter in network.named_parameters():
        gradients[name] = parameter.grad
        if table[name].split.gradient is not Gradient.WHOLE:
            all_reduce_(parameter.grad, axis)
    return gradients


def whole(local: Tensor, info: ParameterInfo, axis: MeshAxis) -> Tensor:
    """All ranks' parts joined, without padding."""
    if info.split.dim is None or axis.size == 1:
        return local.narrow(0, 0, info.global_shape[0])
    joined = all_gather(local, axis, info.split.dim)
    return joined.narrow(info.split.dim, 0, info.global_shape[info.split.dim])


# Relative: the order of sums differs, and nothing else. float64 shows that it is only that.
LIMITS = {
    torch.float32: (TOLERANCES[torch.float32].loss, TOLERANCES[torch.float32].first_gradient),
    torch.float64: (1e-13, 1e-13),
}


def _train_step(rank: int, size: int, options: dict[str, Any]) -> None:
    loss_limit, gradient_limit = LIMITS[options.get("dtype", torch.float32)]
    one, one_table = build(ParallelMesh.single().tp, **options | {"sequence_parallel": False})
    axis = ParallelMesh.build(device=torch.device("cpu"), tensor=size).tp
    network, table = build(axis, **options)
    assert table.keys() == one_table.keys()
    tokens, labels, weights = batch()
    want, got = one(tokens, labels), network(tokens, labels)
    assert ((got - want).norm() / want.norm()).item() <= loss_limit
    for losses in (want, got):
        (losses * weights).sum().backward()
    gradients = reduced_gradients(network, table, axis)
    check_replicas(replicated_tensors(gradients, table), axis, what="gradient of")
    for name, parameter in one.named_parameters():
        info = table[name]
        held = dict(network.named_parameters())[name]
        reference = whole(parameter.detach(), info, ParallelMesh.single().tp)
        assert torch.equal(whole(held.detach(), info, axis), reference), name
        expected = whole(parameter.grad, info, ParallelMesh.single().tp)
        error = (whole(gradients[name], info, axis) - expected).norm() / expected.norm()
        assert error.item() <= gradient_limit, (name, error)
        padding = held.grad[info.sizes[0] :] if name in ("words.weight", "head.weight") else None
        assert padding is None or not padding.any(), name


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", LIMITS)
def test_losses_and_every_gradient_equal_one_process(
    size: int, sequence_parallel: bool, tied: bool, smoothing: float, dtype: torch.dtype
) -> None:
    options = {"tied": tied, "smoothing": smoothing, "dtype": dtype}
    run_ranks(_train_step, size, options | {"sequence_parallel": sequence_parallel})


def _first_loss(rank: int, size: int) -> tuple[float, list[int], list[int], float]:
    axis = ParallelMesh.build(device=torch.device("cpu"), tensor=size).tp
    network, table = build(axis, vocab_size=50257, pad_multiple=128)
    network.head.weight.data.zero_()
    tokens, labels, _ = batch(50257)
    losses = network(tokens, labels)
    losses.mean().backward()
    held = table["head.weight"].sizes[0]
    whole_logits = network.head.whole(network.logits(tokens))
    return (
        losses.mean().item(),
        list(network.head.weight.shape),
        list(whole_logits.shape),
        network.head.weight.grad[held:].abs().sum().item(),
    )


def test_padded_vocabulary_is_not_in_the_softmax() -> None:
    """Case C01: ln 50257, where ln 50432 would mean that padding takes part."""
    for loss, shape, logits, padded_gradient in run_ranks(_first_loss, 2):
        assert loss == pytest.approx(math.log(50257), abs=2e-6)
        assert shape == [25216, 16]
        assert 2 * shape[0] == 50432
        assert logits == [8, 3, 50257]
        assert padded_gradient == 0.0


def _small_vocabulary(rank: int, size: int) -> list[tuple[int, ...]]:
    """257 tokens padded to 512: the last rank holds padding only."""
    options = {"sequence_parallel": True, "pad_multiple": 128}
    _train_step(rank, size, options)
    axis = ParallelMesh.build(device=torch.device("cpu"), tensor=size).tp
    info = build(axis, **options)[1]["words.weight"]
    return [info.offsets, info.sizes, info.global_shape]


def test_a_rank_may_hold_nothing_but_padding() -> None:
    boxes = run_ranks(_small_vocabulary, 4)
    assert [offsets[0] for offsets, _, _ in boxes] == [0, 128, 256, 257]
    assert [sizes[0] for _, sizes, _ in boxes] == [128, 128, 1, 0]
    assert {shape for _, _, shape in boxes} == {(257, 16)}


def _cut_real(rank: int, size: int) -> None:
    """A network that is real already keeps its values, bitwise."""
    one, _ = build(ParallelMesh.single().tp, pad_multiple=1)
    values = {name: p.detach().clone() for name, p in one.named_parameters()}
    axis = ParallelMesh.build(device=torch.device("cpu"), tensor=size).tp
    plan = ParallelPlan(splits=PLAN.splits)
    for module in (one.words, one.head):
        module.pad_multiple = 8
    table = apply_tensor_parallel(one, plan, axis, prefix="network.")
    for name, parameter in one.named_parameters():
        info = table["network." + name]
        assert info.name == "network." + name
        assert torch.equal(whole(parameter.detach(), info, axis), values[name]), name


def test_real_values_are_cut_bitwise() -> None:
    run_ranks(_cut_real, 2)


def _differ(rank: int, size: int) -> None:
    axis = ParallelMesh.build(device=torch.device("cpu"), tensor=size).tp
    tensors = {"a": torch.ones(5), "b": torch.arange(4.0), "c": torch.ones(3)}
    check_replicas(tensors, axis)
    if rank == 2:
        tensors["b"][3] += 1e-6
        tensors["c"][0] = 0.0
    check_replicas(tensors, axis)


def test_replicas_that_differ_are_named_with_their_ranks() -> None:
    message = r"parameter b differs over the tp axis: ranks \[2\] .* than ranks \[0, 1, 3\]; 2 of 3"
    with pytest.raises(Exception, match=message):
        run_ranks(_differ, 4)
