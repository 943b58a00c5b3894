"""The loader's position: delivered batches, exact resume, any layout, Lightning's epochs."""

import itertools
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from megatron_lightning.data import GlobalBatchSampler, StatefulLoader


class Numbers:
    """26 samples that are their own number."""

    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        assert 0 <= index < 26
        return {"tokens": torch.tensor([index]), "loss_mask": torch.ones(1)}


def make(batch: int = 4, rank: int = 0, ranks: int = 1, workers: int = 0) -> StatefulLoader:
    sampler = GlobalBatchSampler(26, batch, dp_rank=rank, dp_size=ranks, seed=5, shuffle=True)
    return StatefulLoader(Numbers(), sampler, num_workers=workers)


def numbers(batch: dict[str, torch.Tensor]) -> list[int]:
    return batch["tokens"].flatten().tolist()


def passes(loader: StatefulLoader, count: int) -> list[list[int]]:
    return [[i for batch in loader for i in numbers(batch)] for _ in range(count)]


def test_passes_are_epochs_with_their_own_order() -> None:
    loader = make()
    assert len(loader) == 6
    first, second = passes(loader, 2)
    assert len(first) == len(second) == 24
    assert first != second
    assert loader.state_dict() == {
        "epoch": 1,
        "consumed_in_epoch": 24,
        "consumed_samples": 48,
        "pass_number": 0,
        "batches_in_pass": 6,
    }


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("taken", [1, 3, 6])
def test_counts_delivered_batches_and_resumes(workers: int, taken: int) -> None:
    """Workers have read ahead when the state is taken; a new loader takes the next batch."""
    whole = list(itertools.chain(*passes(make(), 2)))
    loader = make(workers=workers)
    seen = [i for batch in itertools.islice(loader, taken) for i in numbers(batch)]
    state = loader.state_dict()
    assert state["consumed_samples"] == 4 * taken
    resumed = make(workers=workers)
    resumed.load_state_dict(state)
    assert len(resumed) == 6
    rest = list(itertools.chain(*passes(resumed, 2 if taken < 6 else 1)))
    assert (seen + rest)[:48] == whole


