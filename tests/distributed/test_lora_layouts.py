"""Adapters train in every layout as in one process: losses, norms, gradients and weights."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_lightning.config import (
    DataParallelConfig,
    LatentAttentionConfig,
    LoraConfig,
    MoEConfig,
    PipelineConfig,
    QuantizationConfig,
    RecomputeConfig,
    RuntimeConfig,
)
from megatron_lightning.models import GPTModel
from megatron_lightning.parallel.quantized.chosen_layers import (
    chosen_linears,
    quantization_problems,
)
from tests.harness import run_ranks_fresh
from tests.layout_runs import Run, assemble, assert_same_training, tiny_config, train

TENSOR = dict(tensor_parallel_size=2, sequence_parallel=True)
PIPELINE = dict(pipeline_parallel_size=2, micro_batch_size=2)
FULL = DataParallelConfig(sharding="fsdp")
ZERO = DataParallelConfig(sharding="optimizer")
LORA = LoraConfig(rank=4, alpha=8)
PARTS = LoraConfig(rank=2, targets=("linear_qkv:query", "linear_qkv:value", "mlp.linear_fc1:up"))
UPPER = LoraConfig(rank=2, targets=("layers.[23].*.linear_*",))
"""Nothing is trained on the first of two stages."""
JOINED = LoraConfig(rank=4, joined=True, rank_stabilised=True)
EXPERTS = dict(
    moe=MoEConfig(
        num_experts=4, ffn_hidden_size=64, shared_expert_ffn_hidden_size=32, layer_pattern="ED"
    )
)
LATENT = dict(
    num_query_groups=4,
    latent_attention=LatentAttentionConfig(
        q_lora_rank=8, kv_lora_rank=6, qk_head_dim=4, qk_pos_emb_head_dim=2, v_head_dim=5
    ),
)
BIASES = dict(add_bias_linear=True, norm="layernorm", gated_linear_unit=False, activation="gelu")

FAST: dict[str, tuple[int, dict[str, Any], LoraConfig, dict[str, Any]]] = {
    "tp2_sp_parts": (2, TENSOR, PARTS, {}),
    "pp2_upper_layers": (2, PIPELINE, UPPER, {}),
    "ep2": (2, dict(expert_parallel_size=2), LORA, EXPERTS),
    "tp2_sp_fsdp2": (4, TENSOR | {"data_parallel": FULL}, LORA, {}),
}
SLOW: dict[str, tuple[int, dict[str, Any], LoraConfig, dict[str, Any]]] = {
    "tp2_sp_ep2_zero": (
        4,
        TENSOR
        | dict(expert_parallel_size=2, expert_tensor_parallel_size=1)
        | {"data_parallel": ZERO},
        PARTS,
        EXPERTS,
    ),
    "ep2_fsdp": (4, dict(expert_parallel_size=2, data_parallel=FULL), LORA, EXPERTS),
    "tp2": (2, dict(tensor_parallel_size=2), LORA, {}),
    "tp2_sp_latent": (2, TENSOR, LORA, LATENT),
    "cp2_biases": (2, dict(context_parallel_size=2), LORA, BIASES),
    "tp2_sp_pp2_zero": (8, TENSOR | PIPELINE | {"data_parallel": ZERO}, JOINED, {}),
    "pp2_interleaved_recompute": (
        2,
        PIPELINE | dict(virtual=2, recompute=RecomputeConfig(mode="full")),
        LORA,
        {},
    ),
    "tp2_sp_pp2_zero_bubble": (
        4,
        TENSOR | PIPELINE | dict(pipeline=PipelineConfig(schedule="zb-h1")),
        LORA,
        {},
    ),
}
SHORT = dict(steps=4, keep_gradients=(0, 3))


@functools.cache
def single(
    lora: LoraConfig, changes: tuple[Any, ...], options: tuple[Any, ...], **trainer: Any
) -> Any:
    config = tiny_config(**dict(changes))
    run = Run(config=config, lora=lora, trainer=trainer, **dict(options))
    return run_ranks_fresh(train, 1, run)[0]


def check(
    case: tuple[int, dict[str, Any], LoraConfig, dict[str, Any]],
    dtype: torch.dtype = torch.float32,
    short: bool = False,
    **trainer: Any,
) -> list[dict[str, Any]]:
    world_size, layout, lora, changes = case
    options: dict[str, Any] = SHORT if short else {}
    config = tiny_config(**changes)
    run = Run(config=config, lora=lora, layout=layout, trainer=trainer, **options)
    ranks = run_ranks_fresh(train, world_size, run)
    alone = single(lora, tuple(changes.items()), tuple(options.items()), **trainer)
    assert_same_training(ranks, alone, dtype)
    assert alone["losses"][-1] != alone["losses"][0]
    return ranks


@pytest.mark.parametrize("case", FAST)
def test_training_equals_one_process(case: str) -> None:
    ranks = check(FAST[case], short=True)
    begun, ended = (assemble([rank[what] for rank in ranks]) for what in ("initial", "final"))
    changed = {name for name in begun if not torch.equal(begun[name], ended[name])}
    assert changed == {name for name in begun if ".adapters." in name}


def test_adapters_stay_out_of_low_precision() -> None:
    """Products of the frozen weights are rounded; adapters of any rank are not, and train."""
    config, lora = tiny_config(), LoraConfig(rank=3)
    low = QuantizationConfig(keep_first=0, keep_last=0)
    module = GPTModel(config, lora=lora)
    network, plan = module.build_network("meta"), module.parallel_plan()
    chosen = chosen_linears(network, plan, low)
    assert len(chosen) == 4 * config.num_layers
    assert all(name.rpartition(".")[2].startswith("linear_") for name in chosen)
    assert not any("adapters" in p for p in quantization_problems(network, plan, low, 1))
    layout = {"quantization": replace(low, simulate=True)}
    rounded = run_ranks_fresh(train, 1, Run(config=config, lora=lora, layout=layout, **SHORT))[0]
    exact = single(lora, (), tuple(SHORT.items()))
    assert rounded["losses"] != exact["losses"]
    assert rounded["losses"] == pytest.approx(exact["losses"], rel=2e-3)
    begun, ended = (assemble([rounded[what]]) for what in ("initial", "final"))
    assert {n for n in begun if not torch.equal(begun[n], ended[n])} == {
        n for n in begun if ".adapters." in n
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_training_equals_one_process_elsewhere(case: str) -> None:
    check(SLOW[case])


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "optimizer", "fsdp"])
def test_bfloat16_has_float32_masters_of_adapters(sharding: str) -> None:
    layout = TENSOR | {"data_parallel": DataParallelConfig(sharding=sharding)}
    check((4, layout, LORA, {}), torch.bfloat16, short=True, precision="bf16-mixed")


@pytest.mark.slow
def test_accumulated_windows() -> None:
    check(FAST["tp2_sp_parts"], short=True, accumulate_grad_batches=2)


@pytest.mark.slow
def test_exact_dropout() -> None:
    lora = LoraConfig(rank=4, dropout=0.2)
    exact = dict(runtime=RuntimeConfig(exact_dropout=True))
    alone = run_ranks_fresh(train, 1, Run(lora=lora, layout=exact, **SHORT))[0]
    layout = TENSOR | PIPELINE | exact
    ranks = run_ranks_fresh(train, 4, Run(lora=lora, layout=layout, **SHORT))
    assert_same_training(ranks, alone)
