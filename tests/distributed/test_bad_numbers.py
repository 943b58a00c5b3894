"""Numbers of the Trainer and files of the data that can't be right: one message, no process."""

import os
from collections.abc import Callable

import pytest

from megatron_lightning.data import PretrainingDataModule, SFTDataModule
from megatron_lightning.models.gpt import GPTModel
from tests.distributed.test_bad_input import CORPUS, corpus, gpt, trainer
from tests.harness import run_ranks_fresh
from tests.launch_runs import forget_launcher
from tests.layout_runs import Batches, Run, tiny_config


def clipping_by_nothing() -> None:
    trainer(2, {}, gradient_clip_val=float("nan")).fit(gpt(), Batches(Run()))


def negative_log_steps() -> None:
    trainer(2, {}, log_every_n_steps=-1).fit(gpt(), Batches(Run()))


def long_interval() -> None:
    trainer(2, {}, val_check_interval=10, limit_val_batches=1).fit(gpt(vocab_size=1000), corpus())


def missing_tokenizer() -> None:
    data = PretrainingDataModule(CORPUS, 8, 2, 8, tokenizer="no/such.json")
    trainer(2, {}).fit(gpt(vocab_size=1000), data)


def another_file_for_a_tokenizer() -> None:
    data = PretrainingDataModule(CORPUS, 8, 2, 8, tokenizer=__file__)
    trainer(2, {}).fit(gpt(vocab_size=1000), data)


def missing_tokenizer_of_tuning() -> None:
    data = SFTDataModule(__file__, 8, 2, 8, tokenizer="no/such.json")
    trainer(2, {}).fit(gpt(vocab_size=1000), data)


def text_for_a_number() -> None:
    trainer(2, {}).fit(GPTModel(tiny_config(num_layers="4")), Batches(Run()))


CASES: dict[Callable[[], None], tuple[str, ...]] = {
    clipping_by_nothing: ("gradient_clip_val=nan", "must be a number", "no clipping"),
    negative_log_steps: ("log_every_n_steps=-1", "at least 1"),
    long_interval: ("1 problem", "val_check_interval=10", "2 batches", "at most 2"),
    missing_tokenizer: ("1 problem", "no tokenizer file no/such.json", "give a tokenizer.json"),
    another_file_for_a_tokenizer: ("1 problem", "is no tokenizer.json"),
    missing_tokenizer_of_tuning: ("no tokenizer file no/such.json", "give a tokenizer.json"),
    text_for_a_number: ("config.num_layers='4' must be a whole number",),
}


def message_of(rank: int, world_size: int, name: str) -> tuple[str, str, int]:
    forget_launcher()
    started: list[int] = []
    fork = os.fork
    os.fork = lambda: started.append(fork()) or started[-1]  # type: ignore[assignment]
    try:
        next(case for case in CASES if case.__name__ == name)()
    except Exception as error:
        return type(error).__name__, str(error), len(started)
    return "nothing", "", len(started)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_refused_before_any_process(case: Callable[[], None]) -> None:
    ((kind, message, started),) = run_ranks_fresh(message_of, 1, case.__name__)
    assert kind in ("ConfigurationError", "ValueError"), (kind, message)
    assert started == 0
    for part in CASES[case]:
        assert part in message, message
