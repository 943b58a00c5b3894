"""`reset_attention_mask`: tokens attend to their own document only, the same in every layout."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest

from megatron_lightning.data import PretrainingDataModule
from tests.data_runs import write_corpus
from tests.harness import run_ranks_fresh
from tests.layout_runs import Run, assert_same_training, train


def make_data(run: Run, micro_batch_size: int, **options: Any) -> PretrainingDataModule:
    corpus = write_corpus(Path(tempfile.mkdtemp()) / "c", 80, 3)
    values = dict(reset_attention_mask=True, reset_position_ids=True, tokenizer="bytes")
    return PretrainingDataModule(
        corpus, 32, micro_batch_size, run.global_batch_size, **{**values, **options}
    )


def run_of(layout: dict[str, Any], micro_batch_size: int, **options: Any) -> Run:
    return Run(
        layout=layout,
        steps=3,
        make_data=functools.partial(make_data, micro_batch_size=micro_batch_size, **options),
    )


@functools.cache
def single(**options: Any) -> dict[str, Any]:
    return run_ranks_fresh(train, 1, run_of({}, 8, **options), timeout=200)[0]


@pytest.mark.parametrize(
    ("layout", "micro_batch_size"),
    [
        (dict(context_parallel_size=2), 2),
        (dict(tensor_parallel_size=2), 8),
        (dict(pipeline_parallel_size=2), 4),
    ],
)
def test_documents_in_other_layouts(layout: dict[str, Any], micro_batch_size: int) -> None:
    run = run_of(layout, micro_batch_size)
    assert_same_training(run_ranks_fresh(train, 2, run, timeout=200), single())


def test_the_option_changes_the_training() -> None:
    whole = single(reset_attention_mask=False)
    with pytest.raises(AssertionError):
        assert_same_training([whole], single())
