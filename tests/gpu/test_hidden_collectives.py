"""How much of the collectives two GPUs hide under computing, and what sharding costs a step.

`pytest -m gpu -s tests/gpu/test_hidden_collectives.py` prints a line for each layout: the share of
the time of NCCL's kernels during which a kernel computes, from the profiler's trace of a step. With
ZeRO-1 it also prints each collective of two steps without a pause, when it began and ended against
the optimizer's kernels between them, and how much of it was exposed.
"""

from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatron_lightning.callbacks import StepTimeline
from megatron_lightning.config import ContextConfig, DataParallelConfig, GPTConfig, RuntimeConfig
from megatron_lightning.models import GPTModel
from megatron_lightning.runtime.kernel_times import Interval, intersection, union
from megatron_lightning.strategies import MegatronStrategy
from tests.harness import run_ranks_fresh

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two CUDA devices"),
]

STEPS = 7
Case = tuple[dict[str, Any], int, int, float]
"""Layout, rows of a rank's batch, tokens of a row, smallest share that counts as hidden."""


def context(form: Any) -> dict[str, Any]:
    return dict(context_parallel_size=2, context=ContextConfig(form=form))


def sharded(**options: Any) -> dict[str, Any]:
    return dict(data_parallel=DataParallelConfig(**options))


CASES: dict[str, Case] = {
    "cp2 ring, 65,536 tokens": (context("ring"), 1, 65_536, 0.6),
    "cp2 all_gather, 65,536 tokens": (context("all_gather"), 1, 65_536, 0.15),
    "cp2 all_to_all, 65,536 tokens": (context("all_to_all"), 1, 65_536, 0.15),
    "dp2 replicated": ({}, 8, 4096, 0.5),
    "dp2 zero-1": (sharded(sharding="optimizer"), 8, 4096, 0.5),
    "dp2 fsdp": (sharded(sharding="fsdp"), 8, 4096, 0.5),
}


def config(sequence: int) -> GPTConfig:
    """Shape (a), 1.1 billion parameters; half the layers for long sequences."""
    return GPTConfig(
        vocab_size=32768,
        num_layers=16 if sequence <= 4096 else 4,
        hidden_size=2048,
        num_attention_heads=32 if sequence <= 4096 else 16,
        num_query_groups=8,
        ffn_hidden_size=8192,
        max_position_embeddings=sequence,
    )


class Tokens(L.LightningDataModule):
    """Random tokens, the same on both ranks."""

    def __init__(self, rows: int, sequence: int) -> None:
        super().__init__()
        self.shape, self.micro_batch_size = (rows, sequence + 1), min(rows, 4)

    def train_dataloader(self) -> "Tokens":
        return self

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(len(self)):
            tokens = torch.randint(0, 32768, self.shape, generator=generator)
            batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
            yield batch | {"loss_mask": torch.ones(self.shape[0], self.shape[1] - 1)}


