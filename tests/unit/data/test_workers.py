"""Errors in the processes that read ahead: named when one is killed, as they are otherwise."""

import gc
import multiprocessing
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lightning.data import GlobalBatchSampler, StatefulLoader
from megatron_lightning.data.account import ACCOUNT
from megatron_lightning.data.loader import DataWorkerError


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    gc.collect()  # tracebacks hold the iterators, whose end ends their processes
    assert not multiprocessing.active_children()


class Numbers:
    """Sample i is i; sample 30 fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == 30 and self.error is not None:
            raise self.error
        return {"tokens": torch.full((8,), index), "loss_mask": torch.ones(8)}


def test_killed() -> None:
    loader = StatefulLoader(Numbers(), GlobalBatchSampler(400, 2), num_workers=2)
    seen: list[int] = []
    handlers: list[Any] = []

    def read() -> None:
        for batch in loader:
            seen.extend(batch[ACCOUNT].sample_id.tolist())
            if len(seen) == 20:
                # torch's raises wherever we are
                handlers.append(signal.signal(signal.SIGCHLD, signal.SIG_DFL))
                os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)

    with pytest.raises(DataWorkerError, match="process that reads the data ended"):
        read()
    gc.collect()
    signal.signal(signal.SIGCHLD, handlers[0])
    state = loader.state_dict()
    again = StatefulLoader(Numbers(), GlobalBatchSampler(400, 2), num_workers=0)
    again.load_state_dict(state)
    rest = [sample for batch in again for sample in batch[ACCOUNT].sample_id.tolist()]
    assert seen[: state["consumed_samples"]] + rest == list(range(400))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("error", [RuntimeError("worker out of ink"), FileNotFoundError("a.bin")])
def test_errors_of_the_data_set_stay_what_they_are(workers: int, error: Exception) -> None:
    loader = StatefulLoader(Numbers(error), GlobalBatchSampler(400, 2), num_workers=workers)
    with pytest.raises(type(error), match=str(error)) as caught:
        list(loader)
    assert not isinstance(caught.value, DataWorkerError)


@pytest.mark.parametrize("error", [RuntimeError("worker out of ink"), ValueError("no sample")])
def test_processes_end_with_the_error(error: Exception) -> None:
    """By themselves, while its traceback is still held, and not once garbage is collected."""
    loader = StatefulLoader(Numbers(error), GlobalBatchSampler(400, 2), num_workers=2)
    processes: set[Any] = set()

    def read() -> None:
        for _ in loader:
            processes.update(multiprocessing.active_children())

    gc.disable()
    try:
        with pytest.raises(type(error)) as caught:
            read()
        assert caught.traceback
        assert [process.exitcode for process in processes] == [0, 0]
    finally:
        gc.enable()
