"""Reported cases on checkpoints, through `Trainer.fit(ckpt_path=...)`."""

import logging
import pickle
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

import megatron_lightning.checkpoint as store
from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.data import PretrainingDataModule, preprocess_jsonl
from megatron_lightning.models import GPTModel
from tests import tolerances
from tests.harness import run_ranks_fresh
from tests.layout_runs import Batches, Recorder, Run, tiny_config
from tests.user_modules import OwnTransformer, decoder_plan
from tests.user_runs import quiet_trainer, user_run

# ---------------------------------------------------------------- C34


class SaveAtStart(L.Callback):
    """Saves what was loaded, before the first step."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def go_on(
    rank: int, world_size: int, run: Run, resume: str | None, at_start: str, at_end: str
) -> list[float]:
    """Fit up to `run.steps`, from `resume`; save what was loaded, and the end."""
    model = GPTModel(
        run.config,
        OptimizerConfig(lr=run.learning_rate),
        SchedulerConfig(lr_warmup_steps=1, lr_decay_steps=4),
    )
    recorder = Recorder(run)
    callbacks = [recorder, SaveAtStart(at_start)] if at_start else [recorder]
    trainer = quiet_trainer(run, world_size, callbacks)
    trainer.fit(model, Batches(run), ckpt_path=resume)
    if at_end:
        trainer.save_checkpoint(at_end)
    return recorder.losses


def everything(folder: str) -> dict[str, Tensor]:
    """Every global tensor of a checkpoint."""
    tensors = {
        name: torch.empty(info.shape, dtype=info.dtype)
        for name, info in store.list_tensors(folder).items()
    }
    store.load(folder, tensors)
    return tensors


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "tp4": (4, dict(tensor_parallel_size=4)),
    "pp2": (2, dict(pipeline_parallel_size=2)),
    "pp2_interleaved": (2, dict(pipeline_parallel_size=2, virtual=2)),
}


def wide(**layout: Any) -> Run:
    """50257 tokens, 5 layers (which no stages divide), four key/value groups."""
    config = tiny_config(
        vocab_size=50257,
        num_layers=5,
        hidden_size=16,
        ffn_hidden_size=32,
        num_query_groups=4,
        make_vocab_size_divisible_by=128,
    )
    return Run(config=config, layout=layout, steps=2, keep_gradients=())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Tensor], list[float]]:
    """A checkpoint of TP=2 x DP=2 after two steps; its tensors, and the losses of four steps."""
    folder = tmp_path_factory.mktemp("c34")
    path = str(folder / "two.ckpt")
    run = wide(tensor_parallel_size=2)
    run_ranks_fresh(go_on, 4, run, None, "", path)
    longer = Run(config=run.config, layout=run.layout, steps=3, keep_gradients=())
    [losses, *_] = run_ranks_fresh(go_on, 4, longer, None, "", "")
    return path, everything(path), losses


@pytest.mark.parametrize(
    "layout",
    [
        "single",
        pytest.param("tp4", marks=pytest.mark.slow),
        pytest.param("pp2", marks=pytest.mark.slow),
        "pp2_interleaved",
    ],
)
def test_c34_another_layout_holds_the_same(
    layout: str, saved: tuple[str, dict[str, Tensor], list[float]], tmp_path: Path
) -> None:
    """C34: weights and both moments bitwise; the next loss within tolerance."""
    path, tensors, losses = saved
    size, options = LAYOUTS[layout]
    run = wide(**options)
    longer = Run(config=run.config, layout=options, steps=3, keep_gradients=())
    again = str(tmp_path / "again.ckpt")
    [got, *_] = run_ranks_fresh(go_on, size, longer, path, again, "")
    found = everything(again)
    assert found.keys() == tensors.keys()
    assert found["model.network.output_layer.weight"].shape == (50257, 16)
    assert sum(name.startswith("optimizer.0.exp_avg") for name in found) >= 2 * 5
    for name, value in tensors.items():
        assert torch.equal(found[name], value), name
    assert len(got) == 1
    tolerances.assert_loss_close(got[0], losses[2], 2)


# ---------------------------------------------------------------- C32


def passes(rank: int, world_size: int, folder: str, epochs: int, resume: str | None) -> Any:
    """Samples (by first tokens) of each epoch, and the step count at its end."""
    rows: list[list[tuple[int, ...]]] = []
    steps: list[int] = []

    class Rows(L.Callback):
        def on_train_epoch_start(self, *_: Any) -> None:
            rows.append([])

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            rows[-1] += [tuple(row[:6].tolist()) for row in batch["tokens"]]

        def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
            steps.append(trainer.global_step)

    run = Run(
        config=tiny_config(num_layers=1),
        steps=-1,
        trainer=dict(max_epochs=epochs, limit_val_batches=0, enable_checkpointing=True),
    )
    saver = ModelCheckpoint(folder, save_last=True, every_n_epochs=1)
    trainer = quiet_trainer(run, world_size, [Rows(), saver])
    data = PretrainingDataModule(f"{folder}/corpus", 16, 2, 4, split="1,0,0")
    trainer.fit(GPTModel(run.config), data, ckpt_path=resume)
    return rows, steps, trainer.global_step


def test_c32_resume_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    """C32: consumed samples = one pass. Epoch 2 begins, in its own order; steps go on."""
    lines = tmp_path / "in.jsonl"
    lines.write_text("".join(f'{{"text": "document {n} {n * 7919}"}}\n' for n in range(40)))
    preprocess_jsonl(lines, tmp_path / "corpus", "bytes")
    folder = str(tmp_path)
    [(whole, _, total)] = run_ranks_fresh(passes, 1, folder, 2, None)
    shutil.rmtree(tmp_path / "last.ckpt")
    [(first, _, half)] = run_ranks_fresh(passes, 1, folder, 1, None)
    [(second, steps, end)] = run_ranks_fresh(passes, 1, folder, 2, str(tmp_path / "last.ckpt"))
    assert first == whole[:1]
    assert second == whole[1:]
    assert second[0] != first[0]
    assert len(set(second[0]) - set(first[0])) < 4  # the same samples, but for a short last batch
    assert steps == [2 * half]
    assert end == total == 2 * half


# ---------------------------------------------------------------- C33


class Unused(OwnTransformer):
    """With a frozen part, and one whose parameters never get a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.net.unused = nn.Linear(3, 3)
        self.net.words.weight.requires_grad_(False)


