"""The same training with latent attention and multi-token prediction in every layout."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lightning.config import (
    ContextConfig,
    DataParallelConfig,
    GPTConfig,
    LatentAttentionConfig,
    MoEConfig,
    MultiTokenPredictionConfig,
    PipelineConfig,
    RotaryConfig,
)
from tests.harness import run_ranks_fresh
from tests.layout_runs import SEQUENCE, Run, assert_same_training, tiny_config, train
from tests.router_margins import MARGIN, smallest_margins

STEPS = 4
YARN = RotaryConfig(
    interleaved=True,
    scaling="yarn",
    factor=4.0,
    original_max_position_embeddings=32,
    mscale_all_dim=1.0,
)
EXPERTS = MoEConfig(
    num_experts=4,
    ffn_hidden_size=64,
    shared_expert_ffn_hidden_size=32,
    first_dense_layers=1,
    router_score_function="sigmoid",
    router_num_groups=2,
    router_group_topk=1,
    router_topk_scaling_factor=2.5,
    load_balancing="none",
    expert_bias=True,
)


def model(**changes: Any) -> GPTConfig:
    """Values of another size than queries and keys, two depths."""
    latent = LatentAttentionConfig(
        kv_lora_rank=24, q_lora_rank=32, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=20
    )
    values = dict(
        num_layers=2,
        num_query_groups=0,
        rotary=YARN,
        latent_attention=latent,
        multi_token_prediction=MultiTokenPredictionConfig(num_layers=2, loss_scaling_factor=0.5),
    )
    return tiny_config(**{**values, **changes})


MODELS = {
    "untied": model(),
    "tied": model(tie_word_embeddings=True),
    "window": model(window_size=5, multi_token_prediction=None),
    "experts": model(moe=EXPERTS, multi_token_prediction=MultiTokenPredictionConfig()),
}


def case(model: str, world_size: int, *, slow: bool = False, **layout: Any) -> Any:
    name = "_".join(f"{k.replace('_parallel_size', '')}{v}" for k, v in layout.items())
    marks = [pytest.mark.slow] if slow else []
    return pytest.param(model, world_size, layout, marks=marks, id=f"{model}-{name[:60]}")


def data(**options: Any) -> DataParallelConfig:
    return DataParallelConfig(**options)


CASES = [
    case("untied", 2, slow=True, tensor_parallel_size=2),
    case("tied", 2, tensor_parallel_size=2, sequence_parallel=True),
    case("tied", 2, pipeline_parallel_size=2),
    case("untied", 2, context_parallel_size=2),
    case("experts", 2, expert_parallel_size=2),
    case("untied", 2, slow=True, pipeline_parallel_size=2),
    case("untied", 2, slow=True, context_parallel_size=2, context=ContextConfig(form="all_gather")),
    case("untied", 2, slow=True, context_parallel_size=2, context=ContextConfig(form="all_to_all")),
    case("window", 2, slow=True, context_parallel_size=2),
    case("tied", 1, slow=True, virtual=2),
    case("tied", 2, slow=True, pipeline_parallel_size=2, pipeline=PipelineConfig(schedule="zb-h1")),
    case("tied", 2, slow=True, data_parallel=data(sharding="fsdp")),
    case("tied", 2, slow=True, data_parallel=data(sharding="optimizer")),
    case("experts", 2, slow=True, pipeline_parallel_size=2),
    case(
        "experts",
        4,
        slow=True,
        tensor_parallel_size=2,
        sequence_parallel=True,
        expert_parallel_size=2,
        expert_tensor_parallel_size=1,
        context_parallel_size=2,
    ),
]


def run_of(config: GPTConfig, layout: dict[str, Any], **options: Any) -> Run:
    return Run(config=config, layout=layout, steps=STEPS, keep_gradients=(0, 3), **options)


def train_with_margin(rank: int, world_size: int, run: Run) -> dict[str, Any]:
    with smallest_margins() as margins:
        found = train(rank, world_size, run)
    return found | {"margin": min(margins, default=1.0)}


@functools.cache
def single(name: str, normalization: str = "token") -> dict[str, Any]:
    run = run_of(MODELS[name], {}, normalization=normalization)
    (found,) = run_ranks_fresh(train_with_margin, 1, run)
    assert found["margin"] > MARGIN
    return found


@pytest.mark.parametrize(("name", "world_size", "layout"), CASES)
def test_same_training(name: str, world_size: int, layout: dict[str, Any]) -> None:
    ranks = run_ranks_fresh(train, world_size, run_of(MODELS[name], layout))
    assert_same_training(ranks, single(name))


def test_logged_losses_of_depths() -> None:
    """They are there, about the logarithm of the vocabulary at first, and not in the loss that is
    logged as `train_loss`.
    """
    metrics, losses = single("untied")["metrics"], single("untied")["losses"]
    assert {"train_loss", "mtp_1_loss", "mtp_2_loss"} <= metrics.keys()
    depths = (metrics["mtp_1_loss"] + metrics["mtp_2_loss"]) / 2
    # Two depths lack up to two tokens of a document, whose losses are not in the sum.
    assert 0.8 * depths < (losses[-1] - metrics["train_loss"]) / 0.5 < depths


@pytest.mark.slow
@pytest.mark.parametrize("layout", [dict(tensor_parallel_size=2), dict(context_parallel_size=2)])
def test_micro_batch_means(layout: dict[str, Any]) -> None:
    run = run_of(MODELS["untied"], layout, normalization="micro_batch")
    ranks = run_ranks_fresh(train, 2, run)
    assert_same_training(ranks, single("untied", "micro_batch"))


def packed_batch(run: Run, index: int) -> dict[str, Tensor]:
    """Two documents a sample, at other places in each step."""
    generator = torch.Generator().manual_seed(2000 + index)
    tokens = torch.randint(0, 257, (run.global_batch_size, SEQUENCE), generator=generator)
    cut = 4 * (1 + index % 3)
    cu_seqlens = torch.tensor([[0, cut, SEQUENCE]], dtype=torch.int32)
    labels = tokens.roll(-1, 1)
    mask = torch.ones(tokens.shape)
    mask[:, [cut - 1, -1]] = 0.0
    return {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": mask,
        "cu_seqlens": cu_seqlens.repeat(len(tokens), 1),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [dict(context_parallel_size=2), dict(pipeline_parallel_size=2)], ids=["cp2", "pp2"]
)
def test_packed_documents(layout: dict[str, Any]) -> None:
    runs = [run_of(MODELS["untied"], one, make_batch=packed_batch) for one in ({}, layout)]
    (alone,) = run_ranks_fresh(train, 1, runs[0])
    assert_same_training(run_ranks_fresh(train, 2, runs[1]), alone)
