"""What `plan` says of parameters and activations on a rank, against ranks that hold them."""

from typing import Any

import pytest
import torch

from megatron_lightning.cli.plan_activations import chunk_activations
from megatron_lightning.cli.plan_memory import unit_parameters
from megatron_lightning.cli.plan_request import PlanRequest
from megatron_lightning.config import ParallelConfig, PipelineConfig, RecomputeConfig
from megatron_lightning.config.activations import (
    embedding_bytes_per_token,
    head_bytes_per_token,
    layer_rows,
)
from megatron_lightning.config.saved_tensors import ActivationSizes, kept_bytes_per_token
from megatron_lightning.models.gpt_network import GPTNetwork
from megatron_lightning.models.plans import gpt_plan
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.pipeline import ChunkUnits
from megatron_lightning.parallel.tensor import apply_tensor_parallel
from megatron_lightning.parallel.weight_gradient import WeightGradients, apply_weight_sinks
from megatron_lightning.runtime.recompute import apply_recompute
from tests.harness import run_ranks
from tests.layout_runs import tiny_config
from tests.saved_bytes import saved_bytes

SEQUENCE, BATCH = 64, 2


def measured(rank: int, world_size: int, sequence_parallel: bool) -> tuple[int, int]:
    """(local parameters, bytes kept for backward) of a GPT over tensor ranks."""
    config = tiny_config(hidden_size=128, ffn_hidden_size=384, num_query_groups=4)
    mesh = ParallelMesh.build(device=torch.device("cpu"), tensor=world_size)
    network = GPTNetwork(config)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    apply_tensor_parallel(network, gpt_plan(config), mesh.tp, sequence_parallel=sequence_parallel)
    tokens = torch.randint(0, config.vocab_size, (BATCH, SEQUENCE))
    kept = saved_bytes(lambda: network(tokens, None, tokens).sum())
    rotary = 2 * SEQUENCE * config.rotary_dim // 2 * 4
    return sum(p.numel() for p in network.parameters()), kept - rotary


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_one_rank_of_a_tensor_group(tensor: int, sequence_parallel: bool) -> None:
    config: Any = tiny_config(hidden_size=128, ffn_hidden_size=384, num_query_groups=4)
    parameters, kept = run_ranks(measured, tensor, sequence_parallel and tensor > 1)[0]
    units = unit_parameters(config, tensor)
    assert units.embedding + sum(units.layers) + units.head == parameters
    sizes = ActivationSizes(
        tensor_parallel_size=tensor,
        sequence_parallel=sequence_parallel and tensor > 1,
        bytes_per_element=4,
        fused_norm=False,
    )
    estimated = 4 * kept_bytes_per_token(layer_rows(config, sizes))
    estimated += embedding_bytes_per_token(config, sizes) + head_bytes_per_token(config, sizes)[0]
    print(f"{estimated * BATCH * SEQUENCE:.0f} estimated, {kept} measured")
    assert estimated * BATCH * SEQUENCE == pytest.approx(kept, rel=0.03)


def test_chunks_share_out_what_the_whole_keeps() -> None:
    """Stages together keep what one stage keeps; context ranks keep their part."""
    request = PlanRequest(
        model=tiny_config(),
        model_name="tiny",
        parallel=ParallelConfig(),
        gpus=1,
        seq_length=128,
        micro_batch_size=2,
        global_batch_size=2,
    )
    whole = chunk_activations(request, units(0, range(4), True, True)).kept
    first = chunk_activations(request, units(0, range(3), True, False)).kept
    last = chunk_activations(request, units(1, range(3, 4), False, True)).kept
    assert first + last == pytest.approx(whole)


def units(stage: int, layers: range, embedding: bool, head: bool) -> ChunkUnits:
    return ChunkUnits(stage=stage, has_embedding=embedding, layers=tuple(layers), has_head=head)


@pytest.mark.parametrize("modules", [(), ("mlp.activation",)])
@pytest.mark.parametrize("at_once", [(), ("output_layer",)])
def test_what_waits_for_its_weights_gradients(
    at_once: tuple[str, ...], modules: tuple[str, ...]
) -> None:
    """The factors of products in the queue of a split backward, against the plan's."""
    config = tiny_config(hidden_size=128, ffn_hidden_size=384, num_layers=2)
    recompute = RecomputeConfig(mode="selective", modules=modules) if modules else RecomputeConfig()
    pipeline = PipelineConfig(schedule="zb-h1", defer_head_gradient=not at_once)
    request = PlanRequest(
        model=config,
        model_name="tiny",
        parallel=ParallelConfig(recompute=recompute, pipeline=pipeline),
        gpus=1,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        global_batch_size=BATCH,
        precision="32-true",
    )
    chunk = chunk_activations(request, units(0, range(2), True, True))
    network = GPTNetwork(config)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    apply_recompute(network, gpt_plan(config), recompute, streams=None, device=torch.device("cpu"))
    queue = WeightGradients()
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    apply_weight_sinks(network, queue, names, at_once)
    tokens = torch.randint(0, config.vocab_size, (BATCH, SEQUENCE))
    with queue.collect((0, 0)):
        network(tokens, None, tokens).sum().backward()
    storages = {
        tensor.data_ptr(): tensor.untyped_storage().nbytes()
        for product in queue._waiting[0, 0]
        for tensor in (product.grad, product.x)
    }
    print(f"{chunk.kept + chunk.waiting:.0f} said, {sum(storages.values())} wait")
    assert chunk.kept + chunk.waiting == pytest.approx(sum(storages.values()), rel=0.05)