def fit_unused(
    rank: int, world_size: int, layout: dict[str, Any], resume: str | None, start: str, end: str
) -> dict[str, Any]:
    plan = decoder_plan()
    splits = {**plan.splits, "unused.*": next(iter(plan.splits.values()))}
    plan = type(plan)(
        splits=splits,
        layers="blocks",
        first=("words", "positions", "gate", "unused"),
        last=("norm", "head"),
        sequence_dim=1,
    )
    run = user_run(layout=layout | dict(plan=plan), steps=4 if resume else 2)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron_lightning").addHandler(handler)
    recorder = Recorder(run)
    trainer = quiet_trainer(run, world_size, [recorder, SaveAtStart(start)])
    trainer.fit(Unused(), Batches(run), ckpt_path=resume)
    trainer.save_checkpoint(end)
    fresh = [message for message in messages if "no optimizer state" in message]
    return {"losses": recorder.losses, "step": trainer.global_step, "fresh": fresh}


@pytest.mark.parametrize("layout", [dict(tensor_parallel_size=2), dict(pipeline_parallel_size=2)])
def test_c33_states_that_are_not_there(layout: dict[str, Any], tmp_path: Path) -> None:
    """C33: saved before the first step, with a frozen parameter and one without a gradient."""
    zero, two, four = (str(tmp_path / f"{name}.ckpt") for name in ("zero", "two", "four"))
    scratch = str(tmp_path / "scratch.ckpt")
    whole = run_ranks_fresh(fit_unused, 2, layout, None, zero, two)
    from_start = run_ranks_fresh(fit_unused, 2, layout, zero, scratch, four)
    assert from_start[0]["step"] == 4
    assert from_start[0]["losses"][:2] == whole[0]["losses"]
    assert len(from_start[0]["fresh"]) == 1  # said once, on the first rank
    assert not from_start[1]["fresh"]
    shutil.rmtree(four)
    from_two = run_ranks_fresh(fit_unused, 2, layout, two, scratch, four)
    assert from_two[0]["step"] == 4
    assert from_two[0]["losses"] == from_start[0]["losses"][2:]


# ---------------------------------------------------------------- C37


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.marker),)


def resume_from(rank: int, world_size: int, folders: list[str]) -> list[str]:
    """The messages of fits that resume from damaged checkpoints."""
    messages = []
    for folder in folders:
        run = Run(config=tiny_config(num_layers=1), steps=2)
        try:
            quiet_trainer(run, world_size, []).fit(
                GPTModel(run.config), Batches(run), ckpt_path=folder
            )
        except Exception as error:
            messages.append(str(error))
        else:
            messages.append("loaded")
    return messages


def test_c37_a_pickle_in_place_of_any_file(tmp_path: Path) -> None:
    """C37: the load fails and names the file; nothing was run."""
    good, marker = tmp_path / "good.ckpt", tmp_path / "marker"
    run = Run(config=tiny_config(num_layers=1), steps=1, keep_gradients=())
    run_ranks_fresh(go_on, 1, run, None, "", str(good))
    files = sorted(path.relative_to(good) for path in good.rglob("*") if path.is_file())
    assert len(files) >= 4
    folders = []
    for number, file in enumerate(files):
        copy = tmp_path / f"bad{number}.ckpt"
        shutil.copytree(good, copy)
        (copy / file).write_bytes(pickle.dumps(Bomb(str(marker))))
        folders.append(str(copy))
    [messages] = run_ranks_fresh(resume_from, 1, [*folders, str(good)])
    assert messages.pop() == "loaded"
    for file, message in zip(files, messages, strict=True):
        assert file.name in message, (file, message)
    assert not marker.exists()
    pickle.loads(pickle.dumps(Bomb(str(marker))))  # the bomb itself works
    assert marker.exists()


def test_c37_a_single_file_is_no_checkpoint(tmp_path: Path) -> None:
    marker, file = tmp_path / "marker", tmp_path / "old.ckpt"
    file.write_bytes(pickle.dumps(Bomb(str(marker))))
    [message] = run_ranks_fresh(resume_from, 1, [str(file)])[0]
    assert "old.ckpt" in message
    assert not marker.exists()
