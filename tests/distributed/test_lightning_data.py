"""Data under Lightning's flags and hooks: who reads which samples, and what a batch may be."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
)

from megatron_lightning.strategies import steps
from tests.harness import RankError, run_ranks_fresh
from tests.lightning_cases import (
    LAYOUTS,
    Case,
    Net,
    Probe,
    assert_same,
    cases_of,
    make_data,
    numbers,
    run_all,
)

# ---------------------------------------------------------------------- hooks


class Module(L.LightningDataModule):
    """Writes down which hooks are called."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.seen: list[str] = []

    def prepare_data(self) -> None:
        self.seen.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.seen.append(f"setup {stage}")

    def teardown(self, stage: str) -> None:
        self.seen.append(f"teardown {stage}")

    def train_dataloader(self) -> Any:
        self.seen.append("train")
        return self.case.train_loader(2)

    def val_dataloader(self) -> Any:
        self.seen.append("val")
        return self.case.loader(1, seed=6)

    def test_dataloader(self) -> Any:
        self.seen.append("test")
        return self.case.loader(1, seed=6)

    def predict_dataloader(self) -> Any:
        self.seen.append("predict")
        return self.case.loader(1, seed=6)

    def on_before_batch_transfer(self, batch: Any, index: int) -> Any:
        self.seen.append("before_transfer")
        return batch

    def transfer_batch_to_device(self, batch: Any, device: Any, index: int) -> Any:
        self.seen.append("transfer")
        return super().transfer_batch_to_device(batch, device, index)

    def on_after_batch_transfer(self, batch: Any, index: int) -> Any:
        self.seen.append("after_transfer")
        return [batch[0] * 2, batch[1]]  # reaches the step

    def state_dict(self) -> dict[str, Any]:
        self.seen.append("state_dict")
        return {"kept": 7}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen.append(f"load {state}")


def data_module(case: Case) -> dict[str, Any]:
    data = Module(case)
    probe = Probe()
    trainer = case.trainer(probe)
    module = Net()
    trainer.fit(module, datamodule=data)
    trainer.save_checkpoint(case.folder / f"{case.layout}.ckpt")
    trainer.test(module, datamodule=data)
    trainer.predict(module, datamodule=data)
    again = case.trainer(max_epochs=2)
    again.fit(Net(), datamodule=data, ckpt_path=case.folder / f"{case.layout}.ckpt")
    if case.rank > 0:  # Lightning prepares on one rank of a machine
        assert "prepare_data" not in data.seen
    return {
        "losses": probe.losses,
        "seen": [each for each in data.seen if each != "prepare_data"],
        "rank0": {"prepared": data.seen.count("prepare_data")},
    }


class Reloading(Net):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.calls = case, 0

    def train_dataloader(self) -> Any:
        self.calls += 1
        return self.case.train_loader(self.calls)  # longer every time


def reload(case: Case) -> dict[str, Any]:
    module, probe = Reloading(case), Probe()
    trainer = case.trainer(probe, max_epochs=4, reload_dataloaders_every_n_epochs=2)
    trainer.fit(module)
    return {"calls": module.calls, **probe.facts(trainer)}


# ---------------------------------------------------------------------- batches


class Named(Net):
    """Batches are mappings, with fields that nobody knows and one that is no tensor."""

    def loss(self, batch: Any) -> Tensor:
        assert batch["note"] == "plain"
        return super().loss((batch["pixels"], batch["targets"]))


def collate(samples: list[Any]) -> dict[str, Any]:
    x, y = zip(*samples, strict=True)
    return {"pixels": torch.stack(x), "targets": torch.stack(y), "note": "plain"}


def mappings(case: Case) -> dict[str, Any]:
    probe = Probe()
    strategy = case.strategy(**({} if case.alone else {"batch_dims": {"pixels": 0, "targets": 0}}))
    trainer = case.trainer(probe, strategy=strategy)
    loader = case.train_loader()
    loader.collate_fn = collate
    trainer.fit(Named(), loader)
    return {**probe.facts(trainer), "weights": case.weights(trainer)}


