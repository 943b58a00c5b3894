"""`HFExport`: folders written while training goes on, in layouts."""

import json
import threading
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from megatron_lightning.bridge import from_hf
from megatron_lightning.bridge.background import HostCopy
from megatron_lightning.bridge.writing import Export
from megatron_lightning.callbacks import HFExport
from megatron_lightning.config import DataParallelConfig, GPTConfig
from megatron_lightning.models import GPTModel
from tests.harness import RankError, run_ranks_fresh
from tests.hf_models import LOCAL, Batches, Recorded, assert_same_tensors, tensors_of
from tests.layout_runs import make_strategy

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "tp2_pp2": (4, dict(tensor_parallel_size=2, pipeline_parallel_size=2)),
    "fsdp2": (2, dict(data_parallel=DataParallelConfig(sharding="fsdp"))),
    "zero1": (2, dict(data_parallel=DataParallelConfig(sharding="optimizer"))),
    "ep2": (2, dict(expert_parallel_size=2)),
}
SLOW = ("zero1",)
MODELS = {"ep2": "deepseek_v3"}


class Snapshots(L.Callback):
    """What `save_hf` writes at these steps, while training waits."""

    reads_parameters = False

    def __init__(self, out: Path, steps: tuple[int, ...]) -> None:
        self.out, self.steps = out, steps

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step in self.steps:
            module.save_hf(self.out / f"step-{trainer.global_step:08d}")


class Paced(L.Callback):
    """Lets exports be written once a step has begun beside one."""

    def __init__(self) -> None:
        self.began = threading.Event()
        write = Export.write

        def later(export: Export, *args: Any) -> None:
            if threading.current_thread().name == "export":
                assert self.began.wait(60)
            write(export, *args)

        Export.write = later  # type: ignore[method-assign]

    def on_train_batch_start(self, *_: Any) -> None:
        if any(thread.name == "export" for thread in threading.enumerate()):
            self.began.set()


def fit(
    devices: int,
    layout: dict[str, Any],
    callbacks: list[L.Callback],
    steps: int,
    *,
    name: str = "qwen2",
    **options: Any,
) -> Any:
    recorded = Recorded.read(LOCAL / name)
    model = from_hf(LOCAL / name)
    trainer = L.Trainer(
        strategy=make_strategy(layout),
        accelerator="cpu",
        devices=devices,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=callbacks,
    )
    trainer.fit(model, Batches(*[recorded.batch()] * steps), **options)
    return trainer


def export(rank: int, world_size: int, layout: dict[str, Any], out: str, model: str) -> list[str]:
    exports = HFExport(Path(out) / "beside", every_n_steps=2, verify=True, max_shard_bytes=20_000)
    fit(
        world_size,
        layout,
        [exports, Snapshots(Path(out) / "at_once", (2, 5)), Paced()],
        5,
        name=model,
    )
    return [path.name for path in exports.exported]


@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in LAYOUTS]
)
def test_exports_are_those_of_their_steps(tmp_path: Path, layout: str) -> None:
    """Training goes on meanwhile, weights of the step are written; and those of the end."""
    world_size, options = LAYOUTS[layout]
    model = MODELS.get(layout, "qwen2")
    for exported in run_ranks_fresh(export, world_size, options, str(tmp_path), model):
        assert exported[0] == "step-00000002"
        assert exported[-1] == "step-00000005"
    for step in (2, 5):
        name = f"step-{step:08d}"
        at_once = tmp_path / "at_once" / name
        assert_same_tensors(tmp_path / "beside" / name, at_once)
        config = json.loads((tmp_path / "beside" / name / "config.json").read_text())
        assert config == json.loads((at_once / "config.json").read_text())
        assert (
            f"| optimizer steps | {step} |"
            in (tmp_path / "beside" / name / "README.md").read_text()
        )
    assert not list((tmp_path / "beside").glob(".*"))


def export_and_resume(rank: int, world_size: int, out: str) -> list[list[str]]:
    layout, found = dict(tensor_parallel_size=2), []
    folder, checkpoint = Path(out) / "x", Path(out) / "x.ckpt"
    exports = HFExport(folder, every_n_steps=1, at_end=False, keep=2)
    trainer = fit(world_size, layout, [exports], 4)
    trainer.save_checkpoint(checkpoint)
    found.append(sorted(p.name for p in folder.iterdir()))
    if rank == 0:
        (folder / ".step-00000009.abcd.partial").mkdir()
        (folder / "step-3").mkdir()  # of somebody else
    again = HFExport(folder, every_n_steps=5, keep=1)
    fit(world_size, layout, [again], 6, ckpt_path=str(checkpoint))
    found.append(sorted(p.name for p in folder.iterdir()))
    return found


