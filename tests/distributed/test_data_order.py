"""The same samples in the same order, and the same counts, in every layout and across a resume."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_lightning.data import IndexedDataset, PretrainingDataModule
from tests.data_runs import EOD, SEQUENCE, DataRun, fit, global_order, write_corpus
from tests.harness import run_ranks_fresh

STEPS, BATCH = 10, 8


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("corpora")
    return write_corpus(folder / "a", 70, 1), write_corpus(folder / "b", 12, 2)


def data(corpora: tuple[str, str], **changes: Any) -> dict[str, Any]:
    values = dict(
        paths={corpora[0]: 0.7, corpora[1]: 0.3},
        seq_length=SEQUENCE,
        micro_batch_size=1,
        global_batch_size=BATCH,
        num_train_samples=STEPS * BATCH,
        eod_mask_loss=True,
        tokenizer="bytes",
    )
    return {**values, **changes}


def run(world_size: int, corpora: tuple[str, str], folder: Path, **options: Any) -> list[Any]:
    changes = options.pop("data", {})
    steps = options.pop("steps", STEPS)
    case = DataRun(
        data=data(corpora, **changes),
        trainer=dict(max_steps=steps, default_root_dir=str(folder)),
        **options,
    )
    return run_ranks_fresh(fit, world_size, case)


@pytest.fixture(scope="module")
def reference(corpora: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The whole run in one process."""
    return run(1, corpora, tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def half(corpora: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Five steps at DP=2, saved."""
    folder = tmp_path_factory.mktemp("half")
    path = str(folder / "checkpoint")
    return {"ranks": run(2, corpora, folder, steps=5, save_to=path), "path": path}


def offline(corpora: tuple[str, str], order: list[list[tuple[int, int]]]) -> dict[Any, list[int]]:
    """Counts of the samples by walking the tokens of the files one by one."""
    module = PretrainingDataModule(**data(corpora))
    module.setup("fit")
    blend: Any = module._train
    walks = [walk(path, source) for path, source in zip(corpora, blend.sources, strict=True)]
    found: dict[Any, list[int]] = {}
    for _, sample in [one for step in order for one in step]:
        source = int(blend.dataset_index[sample])
        number = int(blend.dataset_sample_index[sample])
        place = int(blend.sources[source].shuffle_index[number])
        key, *counts = walks[source](place)
        row = found.setdefault((corpora[source], key), [0] * 6)
        for column, count in enumerate(counts):
            row[column] += count
    return found


def walk(path: str, source: Any) -> Any:
    tokens = np.fromfile(f"{path}.bin", np.int32)
    lengths = IndexedDataset(path).sequence_lengths
    first = np.concatenate([[0], np.cumsum(lengths)])
    stream = [
        (token, offset == 0)
        for sequence in source.document_index.tolist()
        for offset, token in enumerate(tokens[first[sequence] : first[sequence + 1]].tolist())
    ]
    split = range(source.document_index.min(), source.document_index.max() + 1)
    per_epoch = int(lengths[split.start : split.stop].sum())

    def count(place: int) -> list[int]:
        held = stream[place * SEQUENCE : (place + 1) * SEQUENCE]
        begun = sum(begins for _, begins in held)
        with_loss = sum(token != EOD for token, _ in held)
        return [place * SEQUENCE // per_epoch, 1, begun, len(held), len(held), with_loss, 0]

    return count


def test_counts_equal_those_made_offline(corpora: tuple[str, str], reference: list[Any]) -> None:
    counts = {key: list(value) for key, value in reference[0]["counts"].items()}
    assert counts == offline(corpora, global_order(reference))
    assert {epoch for path, epoch in counts if path == corpora[1]} >= {0, 1}  # several epochs
    assert reference[0]["ledger"]["optimizer_steps"] == STEPS
    assert reference[0]["consumed"] == STEPS * BATCH


RESUMED = [
    pytest.param(1, {}, {}, id="dp1"),
    pytest.param(4, {}, {"num_workers": 1}, id="dp4-one-worker"),
    pytest.param(2, {}, {"micro_batch_size": 4, "num_workers": 2}, id="dp2-micro4-two-workers"),
    pytest.param(
        1, {}, {"micro_batch_size": 2, "num_workers": 3}, id="dp1-micro2-three-workers",
        marks=pytest.mark.slow,
    ),
    pytest.param(2, {"tensor_parallel_size": 2}, {}, id="tp2", marks=pytest.mark.slow),
    pytest.param(2, {"pipeline_parallel_size": 2}, {}, id="pp2", marks=pytest.mark.slow),
    pytest.param(2, {"context_parallel_size": 2}, {}, id="cp2", marks=pytest.mark.slow),
    pytest.param(
        4, {"tensor_parallel_size": 2, "micro_batch_size": 2}, {}, id="tp2-dp2",
        marks=pytest.mark.slow,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("world_size", "layout", "changes"), RESUMED)
def test_resume_in_another_layout(
    corpora: tuple[str, str],
    reference: list[Any],
    half: dict[str, Any],
    tmp_path: Path,
    world_size: int,
    layout: dict[str, Any],
    changes: dict[str, Any],
) -> None:
    """Five steps at DP=2, then five elsewhere: the sample ids of one run, none lost, none twice."""
    rest = run(world_size, corpora, tmp_path, layout=layout, data=changes, resume_from=half["path"])
    order = global_order(half["ranks"]) + global_order(rest)
    assert order == global_order(reference)
    flat = [sample for step in order for sample in step]
    assert len(set(flat)) == len(flat) == STEPS * BATCH
    assert all(rank["ledger"] == reference[0]["ledger"] for rank in rest)


@pytest.mark.slow
def test_other_batch_size_after_a_resume(
    corpora: tuple[str, str], reference: list[Any], half: dict[str, Any], tmp_path: Path
) -> None:
    """40 samples are left: 10 steps of 4 read them in the same order, and count the same."""
    rest = run(
        2, corpora, tmp_path, steps=15, data={"global_batch_size": 4}, resume_from=half["path"]
    )
    flat = [one for step in global_order(half["ranks"]) + global_order(rest) for one in step]
    assert flat == [one for step in global_order(reference) for one in step]
    assert rest[0]["step"] == 15
    assert rest[0]["counts"] == rest[1]["counts"] == reference[0]["counts"]


RAMP = {"rampup_batch_size": [2, 2, 30], "num_train_samples": 100}


@pytest.fixture(scope="module")
def ramp(corpora: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run(1, corpora, tmp_path_factory.mktemp("ramp"), steps=12, data=RAMP)


def test_growing_batches(ramp: list[Any]) -> None:
    sizes = [len(step) for step in global_order(ramp)]
    consumed = np.concatenate([[0], np.cumsum(sizes)])[:-1].tolist()
    assert sizes == [8 if seen > 30 else 2 + int(seen / (30 / 3)) * 2 for seen in consumed]
    assert sizes[0] == 2
    assert sizes[-1] == BATCH
    assert ramp[0]["step"] == 12
    assert (
        ramp[0]["consumed"]
        == sum(sizes)
        == ramp[0]["ledger"]["rows"][0][2] + sum(row[2] for row in ramp[0]["ledger"]["rows"][1:])
    )


def test_growing_batches_resumed_in_another_layout(
    corpora: tuple[str, str], ramp: list[Any], tmp_path: Path
) -> None:
    path = str(tmp_path / "checkpoint")
    begun = run(1, corpora, tmp_path, steps=5, data=RAMP, save_to=path)
    rest = run(2, corpora, tmp_path, steps=12, data=RAMP, resume_from=path)
    assert global_order(begun) + global_order(rest) == global_order(ramp)
    assert rest[0]["ledger"] == rest[1]["ledger"] == ramp[0]["ledger"]