class Pairs(Net):
    """A training batch of two loaders, and two validation loaders."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = torch.cat([batch["a"][0], batch["b"][0]])
        y = torch.cat([batch["a"][1], batch["b"][1]])
        return self.loss((x, y))

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", self.loss(batch) * (1 + dataloader_idx))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self(batch[0]) + dataloader_idx


def several_loaders(case: Case) -> dict[str, Any]:
    probe = Probe()
    trainer = case.trainer(probe)
    trainer.fit(
        Pairs(),
        {"a": case.train_loader(4), "b": case.train_loader(4)},
        [case.loader(1, seed=6), case.loader(2, seed=7)],
    )
    predicted = trainer.predict(Pairs(), [case.loader(1, seed=6), case.loader(1, seed=7)])
    return {
        **probe.facts(trainer),
        "metrics": numbers(trainer.callback_metrics),
        "first": case.own_part(torch.cat(predicted[0])),
        "second": case.own_part(torch.cat(predicted[1])),
    }


class Stream(IterableDataset):
    """Every rank reads all of it: Lightning deals out nothing here."""

    def __iter__(self) -> Any:
        x, y = make_data(3).tensors
        return iter(zip(x, y, strict=True))


def stream(case: Case) -> dict[str, Any]:
    probe = Probe()
    trainer = case.trainer(probe, max_epochs=2)
    trainer.fit(Net(), DataLoader(Stream(), batch_size=8))
    return {**probe.facts(trainer), "weights": case.weights(trainer)}


SCENARIOS = [data_module, reload, mappings, several_loaders, stream]


GROUPS = [(("dp", "tp", "pp"), SCENARIOS)]


@pytest.mark.parametrize(("scenario", "layout", "group"), cases_of(GROUPS))
def test_same_meaning(scenario: Any, layout: str, group: Any) -> None:
    assert_same(scenario, layout, group)


# ---------------------------------------------------------------------- who reads what (C55)


class Reader(Net):
    """Notes the samples of every training batch, by their number in the first feature."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.read.append([int(number) for number in batch[0][:, 0]])
        return super().training_step(batch, batch_idx)


def numbered() -> TensorDataset:
    x = torch.zeros(32, 6)
    x[:, 0] = torch.arange(32)
    return TensorDataset(x, torch.zeros(32, 1))


def read(
    rank: int, world_size: int, layout: dict[str, Any], loader: str, flags: dict[str, Any]
) -> Any:
    """(data-parallel rank, samples of each batch of two epochs) of one rank."""
    torch.manual_seed(rank)  # nothing keeps the random states of ranks equal
    data = numbered()
    own = WeightedRandomSampler([1.0] * 32, 32)
    options: dict[str, Any] = {
        "plain": {"batch_size": 4},
        "shuffled": {"batch_size": 4, "shuffle": True},
        "own_sampler": {"batch_size": 4, "sampler": own},
        "own_batches": {
            "batch_sampler": OwnBatches(own, 4),
        },
    }[loader]
    case = Case("tp_dp", rank, world_size, None)  # type: ignore[arg-type]
    strategy = case.strategy(**layout)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=world_size,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **flags,
    )
    module = Reader()
    trainer.fit(module, DataLoader(data, **options))
    return strategy.mesh.dp.rank, module.read


class OwnBatches:
    """A batch sampler of the user's own class."""

    def __init__(self, sampler: Any, size: int) -> None:
        self.sampler, self.size = sampler, size

    def __len__(self) -> int:
        return len(self.sampler) // self.size

    def __iter__(self) -> Any:
        drawn = list(self.sampler)
        return iter([drawn[i : i + self.size] for i in range(0, len(drawn), self.size)])


TP_DP = {"tensor_parallel_size": 2}
TP = {"tensor_parallel_size": 2}


@pytest.mark.parametrize("loader", ["shuffled", "own_sampler"])
def test_peers_read_the_same_and_replicas_other_samples(loader: str) -> None:
    ranks = run_ranks_fresh(read, 4, TP_DP, loader, {})
    by_replica = {dp: [batches for other, batches in ranks if other == dp] for dp, _ in ranks}
    assert sorted(by_replica) == [0, 1]
    for first, second in by_replica.values():
        assert first == second  # tensor-parallel peers
    epochs = [
        sorted(
            i for batches in by_replica.values() for batch in batches[0][a : a + 4] for i in batch
        )
        for a in (0, 4)
    ]
    if loader == "shuffled":
        assert epochs == [list(range(32))] * 2  # disjoint, and everything once
        assert by_replica[0][0][:4] != by_replica[0][0][4:]  # another order in each epoch
    else:  # drawn with replacement, once for all ranks: both replicas together have one drawing
        assert all(len(epoch) == 32 for epoch in epochs)
        assert by_replica[0][0] != by_replica[1][0]


