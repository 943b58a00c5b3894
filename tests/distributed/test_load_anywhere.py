"""Save in each of eight layouts, load in each of eight: weights and both moments bitwise, and the
next step's loss as in one process.

The state is that of three real optimizer steps of a model with everything that is awkward: five
layers that divide by no stage, 50257 tokens that are padded unevenly, tied embedding and head.
"""

import itertools
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

import megatron_lightning.checkpoint as store
from megatron_lightning.checkpoint import BoxedTensor
from megatron_lightning.checkpoint.files import DataFileReader
from megatron_lightning.config import DataParallelConfig, PipelineConfig
from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.models.gpt import GPTModel
from megatron_lightning.strategies import checkpoint_tensors
from tests import tolerances
from tests.distributed.test_resume import fit
from tests.harness import run_ranks_fresh
from tests.layout_runs import Batches, Recorder, Run, make_strategy, tiny_config

SAVED_AT, STEPS = 3, 6
CONFIG = tiny_config(
    vocab_size=50257,
    make_vocab_size_divisible_by=128,
    num_layers=5,
    hidden_size=32,
    ffn_hidden_size=64,
    tie_word_embeddings=True,
)
ZERO = DataParallelConfig(sharding="optimizer", bucket_size=300_000)
FULLY = DataParallelConfig(sharding="fsdp")

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "tp2": (2, dict(tensor_parallel_size=2)),
    "tp2_sp_pp2": (
        4,
        dict(
            tensor_parallel_size=2,
            sequence_parallel=True,
            pipeline_parallel_size=2,
            pipeline=PipelineConfig(layout="Ett|tttL"),
            micro_batch_size=2,
        ),
    ),
    "pp2_interleaved": (
        2,
        dict(
            pipeline_parallel_size=2,
            pipeline=PipelineConfig(virtual_pipeline_size=2, layout="Et|t|tt|tL"),
            micro_batch_size=2,
        ),
    ),
    "cp2": (2, dict(context_parallel_size=2)),
    "dp4_zero_partial": (
        4,
        dict(
            data_parallel=DataParallelConfig(sharding="optimizer", replicas=2, bucket_size=300_000)
        ),
    ),
    "dp2_fsdp": (2, dict(data_parallel=FULLY)),
    "tp2_dp2_zero": (4, dict(tensor_parallel_size=2, data_parallel=ZERO)),
}
MOMENTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2_zero_bf16_moments": (
        2,
        dict(
            data_parallel=DataParallelConfig(
                sharding="optimizer", moments_dtype="bfloat16", bucket_size=300_000
            )
        ),
    )
}
FAST = {
    ("tp2_sp_pp2", "dp4_zero_partial"),
    ("dp2_fsdp", "tp2_sp_pp2"),
    ("tp2_dp2_zero", "pp2_interleaved"),
}


def run_of(layout: str, **changes: Any) -> Run:
    layout_options = (LAYOUTS | MOMENTS)[layout][1]
    options = dict(steps=STEPS, keep_gradients=(), global_batch_size=4)
    return Run(config=CONFIG, layout=layout_options, **{**options, **changes})


class Compare(L.Callback):
    """After the load and before the first step: what this rank holds against the checkpoint."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.elements: dict[str, int] = {}
        self.dtypes: set[tuple[str, str, str]] = set()
        """Of what is held: its kind, its dtype in the checkpoint and here."""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        strategy: Any = trainer.strategy
        held = {
            f"model.{name}": checkpoint_tensors.boxed(
                value, strategy.parallel_model.table.get(name)
            )
            for name, value in checkpoint_tensors.model_tensors(strategy).items()
        }
        held |= checkpoint_tensors.optimizer_tensors(strategy.update, materialise=False)
        whole = read_whole(Path(self.folder), list(held))
        for name, boxed in ((name, BoxedTensor.of(tensor)) for name, tensor in held.items()):
            kind = re.sub(r"\.network\..*", "", name)
            for box, view in zip(boxed.boxes, boxed.views, strict=True):
                wanted = whole[name][box.slices()]
                self.dtypes.add((kind, str(wanted.dtype), str(view.dtype)))
                assert torch.equal(view, wanted.to(view.dtype)), (name, box)
                self.elements[kind] = self.elements.get(kind, 0) + box.numel


def read_whole(folder: Path, names: list[str]) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint, by one rank for itself."""
    reader = store.BoxReader(folder)
    found = {}
    for name in names:
        stored = reader.index[name]
        found[name] = torch.full(stored.shape, -1.0).to(stored.dtype)
        for piece in stored.boxes:
            file = DataFileReader(folder / piece.file)
            view = found[name][piece.box.slices()]
            whole = store.Box.whole(piece.box.sizes)
            file.read(view, piece.start, stored.dtype, piece.box.sizes, whole)
            file.close()
    return found


