import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from megatron_lightning.data.preprocessing.workers import Workers


def make() -> Callable[[int], int]:
    def work(item: int) -> int:
        if item < 0:
            raise ValueError(f"item {item}")
        time.sleep(0.002 * (item % 3))
        return item * item

    return work


@pytest.mark.parametrize("count", [1, 2, 5])
def test_results_are_in_order_and_reading_is_not_far_ahead(count: int) -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for number in range(1, 61):
            taken.append(number)
            yield number

    with Workers(make, count) as workers:
        for number, result in enumerate(workers.map(items()), start=1):
            assert result == number * number
            assert taken[-1] <= number + 3 * count
        assert list(workers.map(iter([3, 4]))) == [9, 16]  # once more
        assert list(workers.map(iter([]))) == []


def test_a_slow_first_item_does_not_end_the_stream() -> None:
    def slow_first() -> Callable[[int], int]:
        def work(item: int) -> int:
            time.sleep(0.3 if item == 0 else 0.0)
            return item

        return work

    with Workers(slow_first, 2) as workers:
        assert list(workers.map(iter(range(40)))) == list(range(40))


def test_a_failing_worker_is_heard() -> None:
    with (
        Workers(make, 2) as workers,
        pytest.raises(RuntimeError, match=r"a worker failed:(?s:.*)ValueError: item -1"),
    ):
        list(workers.map(iter([1, 2, -1, 3])))


def test_a_killed_worker_is_noticed_and_the_others_end() -> None:
    with Workers(make, 3) as workers:
        processes = list(workers._processes)

        def items() -> Iterator[int]:
            for item in range(1000):
                if item == 20:
                    os.kill(processes[1].pid or 0, signal.SIGKILL)
                yield item

        with pytest.raises(RuntimeError, match="a worker ended with exit code -9"):
            list(workers.map(items()))
    assert all(process.exitcode is not None for process in processes)


def test_workers_end_although_they_are_busy() -> None:
    with Workers(lambda: lambda item: time.sleep(60), 2) as workers:
        processes = list(workers._processes)
        for pipe in workers._pipes:
            pipe.send(1)
    assert [process.exitcode for process in processes] == [-signal.SIGTERM] * 2
