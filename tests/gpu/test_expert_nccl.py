"""Expert parallelism over NCCL on two GPUs: dispatchers against one process, the same training in
every layout in float32 and bfloat16, idle ranks, and what the host waits for.
"""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lightning.config import DataParallelConfig, ExpertConfig, MoEConfig
from megatron_lightning.layers.moe.dispatcher import LocalDispatcher
from megatron_lightning.layers.moe.remote import apply_expert_parallel
from megatron_lightning.parallel.mesh import ParallelMesh
from tests.distributed.test_expert_details import idle_train
from tests.distributed.test_expert_dispatch import (
    CASES,
    EXPERTS,
    Case,
    Layer,
    compare,
    run_case,
    tokens_of,
)
from tests.distributed.test_expert_training import train_with_margins
from tests.harness import run_ranks, run_ranks_fresh
from tests.layout_runs import Run, assert_same_training, global_batch, tiny_config, train
from tests.router_margins import assert_margins

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two CUDA devices"),
]

MOE = MoEConfig(
    num_experts=4,
    ffn_hidden_size=64,
    shared_expert_ffn_hidden_size=32,
    shared_expert_gate=True,
    layer_pattern="ED",
)
FOLDED = dict(tensor_parallel_size=2, expert_parallel_size=2, expert_tensor_parallel_size=1)
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2": dict(expert_parallel_size=2),
    "ep2_gather": dict(expert_parallel_size=2, expert=ExpertConfig(dispatcher="all_gather")),
    "ep2_overlap": dict(expert_parallel_size=2, expert=ExpertConfig(overlap_shared_experts=True)),
    "tp2_ep2": FOLDED,
    "tp2_sp_ep2": FOLDED | dict(sequence_parallel=True),
    "tp2_sp_ep2_overlap": FOLDED
    | dict(sequence_parallel=True, expert=ExpertConfig(overlap_shared_experts=True)),
    "tp2_sp_ep2_gather": FOLDED
    | dict(sequence_parallel=True, expert=ExpertConfig(dispatcher="all_gather")),
    "tp2_sp_etp2": dict(tensor_parallel_size=2, sequence_parallel=True),
    "ep2_zero1": dict(
        expert_parallel_size=2,
        data_parallel=DataParallelConfig(sharding="optimizer", bucket_size=20_000),
    ),
    "ep2_fsdp": dict(expert_parallel_size=2, data_parallel=DataParallelConfig(sharding="fsdp")),
}
DTYPES = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16}


@pytest.mark.parametrize("dispatcher", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("name", [name for name, (size, _) in CASES.items() if size == 2])
def test_dispatch_equals_one_process(name: str, dispatcher: str) -> None:
    case = dataclasses.replace(CASES[name][1], dispatcher=dispatcher)
    compare(case, run_ranks(run_case, 2, case, "cuda", backend="nccl"))


def waits(rank: int, world_size: int, case: Case) -> str:
    """What the host waits for when sizes are known: nothing, else this raises."""
    mesh = ParallelMesh.build(device=torch.device("cuda"), expert=2)
    layer = Layer()
    layer.dispatcher = LocalDispatcher(EXPERTS)
    apply_expert_parallel(layer, mesh, ExpertConfig(), sequence_parallel=True)
    for attempt in range(2):  # the first one makes the communicator
        hidden, routing = tokens_of(case, rank, "cuda")
        torch.cuda.synchronize()
        if attempt:
            torch.cuda.set_sync_debug_mode("error")
        try:
            sent = layer.dispatcher.dispatch(hidden, routing)
            layer.dispatcher.combine(sent.tokens * sent.probs.unsqueeze(1), sent).sum().backward()
        except RuntimeError as error:
            return str(error)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return ""


def test_the_host_waits_for_nothing_where_experts_are_filled_up() -> None:
    padded = run_ranks(waits, 2, Case(expert=2, routing="padded"), backend="nccl")
    assert padded == ["", ""]


def on_gpu(layout: dict[str, Any], precision: str, **changes: Any) -> Run:
    """In bfloat16 places are dealt evenly: rounding there moves tokens to other experts. So that
    they are dealt alike, micro-batches are of one size.
    """
    moe = MOE
    if precision != "32-true":
        moe = dataclasses.replace(MOE, load_balancing="forced")
    options = dict(
        config=tiny_config(moe=moe),
        layout=layout | {"micro_batch_size": 2},
        steps=3,
        keep_gradients=(0, 1, 2),
        trainer=dict(accelerator="gpu", precision=precision),
    )
    return Run(**{**options, **changes})


@functools.cache
def single(precision: str) -> dict[str, Any]:
    alone = run_ranks_fresh(train_with_margins, 1, on_gpu({}, precision), timeout=200)[0]
    if precision == "32-true":
        assert_margins(alone["margins"])
    return alone


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_equals_one_gpu(layout: str, precision: str) -> None:
    ranks = run_ranks_fresh(train, 2, on_gpu(LAYOUTS[layout], precision), timeout=280)
    assert_same_training(ranks, single(precision), DTYPES[precision])


@functools.cache
def idle_single(precision: str) -> dict[str, Any]:
    return run_ranks_fresh(idle_train, 1, idle_run({}, precision), timeout=200)[0]


def idle_run(layout: dict[str, Any], precision: str) -> Run:
    return on_gpu(layout, precision, config=tiny_config(moe=MOE))


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("layout", ["ep2", "ep2_gather", "tp2_sp_ep2", "ep2_fsdp"])
def test_ranks_without_a_token(layout: str, precision: str) -> None:
    """All tokens go to the experts of rank 0: nothing hangs, and the training is the same."""
    run = idle_run(LAYOUTS[layout], precision)
    ranks = run_ranks_fresh(idle_train, 2, run, timeout=280)
    assert_same_training(ranks, idle_single(precision), DTYPES[precision])


def first_batch(run: Run, index: int) -> dict[str, Tensor]:
    return global_batch(dataclasses.replace(run, make_batch=None), 0)


@pytest.mark.parametrize("layout", ["ep2", "tp2_sp_ep2", "ep2_overlap"])
def test_a_small_model_learns_its_batch(layout: str) -> None:
    run = Run(
        config=tiny_config(
            moe=dataclasses.replace(MOE, num_experts=8, aux_loss_coeff=1e-2, layer_pattern="E")
        ),
        layout=LAYOUTS[layout],
        steps=60,
        keep_gradients=(),
        make_batch=first_batch,
        trainer=dict(accelerator="gpu", precision="bf16-mixed"),
    )
    ranks = run_ranks_fresh(train, 2, run, timeout=280)
    losses = ranks[0]["losses"]
    print(f"{layout}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    assert losses[-1] < 0.7 * losses[0]
