"""What families do differently, each against its formula: sinks and capped scores with gradients,
norms by 1 + weight, the clamped gate, scaled embeddings, norms after branches, local rotation.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_lightning.config import (
    AttentionConfig,
    ClampConfig,
    GPTConfig,
    LatentAttentionConfig,
    RotaryConfig,
    StreamConfig,
)
from megatron_lightning.layers import Dropout, FusedAttention, ReferenceAttention, TorchBackend
from megatron_lightning.layers.clamped_gate import clamped_gate
from megatron_lightning.layers.norm import RMSNorm
from megatron_lightning.models import GPTModel
from megatron_lightning.models.gpt_network import GPTNetwork
from megatron_lightning.parallel.context.dense import MathKernel
from megatron_lightning.parallel.sequence import SequenceInfo
from megatron_lightning.parallel.streams import Layout

LENGTH, BATCH, HEADS, SCALE = 24, 2, 4, 0.4
PACKED = SequenceInfo(((10, 14), (3, 21)))
SMALL: dict[str, Any] = dict(
    vocab_size=33, num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2
)


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries, keys, values and sinks."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(LENGTH, BATCH, HEADS, 8), (LENGTH, BATCH, 2, 8), (LENGTH, BATCH, 2, 8), (HEADS,)]
    found = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
    return [x.requires_grad_() for x in found]


def naive(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    *,
    window: int,
    cap: float,
    sequence: SequenceInfo | None,
) -> Tensor:
    """One query at a time, with explicit exponentials."""
    lengths = sequence.lengths if sequence is not None else ((LENGTH,),) * BATCH
    rows = []
    for i in range(LENGTH):
        for b in range(BATCH):
            begin = 0
            for length in lengths[b]:
                begin += length if begin + length <= i else 0
            first = max(begin, i - window + 1) if window else begin
            for n in range(HEADS):
                keys, values = (x[first : i + 1, b, n // 2] for x in (key, value))
                scores = keys @ query[i, b, n] * SCALE
                scores = cap * torch.tanh(scores / cap) if cap else scores
                weights = scores.exp()
                below = weights.sum() + (0 if sinks is None else sinks[n].exp())
                rows.append(weights @ values / below)
    return torch.stack(rows).view(LENGTH, BATCH, -1)


@pytest.mark.parametrize("sequence", [None, PACKED], ids=["whole", "packed"])
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize(("cap", "with_sinks"), [(0.0, True), (1.5, False), (1.5, True)])
@pytest.mark.parametrize("kind", [FusedAttention, ReferenceAttention])
def test_sinks_and_capped_scores(
    kind: Any, cap: float, with_sinks: bool, window: int, sequence: SequenceInfo | None
) -> None:
    dtype = torch.float64 if kind is FusedAttention else torch.float32
    core = kind(scale=SCALE, window_size=window, dropout=Dropout(0.0, Layout.HEADS), score_cap=cap)
    found, wanted = inputs(dtype), inputs()
    got = core(*found[:3], sequence, sinks=found[3] if with_sinks else None)
    sinks = wanted[3] if with_sinks else None
    want = naive(*wanted[:3], sinks, window=window, cap=cap, sequence=sequence)
    weight = torch.linspace(-1, 1, want.numel(), dtype=torch.float64).view_as(want)
    (got * weight.to(dtype)).sum().backward()
    (want * weight).sum().backward()
    limit = 1e-12 if dtype is torch.float64 else 1e-5
    for a, b in [(got, want), *((x.grad, y.grad) for x, y in zip(found, wanted, strict=True))]:
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a.double(), b, rtol=limit, atol=limit)


def test_slices_of_capped_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long sequences are done in slices of queries, each with the keys that it can see."""
    core = FusedAttention(
        scale=SCALE, window_size=5, dropout=Dropout(0.0, Layout.HEADS), score_cap=2.0
    )
    results = []
    for elements in (1 << 25, 3 * BATCH * HEADS * LENGTH):
        monkeypatch.setattr("megatron_lightning.parallel.context.dense._SLICE_ELEMENTS", elements)
        q, k, v, _ = inputs()
        core(q, k, v).square().sum().backward()
        results.append((q.grad, k.grad, v.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_bfloat16_sinks_stay_near_the_exact_result() -> None:
    core = FusedAttention(scale=SCALE, dropout=Dropout(0.0, Layout.HEADS))
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v, sinks = inputs(dtype)
        out = core(q, k, v, sinks=sinks)
        out.float().square().sum().backward()
        assert sinks.grad is not None
        results.append((out.detach().float(), sinks.grad.float()))
    for one, other in zip(*results, strict=True):
        assert float((one - other).norm() / one.norm()) < 2e-2


def test_kernels_are_chosen_by_the_cap() -> None:
    assert MathKernel(2.0) != MathKernel()
    config = GPTConfig(**SMALL, attention=AttentionConfig(scale_dim=64, score_cap=2.0))
    core = TorchBackend().core_attention(config, 0)
    assert (core.scale, core.score_cap) == (0.125, 2.0)


@pytest.mark.parametrize("attention", [AttentionConfig(sinks=True), AttentionConfig(score_cap=1.0)])
def test_dropout_of_probabilities_needs_the_reference(attention: AttentionConfig) -> None:
    config = GPTConfig(**SMALL, attention=attention, attention_dropout=0.1)
    with pytest.raises(ValueError, match=r"attention_dropout=0.1.*attention='reference'"):
        GPTModel(config).built_network()
    GPTModel(config, attention="reference").built_network()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_by_one_plus_weight(dtype: torch.dtype) -> None:
    norm = RMSNorm(64, 1e-6, zero_centered=True)
    torch.manual_seed(0)
    nn.init.normal_(norm.weight, std=0.01)
    norm = norm.to(dtype)
    x = torch.randn(5, 64, dtype=dtype, requires_grad=True)
    y = norm(x)
    y.float().sin().sum().backward()
    exact, weight = (t.detach().double().requires_grad_() for t in (x, norm.weight))
    wanted = exact * (exact.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + weight)
    wanted.sin().sum().backward()
    limit = 1e-6 if dtype is torch.float32 else 8e-3
    pairs = [(y, wanted), (x.grad, exact.grad), (norm.weight.grad, weight.grad)]
    for got, want in pairs:
        assert float((got.double() - want).norm() / want.norm()) < limit
    assert (
        not norm.initials["weight"]
        .draw(seed=0, name="w", global_shape=(4,), offsets=(0,), sizes=(4,))
        .any()
    )


def test_clamped_gate() -> None:
    torch.manual_seed(0)
    inner = (3 * torch.randn(6, 2, 50, dtype=torch.float64)).requires_grad_()
    alpha, limit = 1.7, 2.5

    def formula(x: Tensor) -> Tensor:
        gate, up = x.unbind(-2)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + 1)

    got = clamped_gate(inner, alpha, limit)
    torch.testing.assert_close(got, formula(inner), rtol=0, atol=0)
    (gradient,) = torch.autograd.grad(got.sin().sum(), inner)
    (wanted,) = torch.autograd.grad(formula(inner).sin().sum(), inner)
    torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-12)
    assert (gradient == 0).any()