def watched(rank: int, world_size: int, case: str, directory: str) -> list[dict[str, float]]:
    """Medians of each rank's kernel times over the last steps, from rank 0."""
    layout, rows, sequence, _ = CASES[case]
    callback = StepTimeline(1, directory=directory, kernels=True)
    trainer = L.Trainer(
        accelerator="gpu",
        devices=world_size,
        strategy=MegatronStrategy(**layout, runtime=RuntimeConfig(compile_layers=True)),
        precision="bf16-mixed",
        max_steps=STEPS,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(GPTModel(config(sequence)), Tokens(rows, sequence))
    found = []
    for one in range(world_size if rank == 0 else 0):
        kernels = [report.ranks[one].kernels for report in callback.reports[-4:]]
        assert all(kernels)
        fields = ("compute_seconds", "collective_seconds", "message_seconds")
        fractions = ("hidden_fraction", "hidden_message_fraction")
        found.append({x: median(getattr(k, x) for k in kernels) for x in (*fields, *fractions)})
    return found


@pytest.mark.alone
@pytest.mark.parametrize("case", CASES)
def test_share_of_collectives_that_is_hidden(case: str, tmp_path: Any) -> None:
    least = CASES[case][-1]
    for rank, times in enumerate(run_ranks_fresh(watched, 2, case, str(tmp_path), timeout=240)[0]):
        communicated = times["collective_seconds"] + times["message_seconds"]
        hidden = times["hidden_fraction"] * times["collective_seconds"]
        hidden += times["hidden_message_fraction"] * times["message_seconds"]
        print(
            f"{case}, rank {rank}: compute {times['compute_seconds'] * 1e3:.1f} ms, "
            f"collectives {times['collective_seconds'] * 1e3:.1f} ms, messages "
            f"{times['message_seconds'] * 1e3:.1f} ms, hidden {hidden / communicated:.0%}"
        )
        assert communicated > 0
        assert hidden / communicated >= least


class Collective(NamedTuple):
    """A kernel of NCCL; milliseconds, counted from the optimizer's first kernel."""

    kind: str
    begin: float
    end: float
    exposed: float
    """Part during which nothing else runs."""


class Trace(L.Callback):
    """The device's timeline from one step to the end of the next, without a pause between them."""

    reads_gradients = reads_parameters = False

    def __init__(self, step: int) -> None:
        self.step = step
        self.profiler = profile(activities=[ProfilerActivity.CUDA])

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, index: int) -> None:
        if index == self.step:
            torch.cuda.synchronize()
            self.profiler.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        if index == self.step + 1:
            torch.cuda.synchronize()
            self.profiler.stop()

    def collectives(self) -> tuple[list[Collective], float]:
        """Those from the first backward pass to the second optimizer step, and the time from the
        first kernel of the first optimizer step to its last one.
        """
        computing: list[Interval] = []
        found: list[tuple[str, float, float]] = []
        adam: list[Interval] = []
        for event in self.profiler.events() or ():
            name, span = event.name, (event.time_range.start, event.time_range.end)
            if "cuda" not in str(event.device_type).lower() or name.startswith("nccl:"):
                continue
            if "nccl" in name.lower():
                kinds = ("ReduceScatter", "AllGather", "AllReduce")
                found.append((next((k for k in kinds if k in name), name[:30]), *span))
                continue
            computing.append(span)
            if name.startswith("_update"):
                adam.append(span)
        adam.sort()
        assert adam, "the optimizer's step was no kernel of this package"
        steps = [adam[0]]
        for begin, end in adam[1:]:  # stages follow each other, steps are far apart
            if begin - steps[-1][1] > 50_000:
                steps.append((begin, end))
            steps[-1] = (steps[-1][0], end)
        (start, stop), second = steps[0], steps[1][0]
        busy = union(computing)
        rows = []
        for kind, begin, end in sorted(found, key=lambda row: row[1]):
            if begin < second:
                hidden = sum(b - a for a, b in intersection(busy, [(begin, end)]))
                times = (begin - start, end - start, end - begin - hidden)
                rows.append(Collective(kind, *(time / 1e3 for time in times)))
        return rows, (stop - start) / 1e3


def traced(rank: int, world_size: int, case: str) -> tuple[list[Collective], float]:
    """The collectives of shape (a) under ZeRO-1."""
    layout, rows, sequence, _ = CASES[case]
    trace = Trace(STEPS - 2)
    trainer = L.Trainer(
        accelerator="gpu",
        devices=world_size,
        strategy=MegatronStrategy(**layout, runtime=RuntimeConfig(compile_layers=True)),
        precision="bf16-mixed",
        gradient_clip_val=1.0,
        max_steps=STEPS,
        callbacks=[trace],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(GPTModel(config(sequence)), Tokens(rows, sequence))
    return trace.collectives()


@pytest.mark.alone
def test_timeline_of_zero_1() -> None:
    case = "dp2 zero-1"
    for rank, (rows, optimizer) in enumerate(run_ranks_fresh(traced, 2, case, timeout=240)):
        print(f"\n{case}, rank {rank}: the optimizer's kernels from 0 to {optimizer:.2f} ms")
        for row in rows:
            if row.kind != "AllReduce" or row.exposed > 0.2:
                print(
                    f"  {row.kind:14} {row.begin:9.2f} to {row.end:8.2f} ms,"
                    f" {row.end - row.begin:6.2f} long, {row.exposed:5.2f} exposed"
                )
        reduced = [row for row in rows if row.kind == "ReduceScatter" and row.end <= 0]
        gathered = [row for row in rows if row.kind == "AllGather" and row.begin >= 0]
        for name, part in (("reduce-scatter", reduced), ("all-gather", gathered)):
            time, exposed = sum(r.end - r.begin for r in part), sum(r.exposed for r in part)
            print(f"  {name}: {len(part)}, {time:.2f} ms, exposed {exposed:.2f}")
        assert len(gathered) > 10  # a bucket a layer
        assert len(reduced) == len(gathered)
        assert all(row.begin < -1 for row in reduced[:-1]), "reductions wait for the backward pass"
        assert sum(row.begin < optimizer for row in gathered) >= len(gathered) // 2
