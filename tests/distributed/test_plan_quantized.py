"""What `plan` says that eight and four bits keep on a rank, against what is kept on a CPU."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from megatron_lightning.cli.plan_activations import chunk_activations
from megatron_lightning.cli.plan_quantized import _Layout, layers_of
from megatron_lightning.cli.plan_request import PlanRequest
from megatron_lightning.config import (
    GPTConfig,
    LatentAttentionConfig,
    MoEConfig,
    ParallelConfig,
    PipelineConfig,
    QuantizationConfig,
)
from megatron_lightning.config.activations import (
    embedding_bytes_per_token,
    head_bytes_per_token,
    layer_rows,
)
from megatron_lightning.config.rounded_inputs import with_rounded_inputs
from megatron_lightning.config.saved_tensors import ActivationSizes, kept_bytes_per_token
from megatron_lightning.layers.dropout import apply_random
from megatron_lightning.models.gpt_network import GPTNetwork
from megatron_lightning.models.plans import gpt_plan
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.pipeline import ChunkUnits
from megatron_lightning.parallel.quantized import recipes
from megatron_lightning.parallel.quantized.apply import apply_quantization
from megatron_lightning.parallel.quantized.chosen_layers import chosen_linears
from megatron_lightning.parallel.quantized.experts import RowScaledExperts
from megatron_lightning.parallel.quantized.experts_in_turn import QuantizedExperts
from megatron_lightning.parallel.quantized.products import QuantizedProducts
from megatron_lightning.parallel.quantized.quantization import Quantization
from megatron_lightning.parallel.tensor import apply_tensor_parallel
from megatron_lightning.parallel.weight_gradient import WeightGradients, apply_weight_sinks
from tests.harness import run_ranks
from tests.layout_runs import tiny_config
from tests.saved_bytes import saved_bytes

SEQUENCE, BATCH = 64, 2
SIZES = dict(hidden_size=128, ffn_hidden_size=384, num_query_groups=4, num_layers=3)
EXPERTS = dict(
    moe=MoEConfig(
        num_experts=4,
        router_topk=2,
        ffn_hidden_size=256,
        shared_expert_ffn_hidden_size=128,
        load_balancing="forced",
    )
)
TWO = dict(moe=replace(EXPERTS["moe"], num_experts=2))
"""So that each expert has a block of tokens."""
WIDE = dict(hidden_size=256, head_dim=64, ffn_hidden_size=512)
"""So that blocks of 128 divide what a rank holds."""
SIMULATED_BYTES = 4
"""On a CPU rounded values are held in float32."""


def operands_of(module: Any) -> list[Any]:
    """Rounded weights that a layer holds."""
    if isinstance(module, RowScaledExperts):
        return [module._itself.operand, module._transposed.operand]
    if isinstance(module, QuantizedExperts):
        return [operand for one in module.products for operand in operands_of(one)]
    assert isinstance(module, QuantizedProducts)
    return list(module._weight or ())


def bytes_of(tensors: list[Tensor]) -> int:
    """Of the distinct storages."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def quantize(
    network: GPTNetwork,
    names: frozenset[str],
    config: QuantizationConfig,
    mesh: ParallelMesh,
    *,
    parts: bool,
    table: Any = None,
) -> Quantization:
    """As a training run does, on a device that is not refused."""
    plan = gpt_plan(network.config)
    if table is None:
        table = apply_tensor_parallel(network, plan, mesh.tp)
    with patch.object(recipes, "device_problem", lambda *_, **__: None):
        return apply_quantization(
            [network],
            names,
            plan,
            config,
            mesh,
            table=table,
            streams=None,
            sequence_parallel=parts,
            keeps_weights=True,
            seed=1,
            prefix="",
        )


def measured(
    rank: int, world_size: int, model: GPTConfig, config: QuantizationConfig, parts: bool
) -> tuple[int, int]:
    """(bytes kept for backward, bytes of rounded weights and histories) on a rank."""
    mesh = ParallelMesh.build(device=torch.device("cpu"), tensor=world_size)
    torch.manual_seed(1)
    network, plan = GPTNetwork(model), gpt_plan(model)
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.02)
    names = frozenset(chosen_linears(network, plan, config))
    table = apply_tensor_parallel(network, plan, mesh.tp, sequence_parallel=parts)
    apply_random(network, ParallelMesh.single(), seed=1)
    network.to(torch.bfloat16)
    held = quantize(network, names, config, mesh, parts=parts, table=table)
    tokens = torch.randint(0, model.vocab_size, (BATCH, SEQUENCE))
    network(tokens, None, tokens).sum().backward()
    kept = saved_bytes(lambda: network(tokens, None, tokens).sum())
    modules: list[Any] = [network.get_submodule(name) for name in names]
    found = [
        module.quantized_experts if hasattr(module, "quantized_experts") else module.quantized
        for module in modules
    ]
    tensors = [
        tensor
        for one in found
        for operand in operands_of(one)
        if operand is not None
        for tensor in operand
        if tensor is not None and tensor.dim()
    ]
    if held.delayed is not None:
        store = held.delayed
        tensors += [store.amax, store.scales, store.inverses, store.history]
    rotary = 2 * SEQUENCE * model.rotary_dim // 2 * 4
    return kept - rotary, bytes_of(tensors)


CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "tensorwise": (1, {}, {}),
    "all_layers": (1, dict(keep_first=0, keep_last=0), {}),
    "rowwise": (1, dict(recipe="fp8_rowwise"), {}),
    "delayed": (1, dict(recipe="fp8_delayed"), {}),
    "excluded": (1, dict(exclude=("*.linear_fc1",)), {}),
    "simulated": (1, dict(simulate=True), {}),
    "simulated_blocks": (1, dict(simulate=True, recipe="fp8_blockwise"), {}),
    "mxfp8": (1, dict(simulate=True, recipe="mxfp8"), {}),
    "nvfp4": (1, dict(simulate=True, recipe="nvfp4", stochastic_rounding=False), {}),
    "tp2": (2, {}, {}),
    "tp2_parts": (2, {}, {}),
    "tp2_parts_simulated": (2, dict(simulate=True, recipe="mxfp8"), {}),
    "tp2_parts_gathered": (2, dict(simulate=True, recipe="fp8_blockwise"), WIDE),
    "relu": (1, {}, dict(gated_linear_unit=False, activation="relu")),
    "gelu": (1, {}, dict(gated_linear_unit=False, activation="gelu")),
    "experts_in_bf16": (1, {}, EXPERTS),
    "experts": (1, dict(experts=True), EXPERTS),
    "experts_blocks": (1, dict(experts=True, simulate=True, recipe="fp8_blockwise"), TWO),
    "latent": (
        1,
        {},
        dict(
            num_query_groups=0,
            latent_attention=LatentAttentionConfig(
                kv_lora_rank=64,
                q_lora_rank=96,
                qk_head_dim=32,
                qk_pos_emb_head_dim=16,
                v_head_dim=32,
            ),
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_kept(case: str) -> None:
    """Activations within 1 % (of the whole network's), rounded weights to the byte."""
    tensor, options, changes = CASES[case]
    config = replace(QuantizationConfig(keep_first=1, keep_last=0), **options)
    model = tiny_config(**(SIZES | changes))
    parts = "parts" in case
    kept, held = run_ranks(measured, tensor, model, config, parts)[0]
    layout = _Layout(
        quantization=config,
        tensor=tensor,
        sequence_parallel=parts,
        expert_tensor=tensor,
    )
    layers = layers_of(model, layout, BATCH * SEQUENCE, SIMULATED_BYTES)
    sizes = ActivationSizes(
        tensor_parallel_size=tensor,
        sequence_parallel=parts,
        fused_norm=False,
        expert_tensor_size=tensor,
    )
    rows = [
        layer_rows(model, sizes, experts=model.moe is not None and model.moe.is_moe_layer(number))
        for number in range(model.num_layers)
    ]
    said = sum(
        kept_bytes_per_token(with_rounded_inputs(each, layer.inputs, sizes.bytes_per_element))
        for each, layer in zip(rows, layers, strict=True)
    )
    said += embedding_bytes_per_token(model, sizes) + head_bytes_per_token(model, sizes)[0]
    print(f"{said * BATCH * SEQUENCE:.0f} said, {kept} kept")
    assert sum(layer.bytes_held for layer in layers) == pytest.approx(held, abs=4 * 3 * 4 * 8)
    assert said * BATCH * SEQUENCE == pytest.approx(kept, rel=0.01)
    for each, layer in zip(rows, layers, strict=True):
        assert {path for row in each for path in row.kept_by} >= {path for path, _ in layer.inputs}


def test_products_in_low_precision_are_not_put_off() -> None:
    """A split backward leaves nothing of their layers, and the estimate knows."""
    model = tiny_config(**SIZES)
    config = QuantizationConfig(keep_first=0, keep_last=0, simulate=True)
    request = PlanRequest(
        model=model,
        model_name="tiny",
        parallel=ParallelConfig(pipeline=PipelineConfig(schedule="zb-h1"), quantization=config),
        gpus=1,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        global_batch_size=BATCH,
    )
    unit = ChunkUnits(stage=0, has_embedding=False, layers=(0, 1, 2), has_head=False)
    chunk = chunk_activations(request, unit)
    network, plan = GPTNetwork(model), gpt_plan(model)
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.02)
    names = frozenset(chosen_linears(network, plan, config))
    quantize(network, names, config, ParallelMesh.single(), parts=False)
    queue = WeightGradients()
    of_weights = {id(parameter): name for name, parameter in network.named_parameters()}
    apply_weight_sinks(network, queue, of_weights)
    tokens = torch.randint(0, model.vocab_size, (BATCH, SEQUENCE))
    with queue.collect((0, 0)):
        network(tokens, None, tokens).sum().backward()
    assert queue.names((0, 0)) == {"output_layer.weight"}
    assert chunk.kept + chunk.waiting < 0.01 * chunk.kept
