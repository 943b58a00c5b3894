"""A user's own batch-first network of torch's layers, split by a plan."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lightning.config.plan import (
    Gradient,
    ParallelPlan,
    ParameterInfo,
    Split,
    column,
    follows,
    replicated,
    row,
    vocabulary,
)
from megatron_lightning.layers.loss import CrossEntropy
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.materialise import materialise
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.tensor import apply_tensor_parallel
from tests.distributed.test_tensor_network import reduced_gradients, whole
from tests.harness import run_ranks

SEQUENCE = replicated(Gradient.SEQUENCE)


class Network(nn.Module):
    """(B, S) -> (B, S, V). `reader` is split by rows though its input, the hidden state, is not."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(51, 16, padding_idx=3)
        self.positions = nn.Embedding(9, 16)
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 24)
        self.down = nn.Linear(24, 16)
        self.reader = nn.Linear(16, 16, bias=False)
        self.head = nn.Linear(16, 52)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.positions(torch.arange(tokens.shape[1]))
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.head(x + self.reader(x))


SPLITS = {
    "words.weight": vocabulary(),
    "positions.weight": SEQUENCE,
    "norm.*": SEQUENCE,
    "up.weight": column(),
    "up.bias": follows(),
    "down.weight": row(),
    "down.bias": SEQUENCE,
    "reader.weight": row(),
    "head.weight": column(gather_output=True),
    "head.bias": follows(),
}


def _step(network: nn.Module, tokens: Tensor) -> Tensor:
    logits = network(tokens)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(4)).to(logits)
    (logits.tanh() * weights).sum().backward()
    return logits.detach()


def _pair(
    size: int, splits: dict[str, Split], sequence_parallel: bool, meta: bool = False
) -> tuple[nn.Module, nn.Module, dict[str, ParameterInfo], MeshAxis]:
    """The network on one process and split, in float64, with the table and axis of the latter."""
    plan = ParallelPlan(splits=splits, sequence_dim=1)
    axis = ParallelMesh.build(device=torch.device("cpu"), tensor=size).tp
    with torch.device("meta" if meta else "cpu"):
        one, network = Network(), Network()
    if not meta:
        network.load_state_dict(one.state_dict())
    one_table = apply_tensor_parallel(one, plan, ParallelMesh.single().tp)
    table = apply_tensor_parallel(network, plan, axis, sequence_parallel=sequence_parallel)
    for built, rows in ((one, one_table), (network, table)):
        materialise(built, rows, seed=5, device="cpu", dtype=torch.float64)
    return one, network, table, axis


def _tokens() -> Tensor:
    tokens = torch.randint(51, (2, 8), generator=torch.Generator().manual_seed(2))
    tokens[0, 0] = tokens[1, 4] = 3  # padding_idx: no gradient
    return tokens


def _compare(rank: int, size: int, sequence_parallel: bool, meta: bool) -> None:
    one, network, table, axis = _pair(size, SPLITS, sequence_parallel, meta)
    got, want = _step(network, _tokens()), _step(one, _tokens())
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert want.std() > 0.1
    gradients = reduced_gradients(network, table, axis)
    for name, parameter in one.named_parameters():
        got = whole(gradients[name], table[name], axis)
        error = (got - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-12, (name, error)
    assert isinstance(network.up, nn.Linear)
    assert network.up.out_features == network.down.in_features == 24 // size


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_outputs_and_gradients_equal_one_process(
    size: int, sequence_parallel: bool, meta: bool
) -> None:
    run_ranks(_compare, size, sequence_parallel, meta)


def _split_logits(rank: int, size: int, sequence_parallel: bool) -> None:
    """A head split by vocabulary(), with a bias."""
    splits = SPLITS | {"head.weight": vocabulary()}
    one, network, _, _ = _pair(size, splits, sequence_parallel)
    loss, tokens = CrossEntropy(52), _tokens()
    loss_split = CrossEntropy(52)
    loss_split.axis = ParallelMesh.build(device=torch.device("cpu"), tensor=size).tp
    want = loss(one(tokens).transpose(0, 1), tokens)
    got = loss_split(network(tokens).transpose(0, 1), tokens)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("size", "sequence_parallel"), [(2, False), (4, True)])
def test_logits_of_a_plain_head_may_stay_split(size: int, sequence_parallel: bool) -> None:
    run_ranks(_split_logits, size, sequence_parallel)
