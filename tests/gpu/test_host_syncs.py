"""How often the host waits for the device in a training step, between points where it logs.

pytest tests/gpu/test_host_syncs.py -m gpu -s
"""

import traceback
import warnings
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from megatron_lightning.config import DataParallelConfig, MoEConfig, RuntimeConfig
from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.models.gpt import GPTModel
from megatron_lightning.strategies import steps
from tests.harness import run_ranks_fresh
from tests.layout_runs import Batches, Run, global_batch, make_strategy, tiny_config

pytestmark = pytest.mark.gpu

_synchronize = torch.cuda.Event.synchronize


def with_positions(run: Run, index: int) -> dict[str, Tensor]:
    batch = global_batch(Run(config=run.config), index)
    return batch | {"position_ids": torch.arange(16).expand(8, 16).contiguous()}


class Watch(L.Callback):
    """Counts what torch reports as waiting, from the beginning of a batch to that of the third
    after it.
    """

    reads_gradients = reads_parameters = False

    def __init__(self, begin: int) -> None:
        self.begin = begin
        self.waits: list[str] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index == self.begin:
            torch.set_warn_always(True)
            torch.cuda.set_sync_debug_mode("warn")
        if index == self.begin + 3:
            torch.cuda.set_sync_debug_mode("default")

    def synchronize(self, event: torch.cuda.Event) -> None:
        """In place of `Event.synchronize`, of which torch says nothing."""
        if torch.cuda.get_sync_debug_mode() and not event.query():
            self.note()
        _synchronize(event)

    def note(self) -> None:
        here = [f for f in traceback.extract_stack() if "site-packages/torch/" not in f.filename]
        self.waits.append(" < ".join(f"{f.filename}:{f.lineno}" for f in here[-5:-2][::-1]))

    def show(self, message: Any, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            self.note()


def watched(rank: int, world_size: int, run: Run, accumulate: int) -> list[str]:
    model = GPTModel(
        run.config,
        OptimizerConfig(lr=1e-3),
        SchedulerConfig(lr_decay_style="cosine", lr_warmup_steps=3, min_lr=1e-4),
        loss_normalization=run.normalization,
    )
    graphed = run.layout.get("runtime", RuntimeConfig()).cuda_graphs != "none"
    steps.MARK_EVERY = 5  # a batch that is watched is compared by the ranks of a model copy
    watch = Watch(8 if graphed else steps.MARKED_BATCHES)  # when graphs are there
    torch.cuda.Event.synchronize = lambda event: watch.synchronize(event)  # type: ignore[assignment]
    trainer = L.Trainer(
        strategy=make_strategy(run.layout),
        callbacks=[watch],
        accelerator="gpu",
        devices=world_size,
        precision="bf16-mixed",
        max_steps=8,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=1.0,
        log_every_n_steps=1000,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = watch.show
        trainer.fit(model, Batches(run))
    for wait in watch.waits:
        print(wait, flush=True)
    return watch.waits


ZERO = dict(data_parallel=DataParallelConfig(sharding="optimizer"))
COMPILED = dict(runtime=RuntimeConfig(compile_layers=True))
CASES: dict[str, tuple[int, dict[str, Any], str, int]] = {
    "one": (1, {}, "token", 1),
    "one_micro_batches": (1, dict(micro_batch_size=2), "micro_batch", 2),
    "one_compiled": (1, COMPILED, "token", 1),
    "one_graphs": (1, dict(runtime=RuntimeConfig(cuda_graphs="layers")), "token", 2),
    "experts_dropless": (1, {}, "token", 1),
    "experts_padded": (1, {}, "token", 2),
    "experts_graphs": (1, dict(runtime=RuntimeConfig(cuda_graphs="layers")), "token", 2),
    "dp2": (2, {}, "token", 1),
    "dp2_zero": (2, ZERO, "token", 1),
    "tp2_sp": (2, dict(tensor_parallel_size=2, sequence_parallel=True), "token", 1),
}


DROPLESS = MoEConfig(num_experts=4, router_topk=2, aux_loss_coeff=1e-2, z_loss_coeff=1e-3)
PADDED = replace(
    DROPLESS,
    capacity_factor=1.25,
    pad_to_capacity=True,
    router_score_function="sigmoid",
    expert_bias=True,
)
EXPERTS = {"experts_dropless": DROPLESS, "experts_padded": PADDED, "experts_graphs": PADDED}


@pytest.mark.parametrize("case", CASES)
def test_the_host_never_waits_in_a_step(case: str) -> None:
    world_size, layout, normalization, accumulate = CASES[case]
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    config = tiny_config(max_position_embeddings=16, moe=EXPERTS.get(case))
    run = Run(
        config=config,
        layout=layout,
        normalization=normalization,
        steps=8,
        make_batch=with_positions,
    )
    for waits in run_ranks_fresh(watched, world_size, run, accumulate, timeout=300):
        assert waits == []
