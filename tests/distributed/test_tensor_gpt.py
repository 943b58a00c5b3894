"""The GPT network over tensor ranks: gradients of shared parameters (case C16), exact dropout."""

from typing import Any

import pytest
import torch

from megatron_lightning.config.model import GPTConfig
from megatron_lightning.layers.dropout import apply_random
from megatron_lightning.layers.torch_backend import TorchBackend
from megatron_lightning.models.gpt_network import GPTNetwork
from megatron_lightning.models.plans import gpt_plan
from megatron_lightning.parallel.checks import check_replicas, replicated_tensors
from megatron_lightning.parallel.materialise import materialise
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.tensor import apply_tensor_parallel
from tests.distributed.test_tensor_network import LIMITS, batch, reduced_gradients, whole
from tests.harness import run_ranks

BASE = {
    "vocab_size": 257,
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 96,
    "max_position_embeddings": 16,
    "make_vocab_size_divisible_by": 8,
}
LLAMA = {"qk_layernorm": True}
BIASES = {"qk_layernorm": True, "add_bias_linear": True}
GPT2 = {
    "qk_layernorm": True,
    "add_bias_linear": True,
    "norm": "layernorm",
    "activation": "gelu_tanh",
    "gated_linear_unit": False,
    "position_embedding": "learned",
    "tie_word_embeddings": True,
}


def _build(mesh: ParallelMesh, options: dict[str, Any], sequence_parallel: bool, dtype=None):
    config = GPTConfig(**BASE | options)
    backend = TorchBackend(attention="reference" if config.attention_dropout else "fused")
    network = GPTNetwork(config, backend, device="meta")
    table = apply_tensor_parallel(
        network, gpt_plan(config), mesh.tp, sequence_parallel=sequence_parallel
    )
    exact = config.hidden_dropout > 0
    streams = apply_random(network, mesh, seed=2, exact=exact, sequence_parallel=sequence_parallel)
    streams.begin(0, 0, 12)
    materialise(network, table, seed=2, device="cpu", dtype=dtype)
    return network, table


def _step(
    rank: int, size: int, options: dict[str, Any], sequence_parallel: bool, dtype: torch.dtype
) -> None:
    loss_limit, gradient_limit = LIMITS[dtype]
    mesh = ParallelMesh.build(device=torch.device("cpu"), tensor=size)
    one, _ = _build(ParallelMesh.single(), options, False, dtype)
    network, table = _build(mesh, options, sequence_parallel, dtype)
    tokens, labels, weights = batch()
    want, got = (net(tokens, labels=labels) for net in (one, network))
    assert ((got - want).norm() / want.norm()).item() <= loss_limit
    for losses in (want, got):
        (losses * weights).sum().backward()
    gradients = reduced_gradients(network, table, mesh.tp)
    check_replicas(replicated_tensors(gradients, table), mesh.tp, what="gradient of")
    references = {name: parameter.grad for name, parameter in one.named_parameters()}
    total = torch.stack([gradient.norm() for gradient in references.values()]).norm()
    for name, reference in references.items():
        expected = whole(reference, table[name], ParallelMesh.single().tp)
        difference = (whole(gradients[name], table[name], mesh.tp) - expected).norm()
        scale = expected.norm() if expected.norm() > 1e-5 * total else total
        assert (difference / scale).item() <= gradient_limit, name


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("options", [LLAMA, BIASES, GPT2], ids=["llama", "biases", "gpt2"])
@pytest.mark.parametrize("dtype", LIMITS)
def test_losses_and_gradients_equal_one_process(
    options: dict[str, Any], sequence_parallel: bool, dtype: torch.dtype
) -> None:
    run_ranks(_step, 2, options, sequence_parallel, dtype)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_exact_dropout_gives_the_same_training_in_every_layout(sequence_parallel: bool) -> None:
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.2}
    run_ranks(_step, 2, GPT2 | dropout, sequence_parallel, torch.float64)


def _ten_steps(rank: int, size: int, options: dict[str, Any]) -> None:
    """Replicas stay bitwise equal over ten steps of AdamW under sequence parallelism."""
    mesh = ParallelMesh.build(device=torch.device("cpu"), tensor=size)
    network, table = _build(mesh, options, True)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    tokens, labels, weights = batch()
    for _ in range(10):
        optimizer.zero_grad()
        (network(tokens, labels=labels) * weights).sum().backward()
        reduced_gradients(network, table, mesh.tp)
        optimizer.step()
    parameters = {name: p.detach() for name, p in network.named_parameters()}
    check_replicas(replicated_tensors(parameters, table), mesh.tp)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if name in parameters:
            assert not parameters[name][table[name].sizes[0] :].any()  # padding stays zero


@pytest.mark.parametrize("options", [LLAMA, BIASES], ids=["llama", "biases"])
def test_replicas_are_equal_after_ten_steps(options: dict[str, Any]) -> None:
    run_ranks(_ten_steps, 2, options)
