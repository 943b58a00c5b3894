"""`TokenLedger` in one process: entries, resume, batches that are not trained on, bad input."""

import csv
import gc
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from megatron_lightning.callbacks import TokenCounts, TokenLedger
from megatron_lightning.callbacks.ledger_exchange import _check_agreement
from megatron_lightning.data import PretrainingDataModule
from megatron_lightning.data.account import ACCOUNT
from megatron_lightning.data.loader import DataWorkerError
from tests.data_runs import write_corpus

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Net(L.LightningModule):
    """Keeps the ids of what it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[int] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.seen += batch[ACCOUNT].sample_id.tolist()
        return (self.weight * batch["loss_mask"]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "c", 60, 1)


def data(corpus: str, **options: Any) -> PretrainingDataModule:
    values = dict(split="9,1", num_train_samples=48, tokenizer="bytes", eod_mask_loss=True)
    return PretrainingDataModule(corpus, 16, 1, 4, **{**values, **options})


def trainer(folder: Path, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    values = dict(max_steps=12, logger=False, limit_val_batches=0, enable_checkpointing=False)
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=list(callbacks),
        **{**values, **options},
    )


def entries(folder: Path) -> list[dict[str, str]]:
    with (folder / "token_ledger.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_file_and_logger(corpus: str, tmp_path: Path) -> None:
    ledger = TokenLedger(every_n_steps=5)
    logger = CSVLogger(tmp_path, name="", version="")
    trainer(tmp_path, ledger, logger=logger).fit(Net(), data(corpus))
    total = [row for row in entries(tmp_path) if row["source"] == "total"]
    assert [row["step"] for row in total] == ["5", "10", "12"]
    assert [row["samples"] for row in total] == ["20", "40", "48"]
    assert [row["tokens"] for row in total] == ["320", "640", "768"]
    last = [row for row in entries(tmp_path) if row["step"] == "12" and row["source"] != "total"]
    assert sum(int(row["documents"]) for row in last) == ledger.total.documents
    assert ledger.by_source() == {corpus: ledger.total}
    assert ledger.optimizer_steps == 12
    with (tmp_path / "metrics.csv").open(newline="") as file:
        logged = [row for row in csv.DictReader(file) if row["ledger/tokens"]]
    assert [float(row["ledger/tokens"]) for row in logged] == [320, 640, 768]
    assert float(logged[-1]["ledger/loss_tokens"]) == ledger.total.loss_tokens
    assert float(logged[-1][f"ledger/tokens/{corpus}"]) == 768


def test_counts_of_samples_that_are_trained_on(corpus: str, tmp_path: Path) -> None:
    net, ledger, module = Net(), TokenLedger(), data(corpus)
    trainer(tmp_path, ledger).fit(net, module)
    source: Any = module._train
    samples = [source[number] for number in net.seen]
    assert ledger.total.samples == len(samples) == 48
    assert ledger.total.loss_tokens == sum(int(s["loss_mask"].sum()) for s in samples)
    assert ledger.total.documents == sum(source.read(number)[1].documents for number in net.seen)


def test_resume_drops_later_entries_of_the_file(corpus: str, tmp_path: Path) -> None:
    whole = TokenLedger(every_n_steps=2)
    trainer(tmp_path / "whole", whole).fit(Net(), data(corpus))
    path = tmp_path / "saved.ckpt"

    class Save(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 6 and not path.exists():
                trainer.save_checkpoint(path)

    trainer(tmp_path / "parts", Save(), TokenLedger(every_n_steps=2), max_steps=10).fit(
        Net(), data(corpus)
    )
    ledger = TokenLedger(every_n_steps=2)
    trainer(tmp_path / "parts", ledger).fit(Net(), data(corpus), ckpt_path=path)
    assert ledger.state_dict() == whole.state_dict()
    assert entries(tmp_path / "parts") == entries(tmp_path / "whole")


def test_a_checkpoint_of_an_earlier_callback_counts_the_batch(corpus: str, tmp_path: Path) -> None:
    """The hook of a callback before the ledger saves: the batch has been trained on."""
    states: list[dict[str, Any]] = []
    ledger = TokenLedger()

    class Save(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            states.append(ledger.state_dict())

    trainer(tmp_path, Save(), ledger, max_steps=3).fit(Net(), data(corpus))
    assert [sum(row[2] for row in state["rows"]) for state in states] == [4, 8, 12]
    assert [state["skipped_samples"] for state in states] == [0, 0, 0]


def test_an_interrupted_batch_is_skipped(corpus: str, tmp_path: Path) -> None:
    ledger, states = TokenLedger(), []

    class Fails(Net):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
            if batch_idx == 2:
                states.append(ledger.state_dict())
                raise KeyError("stop")
            return super().training_step(batch, batch_idx)

    with pytest.raises(KeyError):
        trainer(tmp_path, ledger).fit(Fails(), data(corpus))
    assert sum(row[2] for row in states[0]["rows"]) == 8
    assert states[0]["skipped_samples"] == 4


def test_a_batch_that_a_hook_leaves_out_is_skipped(corpus: str, tmp_path: Path) -> None:
    class Leaves(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 1 and self.current_epoch == 0 else None

    ledger, net = TokenLedger(), Leaves()
    trainer(tmp_path, ledger, max_steps=5).fit(net, data(corpus))
    assert ledger.total.samples == len(net.seen) == 20
    assert ledger.skipped_samples == 4


def test_samples_left_out_of_an_epoch(corpus: str, tmp_path: Path) -> None:
    ledger, net = TokenLedger(), Net()
    module = data(corpus, num_train_samples=10)
    trainer(tmp_path, ledger, max_epochs=3, max_steps=-1).fit(net, module)
    assert ledger.total.samples == 24
    assert ledger.skipped_samples == 4  # two at the end of each of the first two epochs


def test_a_worker_that_is_killed(corpus: str, tmp_path: Path) -> None:
    """The error says what happened; a resumed run reads what the killed one would have."""
    whole = Net()
    trainer(tmp_path).fit(whole, data(corpus))
    path = tmp_path / "saved.ckpt"
    handlers: list[Any] = []

    class Kill(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 4:
                trainer.save_checkpoint(path)
                # torch's raises wherever we are
                handlers.append(signal.signal(signal.SIGCHLD, signal.SIG_DFL))
                os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)

    killed = Net()
    with pytest.raises(DataWorkerError, match="process that reads the data ended"):
        trainer(tmp_path, Kill()).fit(killed, data(corpus, num_workers=2))
    gc.collect()  # ends the other process, which the traceback holds
    assert not multiprocessing.active_children()
    signal.signal(signal.SIGCHLD, handlers[0])
    resumed = Net()
    trainer(tmp_path).fit(resumed, data(corpus, num_workers=1), ckpt_path=path)
    assert killed.seen[:16] + resumed.seen == whole.seen


def test_other_loaders_are_refused(tmp_path: Path) -> None:
    loader = torch.utils.data.DataLoader([{"loss_mask": torch.ones(3)}] * 4)
    with pytest.raises(ValueError, match="the batch has no 'account'"):
        trainer(tmp_path, TokenLedger()).fit(Net(), loader)


def test_bad_arguments_and_states() -> None:
    with pytest.raises(ValueError, match="every_n_steps=0"):
        TokenLedger(every_n_steps=0)
    with pytest.raises(ValueError, match="leave the callback out"):
        TokenLedger().load_state_dict({"fields": ["samples"]})
    assert TokenLedger().total == TokenCounts()


def test_disagreement_is_found() -> None:
    agree, disagree = [5, -5], [6, -5]
    _check_agreement(torch.tensor([agree, agree]))
    with pytest.raises(RuntimeError, match="different counts"):
        _check_agreement(torch.tensor([disagree, agree]))
    with pytest.raises(RuntimeError, match=r"data-parallel ranks \[1\]"):
        _check_agreement(torch.tensor([agree, agree, disagree]))