def test_kept_count_and_resume(tmp_path: Path) -> None:
    """The newest stay, also over a resume; what a killed run left is removed, and nothing
    else.
    """
    (first, second), _ = run_ranks_fresh(export_and_resume, 2, str(tmp_path))
    assert len(first) == 2
    assert first[-1] == "step-00000004"
    assert second == ["step-00000006", "step-3"]


def fail_on_one(rank: int, world_size: int, out: str) -> None:
    def broken(export: Export, *_: Any) -> None:
        raise OSError("no space left")

    if rank == 1:
        Export.write = broken  # type: ignore[method-assign]
    fit(world_size, dict(tensor_parallel_size=2), [HFExport(out, every_n_steps=1)], 50)


def test_a_failure_of_one_rank_ends_the_fit(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 1: OSError: no space left"):
        run_ranks_fresh(fail_on_one, 2, str(tmp_path / "x"))
    assert not list((tmp_path / "x").iterdir())


def fail_to_copy(rank: int, world_size: int, out: str) -> None:
    def fails(*_: Any) -> None:
        raise MemoryError("no memory for the copy")

    if rank == 1:
        HostCopy.take = fails  # type: ignore[method-assign]
    fit(world_size, dict(tensor_parallel_size=2), [HFExport(out, every_n_steps=1)], 50)


def test_a_rank_that_cannot_copy_ends_the_fit_for_all(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="copying weights to be exported failed"):
        run_ranks_fresh(fail_to_copy, 2, str(tmp_path / "x"))
    assert not list((tmp_path / "x").iterdir())


class Stumble(L.Callback):
    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            raise RuntimeError("stumbled")


def stumble(rank: int, world_size: int, out: str) -> None:
    fit(world_size, {}, [HFExport(out, every_n_steps=2), Paced(), Stumble()], 5)


def test_an_exception_gives_up_what_is_under_way(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="stumbled"):
        run_ranks_fresh(stumble, 1, str(tmp_path / "x"))
    assert not list((tmp_path / "x").iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(every_n_steps=0), "every_n_steps=0: give at least 1"),
        (dict(keep=0), "keep=0: give at least 1"),
        (dict(at_end=False), "would export nothing"),
        (dict(dtype=torch.int8), "dtype=torch.int8: use one of"),
        (dict(max_shard_bytes=0), "max_shard_bytes=0: must be positive"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HFExport("x", **options)


def refused(rank: int, world_size: int, out: str, options: dict[str, Any]) -> None:
    fit(world_size, {}, [HFExport(out, **options)], 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "gpt2"}, "architecture='gpt2' is not this network"),
        ({"tokenizer": "nowhere"}, "tokenizer='nowhere': there is no such file or folder"),
    ],
)
def test_what_cannot_be_written_is_refused_before_training(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RankError, match=message):
        run_ranks_fresh(refused, 1, str(tmp_path / "x"), options)
    assert not (tmp_path / "x").exists()


def export_padded(rank: int, world_size: int, out: str) -> int:
    sizes = dict(vocab_size=50257, num_layers=1, hidden_size=8, num_attention_heads=2)
    model = GPTModel(GPTConfig(**sizes, make_vocab_size_divisible_by=128))
    trainer = L.Trainer(
        strategy=make_strategy(dict(tensor_parallel_size=2)),
        accelerator="cpu",
        devices=world_size,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    trainer.predict(model, Batches({"tokens": tokens}))  # type: ignore[arg-type]
    model.save_hf(out, verify=True)
    return model.built_network().embedding.word_embeddings.weight.shape[0]


def test_c01_padding_is_not_exported(tmp_path: Path) -> None:
    """Shapes are those of the true vocabulary, whatever ranks are padded to."""
    rows = run_ranks_fresh(export_padded, 2, str(tmp_path / "x"))
    assert rows == [50432 // 2] * 2
    found = tensors_of(tmp_path / "x")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert found[name].shape == (50257, 8)
