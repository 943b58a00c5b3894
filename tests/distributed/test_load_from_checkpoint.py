"""`load_from_checkpoint` on one device, of users' modules, from any layout."""

import pickle
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

import megatron_lightning.checkpoint as store
from megatron_lightning.config import DataParallelConfig
from megatron_lightning.strategies import MegatronStrategy
from tests.harness import run_ranks_fresh
from tests.layout_runs import Batches, make_strategy
from tests.user_modules import Decoder, OwnTransformer, decoder_plan
from tests.user_runs import quiet_trainer, user_run


class Tied(OwnTransformer):
    """One parameter under two names, and hyper-parameters."""

    def __init__(self, lr: float = 1e-3, words: tuple[str, ...] = ("a",)) -> None:
        super().__init__(lambda: Decoder(tied=True), lr=lr)
        self.save_hyperparameters()


class Statistics(L.LightningModule):
    """Batch norm, no plan."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.body(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_tied(rank: int, world_size: int, layout: dict[str, Any], folder: str) -> None:
    run = user_run(layout=layout | dict(plan=decoder_plan(tied=True)), steps=2)
    run.trainer.update(limit_val_batches=0)
    trainer = quiet_trainer(run, world_size, [])
    trainer.fit(Tied(lr=0.01, words=("b", "c")), Batches(run))
    trainer.save_checkpoint(folder)


def no_pickle(patch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was unpickled")

    for owner, name in ((torch, "load"), (pickle, "load"), (pickle, "loads")):
        patch.setattr(owner, name, refuse)


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (2, dict(tensor_parallel_size=2)),
        (2, dict(pipeline_parallel_size=2)),
        pytest.param(2, {}, marks=pytest.mark.slow),
        pytest.param(
            2, dict(data_parallel=DataParallelConfig(sharding="fsdp")), marks=pytest.mark.slow
        ),
    ],
)
def test_own_module_with_tied_parameters(
    size: int, layout: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.ckpt"
    run_ranks_fresh(fit_tied, size, layout, str(path))
    with monkeypatch.context() as patch:
        no_pickle(patch)
        module: Any = Tied.load_from_checkpoint(path)
        other: Any = Tied.load_from_checkpoint(str(path), map_location="cpu", lr=0.5)
    assert (module.lr, module.hparams["words"], other.lr) == (0.01, ("b", "c"), 0.5)
    assert module.net.head.weight is module.net.words.weight
    names = {name for name, _ in module.named_parameters()}
    stored = {name: torch.empty(0) for name in store.list_tensors(path)}
    assert {f"model.{name}" for name in names} <= stored.keys()
    wanted = {f"model.{n}": torch.empty(p.shape) for n, p in module.named_parameters()}
    store.load(path, wanted, strict="unexpected_ok")
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, wanted[f"model.{name}"]), name
    fresh: Any = Tied()
    assert not torch.equal(fresh.net.words.weight, module.net.words.weight)


def fit_statistics(rank: int, world_size: int, folder: str) -> tuple[dict[str, Tensor], list[str]]:
    saver = ModelCheckpoint(folder, save_last=True, save_weights_only=True)
    trainer = L.Trainer(
        strategy=make_strategy({}),
        accelerator="cpu",
        devices=world_size,
        max_epochs=1,
        logger=False,
        callbacks=[saver],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module: Any = Statistics(5)
    rows = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=4))  # type: ignore[arg-type]
    state = {name: value.clone() for name, value in module.state_dict().items()}
    if rank == 0:  # one rank may load alone
        again = Statistics.load_from_checkpoint(saver.last_model_path)
        different = [n for n, v in again.state_dict().items() if not torch.equal(v, state[n])]
        return state, different
    return state, []


def test_buffers_and_one_rank_alone(tmp_path: Path) -> None:
    (state, different), _ = run_ranks_fresh(fit_statistics, 2, str(tmp_path))
    assert different == []
    module: Any = Statistics.load_from_checkpoint(tmp_path / "last.ckpt")
    for name, value in module.state_dict().items():
        assert torch.equal(value, state[name]), name
    with pytest.raises(RuntimeError, match="size mismatch"):
        Statistics.load_from_checkpoint(tmp_path / "last.ckpt", width=6)


def test_damage_is_named_and_files_are_read_as_ever(tmp_path: Path) -> None:
    assert MegatronStrategy is not None  # its import is what lets folders be read
    trainer = L.Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_progress_bar=False, barebones=True
    )
    module: Any = Statistics(5)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "file.ckpt")
    again: Any = Statistics.load_from_checkpoint(tmp_path / "file.ckpt", weights_only=False)
    assert torch.equal(again.body[0].weight, module.body[0].weight)
    store.save(tmp_path / "b.ckpt", {"model.body.0.weight": torch.ones(5, 4)}, {})
    with pytest.raises(RuntimeError, match="Missing key"):
        Statistics.load_from_checkpoint(tmp_path / "b.ckpt", width=5)
    (tmp_path / "b.ckpt" / "objects.json").write_bytes(pickle.dumps("x"))
    with pytest.raises(store.CheckpointError, match=r"objects.json"):
        Statistics.load_from_checkpoint(tmp_path / "b.ckpt", width=5)
