"""Recompute and offload on a GPU: bitwise with deterministic kernels, and less memory."""

import functools
import os
from typing import Any

import pytest
import torch

from megatron_lightning.config import ParallelPlan, RecomputeConfig
from megatron_lightning.models.gpt_network import GPTNetwork
from megatron_lightning.runtime.recompute import apply_recompute
from tests.harness import run_ranks, run_ranks_fresh
from tests.layout_runs import Run, tiny_config, train

pytestmark = pytest.mark.gpu

FORMS: dict[str, RecomputeConfig] = {
    "full": RecomputeConfig(mode="full"),
    "groups": RecomputeConfig(mode="full", num_layers=3),
    "core_attention": RecomputeConfig(mode="selective"),
    "mlp_and_norms": RecomputeConfig(mode="selective", modules=["mlp", "*_layernorm"]),
    "offload": RecomputeConfig(offload=True, offload_min_bytes=0),
    "full_offload": RecomputeConfig(mode="full", offload=True, offload_min_bytes=0),
}


def deterministic(rank: int, world_size: int, run: Run) -> dict[str, Any]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return train(rank, world_size, run)


def run_of(form: RecomputeConfig) -> Run:
    return Run(
        config=tiny_config(hidden_dropout=0.1, attention_dropout=0.1),
        layout={"recompute": form},
        trainer=dict(accelerator="gpu", precision="bf16-mixed", deterministic=True),
        steps=3,
        keep_gradients=(0, 2),
    )


@functools.cache
def plain() -> dict[str, Any]:
    return run_ranks_fresh(deterministic, 1, run_of(RecomputeConfig()))[0]


@pytest.mark.parametrize("form", FORMS)
def test_bitwise_with_deterministic_kernels(form: str) -> None:
    got = run_ranks_fresh(deterministic, 1, run_of(FORMS[form]))[0]
    assert got["losses"] == plain()["losses"]
    for tensors, expected in (
        (got["final"], plain()["final"]),
        (got["gradients"][2], plain()["gradients"][2]),
    ):
        for name, (*_, value) in expected.items():
            assert torch.equal(tensors[name][-1], value), name


def bytes_after_forward(rank: int, world_size: int, form: RecomputeConfig) -> tuple[int, float]:
    """Bytes that a forward leaves on the device, and the gradient norm of its backward."""
    torch.manual_seed(0)
    config = tiny_config(hidden_size=512, num_attention_heads=8, num_layers=8, ffn_hidden_size=1536)
    network = GPTNetwork(config).to("cuda", torch.bfloat16)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    device = torch.device("cuda", 0)
    plan = ParallelPlan(layers="decoder.layers")
    apply_recompute(network, plan, form, streams=None, device=device)
    tokens = torch.randint(0, 257, (2, 2048), device="cuda")
    before = torch.cuda.memory_allocated()
    loss = network(tokens, None, tokens).mean()
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    loss.backward()
    grads = [p.grad.float().norm() for p in network.parameters() if p.grad is not None]
    return kept, float(torch.stack(grads).norm())


def test_each_form_keeps_less() -> None:
    forms = {"none": RecomputeConfig(), **FORMS}
    kept = {}
    norms = {}
    for name, form in forms.items():
        kept[name], norms[name] = run_ranks(bytes_after_forward, 1, form, backend="nccl")[0]
        print(f"{name}: {kept[name] / 2**20:.1f} MiB after the forward")
    assert kept["core_attention"] < kept["none"]
    assert kept["mlp_and_norms"] < kept["core_attention"]
    assert kept["full"] < 0.25 * kept["none"]
    assert kept["offload"] < 0.4 * kept["none"]  # the last layer is still there
    assert kept["full_offload"] < kept["full"]
    for name, norm in norms.items():
        assert norm == pytest.approx(norms["none"], rel=1e-3), name