def test_resumes_with_other_ranks_and_batch_size() -> None:
    whole = list(itertools.chain(*passes(make(), 1)))
    loader = make()
    seen = [i for batch in itertools.islice(loader, 3) for i in numbers(batch)]
    for batch, ranks in ((4, 2), (6, 3), (2, 1)):
        parts = []
        for rank in range(ranks):
            resumed = make(batch, rank, ranks)
            resumed.load_state_dict(loader.state_dict())
            assert resumed.state_dict() == loader.state_dict()
            # The Trainer counts batches: larger ones may end the pass early, the next continues.
            stream = itertools.chain(resumed, resumed)
            parts.append(list(itertools.islice(stream, 12 // batch)))
        rest = [i for step in zip(*parts, strict=True) for part in step for i in numbers(part)]
        assert seen + rest == whole


def test_a_pass_cut_short_is_continued_not_repeated() -> None:
    """As with `limit_train_batches`: no sample is skipped or comes twice in a data epoch."""
    whole = list(itertools.chain(*passes(make(), 2)))
    loader = make()
    seen = []
    for number in range(3):
        loader.set_epoch(number)
        seen += [i for batch in itertools.islice(loader, 4) for i in numbers(batch)]
    assert seen == whole


def test_a_whole_pass_from_the_middle_crosses_into_the_next_epoch() -> None:
    whole = list(itertools.chain(*passes(make(), 2)))
    loader = make()
    list(itertools.islice(loader, 4))
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    resumed.set_epoch(1)  # a new pass for the Trainer
    assert [i for batch in resumed for i in numbers(batch)] == whole[16:40]


def test_restarting_loader_repeats_its_pass() -> None:
    sampler = GlobalBatchSampler(26, 4, drop_last=False)
    loader = StatefulLoader(Numbers(), sampler, restart=True)
    assert len(loader) == 7
    list(itertools.islice(loader, 3))
    for number in range(2):
        loader.set_epoch(number)
        batches = list(loader)
        assert [i for batch in batches for i in numbers(batch)] == [*range(26), 0, 0]
        weights = torch.cat([batch["loss_mask"] for batch in batches]).flatten().tolist()
        assert weights == [1.0] * 26 + [0.0] * 2


def test_set_epoch_matters_only_before_the_first_batch() -> None:
    second = passes(make(), 2)[1]
    loader = make()
    loader.set_epoch(1)
    assert passes(loader, 1)[0] == second
    loader.set_epoch(7)
    assert next(iter(loader)) is not None
    assert loader.position.epoch == 2


@pytest.mark.parametrize("broken", [{}, {"epoch": -1}, {"epoch": "0"}, {"epoch": True}])
def test_a_foreign_state_is_refused(broken: dict) -> None:
    state = {**make().state_dict(), **broken} if broken else {"num_batches": 3}
    with pytest.raises(ValueError, match="epoch.*another data loader"):
        make().load_state_dict(state)


# ---- under Lightning


class Recorder(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[tuple[int, int, list[int]]] = []

    def training_step(self, batch: dict, batch_idx: int) -> torch.Tensor:
        self.seen.append((self.current_epoch, batch_idx, numbers(batch)))
        return (self.weight * batch["tokens"]).sum()

    def validation_step(self, batch: dict, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.001)


class SaveAt(Callback):
    """Saves a checkpoint in a hook, at a step."""

    def __init__(self, hook: str, step: int, path: Path) -> None:
        self.step, self.path = step, path
        setattr(self, hook, self.save)

    def save(self, trainer: L.Trainer, *_: object) -> None:
        if trainer.global_step == self.step and not trainer.sanity_checking:
            trainer.save_checkpoint(self.path)


def fit(loader: StatefulLoader, *callbacks: Callback, validate: bool = True, **options) -> Recorder:
    ckpt_path = options.pop("ckpt_path", None)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=list(callbacks),
        **{"max_epochs": 3, **options},
    )
    module = Recorder()
    evaluation = StatefulLoader(Numbers(), GlobalBatchSampler(26, 4, drop_last=False), restart=True)
    trainer.fit(
        module, loader, evaluation if validate else None, ckpt_path=ckpt_path, weights_only=False
    )
    return module


@pytest.fixture(scope="module")
def uninterrupted() -> list[tuple[int, int, list[int]]]:
    return fit(make()).seen


def test_lightning_runs_epochs(uninterrupted: list) -> None:
    assert [row[:2] for row in uninterrupted] == [(e, b) for e in range(3) for b in range(6)]
    assert [i for row in uninterrupted for i in row[2]] == list(itertools.chain(*passes(make(), 3)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("hook", "step", "validate"),
    [
        *(("on_train_batch_end", step, v) for step in (1, 5, 6, 7, 12) for v in (True, False)),
        ("on_train_epoch_end", 6, True),  # consumed samples = length of the epoch
        ("on_train_epoch_end", 6, False),
        ("on_train_epoch_end", 12, True),
        ("on_validation_end", 6, True),
    ],
)
def test_lightning_resumes_exactly(
    tmp_path: Path, uninterrupted: list, hook: str, step: int, validate: bool
) -> None:
    path = tmp_path / "x.ckpt"
    fit(make(), SaveAt(hook, step, path), validate=validate, max_steps=step, max_epochs=-1)
    resumed = fit(make(), validate=validate, ckpt_path=path)
    assert resumed.seen == uninterrupted[step:]
    assert resumed.global_step == 18


@pytest.mark.filterwarnings("ignore")
def test_lightning_resumes_with_workers(tmp_path: Path, uninterrupted: list) -> None:
    path = tmp_path / "x.ckpt"
    fit(make(workers=1), SaveAt("on_train_batch_end", 4, path), max_steps=4, max_epochs=-1)
    assert fit(make(workers=1), ckpt_path=path, max_epochs=1).seen == uninterrupted[4:6]


@pytest.mark.filterwarnings("ignore")
def test_lightning_resumes_epochs_that_are_cut_short(tmp_path: Path) -> None:
    whole = fit(make(), limit_train_batches=5).seen
    assert [i for row in whole for i in row[2]] == list(itertools.chain(*passes(make(), 3)))[:60]
    for step in (3, 5, 8, 10):
        path = tmp_path / f"{step}.ckpt"
        fit(make(), SaveAt("on_train_batch_end", step, path), limit_train_batches=5)
        assert fit(make(), ckpt_path=path, limit_train_batches=5).seen == whole[step:]
