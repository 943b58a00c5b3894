"""The same on GPUs: initial values bitwise as on the CPU, NCCL collectives, dropout streams."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from megatron_lightning.layers.dropout import Dropout, apply_random
from megatron_lightning.layers.loss import CrossEntropy
from megatron_lightning.parallel.collectives import gather_dim, reduce_scatter_dim
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.random import Normal, Uniform
from megatron_lightning.parallel.streams import Layout
from tests.distributed.test_tensor_network import build, reduced_gradients, whole
from tests.harness import run_ranks

pytestmark = pytest.mark.gpu
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
nccl = partial(run_ranks, backend="nccl")


def _draws(rank: int, size: int) -> None:
    for initial in (Normal(0.02), Uniform(-1.0, 1.0)):
        box = {"seed": 3, "name": "w", "global_shape": (3000, 4099)}
        box |= {"offsets": (7, 2), "sizes": (2900, 4001)}
        host, device = initial.draw(**box), initial.draw(**box, device="cuda")
        assert torch.equal(host, device.cpu())


def test_initial_values_are_bitwise_those_of_the_cpu() -> None:
    nccl(_draws, 1)


def _masks(rank: int, size: int) -> None:
    networks = {}
    for device in ("cpu", "cuda"):
        networks[device] = torch.nn.ModuleDict({"a": Dropout(0.3), "b": Dropout(0.3, Layout.HEADS)})
        mesh = ParallelMesh.single(device)
        apply_random(networks[device], mesh, seed=1, exact=True).begin(1, 2, 30)
    x = torch.ones(16, 3, 64)
    assert torch.equal(networks["cuda"]["a"](x.cuda()).cpu(), networks["cpu"]["a"](x))

    streams = apply_random(networks["cuda"], ParallelMesh.single("cuda"), seed=1)
    query = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16)

    def attend() -> torch.Tensor:
        with networks["cuda"]["b"].fused(query.device) as p:
            return F.scaled_dot_product_attention(query, query, query, dropout_p=p, is_causal=True)

    streams.begin(0, 0, 0)
    before = torch.cuda.get_rng_state()
    first, second = attend(), attend()
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert not torch.equal(first, second)
    streams.begin(0, 0, 0)
    assert torch.equal(attend(), first)


def test_dropout_masks_and_streams() -> None:
    nccl(_masks, 1)


def _loss(rank: int, size: int) -> None:
    logits = torch.randn(64, 2, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(1000, (2, 64), device="cuda")
    got = CrossEntropy(1000)(logits, labels)
    want = F.cross_entropy(logits[..., :1000].float().permute(1, 2, 0), labels, reduction="none")
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_loss_of_bfloat16_logits() -> None:
    nccl(_loss, 1)


def _step(rank: int, size: int, sequence_parallel: bool, dtype: torch.dtype, limit: float) -> None:
    """Losses and gradients of two ranks against one GPU; in bfloat16 both against float32."""
    axis = ParallelMesh.build(device=torch.device("cuda", rank), tensor=size).tp
    options = {"dtype": dtype, "device": "cuda"}
    single = ParallelMesh.single().tp
    one, _ = build(single, **options)
    network, table = build(axis, sequence_parallel=sequence_parallel, **options)
    exact, _ = build(
        single, dtype=max(dtype, torch.float32, key=lambda d: d.itemsize), device="cuda"
    )
    with torch.no_grad():
        for parameter, rounded in zip(exact.parameters(), one.parameters(), strict=True):
            parameter.copy_(rounded)
    tokens = torch.randint(257, (3, 9), generator=torch.Generator().manual_seed(3)).cuda()
    losses = [net(tokens[:, :-1], tokens[:, 1:]) for net in (one, network, exact)]
    for loss in losses:
        loss.sum().backward()
    assert (losses[2] - losses[1]).norm() / losses[2].norm() < limit
    gradients = reduced_gradients(network, table, axis)
    for (name, parameter), reference in zip(
        one.named_parameters(), exact.parameters(), strict=True
    ):
        want = whole(reference.grad, table[name], single).double()
        alone = (whole(parameter.grad, table[name], single) - want).norm() / want.norm()
        error = (whole(gradients[name], table[name], axis) - want).norm() / want.norm()
        assert error < limit + 2 * alone, (name, error, alone)


@needs_two
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)]
)
def test_network_equals_one_gpu(sequence_parallel: bool, dtype: torch.dtype, limit: float) -> None:
    nccl(_step, 2, sequence_parallel, dtype, limit)


def _collectives(rank: int, size: int) -> None:
    axis = ParallelMesh.build(device=torch.device("cuda", rank), tensor=size).tp
    for dim in (0, 1, 2):
        x = torch.arange(4 * 6 * 8.0, device="cuda").view(4, 6, 8).requires_grad_()
        y = gather_dim(reduce_scatter_dim(x, axis, dim), axis, dim, backward="split")
        assert torch.equal(y, 2 * x)
        y.sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x))


@needs_two
def test_collectives_along_every_dim() -> None:
    nccl(_collectives, 2)