def test_embedding_is_scaled_in_its_own_dtype() -> None:
    stream = StreamConfig(embedding_scale=55.4256)  # 55.5 in bfloat16
    network = GPTNetwork(GPTConfig(**SMALL, stream=stream)).bfloat16()
    nn.init.normal_(network.embedding.word_embeddings.weight)
    tokens = torch.arange(8).view(1, 8)
    wanted = network.embedding.word_embeddings(tokens) * 55.5
    assert torch.equal(network.embedding(tokens), wanted)


def test_norms_after_branches() -> None:
    """With their weights at 0 and a plain rmsnorm nothing is added to the hidden state."""
    model = GPTModel(GPTConfig(**SMALL, stream=StreamConfig(branch_norm=True)))
    network = model.built_network()
    for name, parameter in network.named_parameters():
        nn.init.normal_(parameter, std=0.1)
        if "post_" in name:
            nn.init.zeros_(parameter)
    hidden = torch.randn(7, 2, 32)
    for layer in network.get_submodule("decoder.layers").values():  # type: ignore[operator]
        assert torch.equal(layer(hidden), hidden)


def test_local_rotation_is_that_of_sliding_layers() -> None:
    sizes = {**SMALL, "num_layers": 3, "window_size": 4, "window_pattern": "SSF"}
    local = RotaryConfig(base=100.0)
    network = GPTNetwork(GPTConfig(**sizes, attention=AttentionConfig(local_rotary=local)))
    bases = [network._rotary_of(layer).rotary.base for layer in range(3)]
    assert bases == [100.0, 100.0, 10000.0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention": AttentionConfig(scale_dim=-1)}, "attention.scale_dim=-1"),
        ({"attention": AttentionConfig(score_cap=-1.0)}, "attention.score_cap=-1.0"),
        ({"attention": AttentionConfig(local_rotary=RotaryConfig())}, "no layer slides"),
        (
            {
                "window_size": 4,
                "attention": AttentionConfig(local_rotary=RotaryConfig(base=0.5)),
            },
            "attention.local_rotary.base=0.5",
        ),
        (
            {
                "window_size": 4,
                "attention": AttentionConfig(local_rotary=RotaryConfig(percent=0.5)),
            },
            "must equal rotary.percent=1.0",
        ),
        (
            {
                "position_embedding": "none",
                "attention": AttentionConfig(local_rotary=RotaryConfig()),
            },
            "position_embedding='none'",
        ),
        ({"stream": StreamConfig(embedding_scale=0.0)}, "stream.embedding_scale=0.0"),
        ({"stream": StreamConfig(logit_cap=-2.0)}, "stream.logit_cap=-2.0"),
        (
            {"norm": "layernorm", "stream": StreamConfig(zero_centered_norm=True)},
            "use 'rmsnorm'",
        ),
        ({"clamp": ClampConfig(), "activation": "gelu"}, "clamp=None"),
        (
            {
                "num_query_groups": 4,
                "latent_attention": LatentAttentionConfig(kv_lora_rank=8),
                "attention": AttentionConfig(sinks=True),
            },
            "attention.sinks=True with latent_attention",
        ),
        ({"clamp": ClampConfig(limit=0.0)}, "clamp.limit=0.0"),
        ({"clamp": ClampConfig(alpha=-1.0)}, "clamp.alpha=-1.0"),
    ],
)
def test_rules(changes: dict[str, Any], words: str) -> None:
    (problem,) = GPTConfig(**{**SMALL, **changes}).check()
    assert words in problem


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": AttentionConfig(sinks=True)},
        {"stream": StreamConfig(branch_norm=True)},
        {"stream": StreamConfig(branch_norm=True), "norm": "layernorm"},
    ],
)
def test_counts(changes: dict[str, Any]) -> None:
    model = GPTModel(GPTConfig(**SMALL, **changes))
    held = sum(math.prod(shape) for shape in model.global_shapes().values())
    assert model.config.num_parameters() == held
    back = GPTConfig.from_dict(model.config.to_dict())
    assert back == model.config