def go_on(rank: int, world_size: int, run: Run, checkpoint: str) -> dict[str, Any]:
    """Load, compare, and make one step."""
    model = GPTModel(
        run.config,
        OptimizerConfig(lr=run.learning_rate),
        SchedulerConfig(lr_warmup_steps=2, lr_decay_steps=STEPS),
    )
    recorder, compare = Recorder(run), Compare(checkpoint)
    trainer = L.Trainer(
        strategy=make_strategy(run.layout),
        accelerator="cpu",
        devices=world_size,
        max_steps=SAVED_AT + 1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=[recorder, compare],
    )
    trainer.fit(model, Batches(run), ckpt_path=checkpoint)
    return {"losses": recorder.losses, "elements": compare.elements, "dtypes": compare.dtypes}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By layout: the checkpoint after three steps, made when it is first asked for."""

    @cache
    def make(layout: str) -> Path:
        folder = tmp_path_factory.mktemp(layout)
        ranks = (LAYOUTS | MOMENTS)[layout][0]
        run_ranks_fresh(fit, ranks, run_of(layout), str(folder), SAVED_AT, None)
        return folder / "last.ckpt"

    return make


@pytest.fixture(scope="module")
def next_loss(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Of the fourth step in one process, without interruption."""
    folder = str(tmp_path_factory.mktemp("whole"))
    [whole] = run_ranks_fresh(fit, 1, run_of("single"), folder, SAVED_AT + 1, None)
    return whole["losses"][SAVED_AT]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(one, other, marks=[] if (one, other) in FAST else pytest.mark.slow)
        for one, other in itertools.product(LAYOUTS, LAYOUTS)
    ],
)
def test_save_here_load_there(source: str, target: str, saved: Any, next_loss: float) -> None:
    checkpoint = saved(source)
    ranks = run_ranks_fresh(go_on, LAYOUTS[target][0], run_of(target), str(checkpoint))
    parameters = sum(map(math.prod, GPTModel(CONFIG).global_shapes().values()))
    for kind in ("model", "optimizer.0.exp_avg", "optimizer.0.exp_avg_sq"):
        assert sum(rank["elements"][kind] for rank in ranks) >= parameters, kind
    moments = read_whole(
        checkpoint, ["optimizer.0.exp_avg_sq.network.decoder.final_layernorm.weight"]
    )
    assert all(bool((value > 0).any()) for value in moments.values())
    for rank in ranks:
        assert all(saved_as == held_as for _, saved_as, held_as in rank["dtypes"])
        assert len(rank["losses"]) == 1
        tolerances.assert_loss_close(rank["losses"][0], next_loss, SAVED_AT)


@pytest.mark.parametrize(
    ("source", "target", "change"),
    [
        ("dp2_zero_bf16_moments", "tp2", ("torch.bfloat16", "torch.float32")),
        pytest.param(
            "tp2",
            "dp2_zero_bf16_moments",
            ("torch.float32", "torch.bfloat16"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_moments_of_another_dtype(
    source: str, target: str, change: tuple[str, str], saved: Any, next_loss: float
) -> None:
    """Widened exactly, or rounded to nearest; the loss of the next step needs no moments."""
    ranks = run_ranks_fresh(go_on, 2, run_of(target), str(saved(source)))
    for rank in ranks:
        for kind in ("optimizer.0.exp_avg", "optimizer.0.exp_avg_sq"):
            assert (kind, *change) in rank["dtypes"]
            assert not [
                found for found in rank["dtypes"] if found[0] == kind and found[1:] != change
            ]
        tolerances.assert_loss_close(rank["losses"][0], next_loss, SAVED_AT, torch.bfloat16)
