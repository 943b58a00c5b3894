"""Dropout on one process: default generator, streams, exact masks, fused kernels, recompute."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_lightning.layers.dropout import Dropout, apply_random
from megatron_lightning.parallel.exact_dropout import ExactDropout
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.sequence import HeldTokens
from megatron_lightning.parallel.streams import DropoutStreams, Layout, Streams


class Network(nn.Module):
    def __init__(self, p: float = 0.25) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): Dropout(p) for i in range(3)})
        self.heads = Dropout(p, Layout.HEADS)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def _streams(network: nn.Module, exact: bool = False, seed: int = 5) -> Streams:
    return apply_random(network, ParallelMesh.single(), seed=seed, exact=exact)


def test_without_a_source_it_is_torchs_dropout() -> None:
    x = torch.randn(50, 4)
    torch.manual_seed(1)
    want = F.dropout(x, 0.25)
    torch.manual_seed(1)
    assert torch.equal(Dropout(0.25)(x), want)


@pytest.mark.parametrize("exact", [False, True])
def test_scale_rate_and_gradient(exact: bool) -> None:
    network = nn.ModuleDict({"drop": Dropout(0.25)})
    _streams(network, exact)
    x = torch.full((100, 10, 30), 3.0, requires_grad=True)
    y = network["drop"](x)
    assert set(y.detach().unique().tolist()) == {0.0, 4.0}
    assert (y == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach() / 3.0)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("p", [0.0, 1.0])
def test_all_and_nothing(exact: bool, p: float) -> None:
    network = nn.ModuleDict({"drop": Dropout(p)})
    _streams(network, exact)
    x = torch.randn(4, 2, 3)
    assert torch.equal(network["drop"](x), x if p == 0.0 else torch.zeros_like(x))
    assert torch.equal(network.eval()["drop"](x), x)


@pytest.mark.parametrize("exact", [False, True])
def test_the_position_in_training_decides_the_masks(exact: bool) -> None:
    network = Network()
    streams = _streams(network, exact)
    x = torch.ones(8, 4, 16)

    def masks(step: int, micro_batch: int, sample: int) -> Tensor:
        streams.begin(step, micro_batch, sample)
        return network(x)

    first = masks(3, 1, 40)
    torch.rand(7)  # other draws change nothing
    assert not torch.equal(masks(3, 2, 44), first)
    assert torch.equal(masks(3, 1, 40), first)
    other = Network()
    _streams(other, exact).begin(3, 1, 40)
    assert torch.equal(other(x), first)  # a new process
    reseeded = Network()
    _streams(reseeded, exact, seed=6).begin(3, 1, 40)
    assert not torch.equal(reseeded(x), first)


def test_exact_masks_follow_the_sample_and_differ_between_sites() -> None:
    network = Network()
    streams = _streams(network, exact=True)
    x = torch.ones(8, 4, 18)
    streams.begin(0, 0, sample_offset=100)
    together = network.layers["1"](x)
    for i in range(4):
        streams.begin(9, 3, sample_offset=100 + i)
        assert torch.equal(network.layers["1"](x[:, :1]), together[:, i : i + 1])
    streams.begin(0, 0, sample_offset=100, sample_stride=2)
    assert torch.equal(network.layers["1"](x[:, :2]), together[:, ::2])
    streams.begin(0, 0, sample_offset=100)
    assert not torch.equal(network.layers["0"](x), together)


def test_exact_masks_of_heads_and_given_sequence_positions() -> None:
    network = Network()
    streams = _streams(network, exact=True)
    probabilities, hidden = torch.ones(2, 3, 8, 8), torch.ones(8, 2, 5)
    streams.begin(0, 0, 0)
    by_head, by_token = network.heads(probabilities), network.layers["0"](hidden)
    positions = torch.tensor([0, 1, 6, 7])
    held = HeldTokens(places=positions.unsqueeze(0), length=8, is_padded=False)
    streams.begin(0, 0, 0, held=held)
    assert torch.equal(network.heads(probabilities[:, :, :4]), by_head[:, :, positions])
    assert torch.equal(network.layers["0"](hidden[:4]), by_token[positions])
    with pytest.raises(ValueError, match="4 sequence positions were given for 8 tokens"):
        network.layers["0"](hidden)


def test_fused_kernels_draw_from_the_stream_and_leave_the_default_alone() -> None:
    network = Network()
    streams = _streams(network)
    query = torch.randn(1, 2, 8, 4)

    def attend() -> Tensor:
        with network.heads.fused(query.device) as p:
            assert p == 0.25
            return F.scaled_dot_product_attention(query, query, query, dropout_p=p)

    streams.begin(0, 0, 0)
    before = torch.get_rng_state()
    first, second = attend(), attend()
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first, second)  # the stream goes on
    streams.begin(0, 0, 0)
    assert torch.equal(attend(), first)
    with network.eval().heads.fused(query.device) as p:
        assert p == 0.0


def test_fused_kernels_are_refused_in_the_exact_mode() -> None:
    network = Network()
    _streams(network, exact=True)
    with (
        pytest.raises(ValueError, match="fused attention kernel"),
        network.heads.fused(torch.device("cpu")),
    ):
        pass


@pytest.mark.parametrize("exact", [False, True])
def test_recomputed_regions_see_their_own_masks(exact: bool) -> None:
    """Also when another micro-batch began in between, as in pipeline schedules."""
    network = Network()
    streams = _streams(network, exact)
    x = torch.randn(8, 4, 16, requires_grad=True)

    def forward(recompute: bool, micro_batch: int) -> Tensor:
        streams.begin(0, micro_batch, 4 * micro_batch)
        y = network.layers["0"](x)
        if not recompute:
            return network(y * y)
        return checkpoint(
            lambda t: network(t * t), y, use_reentrant=False, context_fn=streams.recompute_contexts
        )

    gradients = []
    for recompute in (False, True):
        first, second = forward(recompute, 0), forward(recompute, 1)
        after = first.detach(), second.detach()
        gradients.append((*torch.autograd.grad(first.sum() * 2 + second.sum(), x), *after))
    for got, want in zip(*gradients, strict=True):
        assert torch.equal(got, want)


def test_a_users_functional_dropout_is_restored_too() -> None:
    streams = _streams(Network())
    streams.begin(2, 0, 8)
    first = F.dropout(torch.ones(20))
    streams.begin(2, 0, 8)
    assert torch.equal(F.dropout(torch.ones(20)), first)


def test_further_chunks_share_the_streams() -> None:
    first, second = Network(), Network()
    streams = _streams(first)
    again = apply_random(second, ParallelMesh.single(), seed=5, streams=streams)
    assert again is streams
    assert second.heads.stream is streams
    assert isinstance(streams, DropoutStreams)
    assert second.layers["2"].site == "layers.2"


def test_plain_dropout_is_refused_in_the_exact_mode() -> None:
    with pytest.raises(ValueError, match=r"\['0'\] are torch's own"):
        _streams(nn.Sequential(nn.Dropout(0.1), nn.Dropout(0.0)), exact=True)
    assert isinstance(_streams(nn.Sequential(nn.Dropout(0.0)), exact=True), ExactDropout)


@pytest.mark.parametrize("p", [-0.1, 1.1])
def test_probability_out_of_range(p: float) -> None:
    with pytest.raises(ValueError, match="must be in"):
        Dropout(p)