@pytest.mark.parametrize("loader", ["plain", "shuffled", "own_sampler", "own_batches"])
def test_one_replica_reads_as_one_process(loader: str) -> None:
    """Nothing is dealt: order and random draws are the loader's own, on both ranks."""
    (_, first), (_, second) = run_ranks_fresh(read, 2, TP, loader, {})
    assert first == second
    everything = [i for batch in first[:8] for i in batch]
    if loader == "plain":
        assert everything == list(range(32))
    elif loader == "shuffled":
        assert everything != list(range(32))
        assert sorted(everything) == list(range(32))


def test_without_distributed_sampler() -> None:
    """The user's sampler stays: replicas draw for themselves, peers of one copy together."""
    flags = {"use_distributed_sampler": False}
    ranks = run_ranks_fresh(read, 4, TP_DP, "shuffled", flags)
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    assert len(ranks[0][1][0]) == 4
    assert sorted(i for batch in ranks[0][1][:8] for i in batch) == list(range(32))
    assert ranks[0][1] != ranks[2][1]


class Noisy(Net):
    """Adds noise from the random state of the process, which differs."""

    def on_after_batch_transfer(self, batch: Any, index: int) -> Any:
        return [batch[0] + torch.randn_like(batch[0]), batch[1]]


def noise(case: Case) -> dict[str, Any]:
    torch.manual_seed(case.rank)
    return case.fit(module=Noisy())


@pytest.mark.parametrize("layout", ["tp", "pp"])
def test_different_batches_within_a_copy_are_an_error(layout: str, tmp_path: Any) -> None:
    with pytest.raises(RankError, match="ranks of one model copy got different batches"):
        run_ranks_fresh(run_all, LAYOUTS[layout][0], layout, [noise], str(tmp_path), timeout=60)


LATE = 6


class Late(Net):
    """Changes one batch, after the first ones, otherwise on each rank."""

    trained = 0

    def on_after_batch_transfer(self, batch: Any, index: int) -> Any:
        late = self.trainer.training and self.trained == LATE
        self.trained += self.trainer.training
        return [batch[0] + self.global_rank, batch[1]] if late else batch


def another_batch(case: Case) -> dict[str, Any]:
    steps.MARK_EVERY = LATE
    return case.fit(module=Late(), batches=LATE + 2, validate=False)


def another_batch_before_validation(case: Case) -> dict[str, Any]:
    steps.MARK_EVERY = LATE
    return case.fit(module=Late(), batches=LATE + 1)


def another_batch_at_the_end(case: Case) -> dict[str, Any]:
    steps.MARK_EVERY = LATE
    return case.fit(module=Late(), batches=LATE + 1, validate=False)


@pytest.mark.parametrize("layout", ["tp", "pp"])
def test_a_later_batch_is_compared_with_the_one_after_it(layout: str, tmp_path: Any) -> None:
    """So that nobody waits for the device; of the very last batch nobody hears any more."""
    size = LAYOUTS[layout][0]
    for scenario in (another_batch, another_batch_before_validation):
        with pytest.raises(RankError, match="ranks of one model copy got different batches"):
            run_ranks_fresh(run_all, size, layout, [scenario], str(tmp_path), timeout=60)
    run_ranks_fresh(run_all, size, layout, [another_batch_at_the_end], str(tmp_path), timeout=60)


class WithoutIndex(Late):
    """A step function without the batch's index."""

    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        return super().training_step(batch, 0)


def another_batch_without_index(case: Case) -> dict[str, Any]:
    marked, inner = [], steps.fingerprint

    def counted(batch: Any) -> int:
        marked.append(batch)
        return inner(batch)

    steps.fingerprint = counted
    case.fit(module=WithoutIndex(), batches=LATE + 2, validate=False)
    return {"at once": len(marked)}


def test_without_an_index_the_first_batches_are_compared_at_once(tmp_path: Any) -> None:
    ranks = run_ranks_fresh(run_all, 2, "tp", [another_batch_without_index], str(tmp_path))
    for rank in ranks:
        assert rank["another_batch_without_index"]["at once"] == steps.MARKED_BATCHES
