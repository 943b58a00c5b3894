"""The harness itself: values, isolation, errors, hangs, deaths, and that nothing outlives it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import RankError, run_ranks, run_ranks_fresh


def sum_of_ranks(rank: int, world_size: int, factor: int) -> torch.Tensor:
    weight = torch.tensor([float(rank * factor)], requires_grad=True)
    (weight * 1.0).sum().backward()
    total = weight.detach().clone()
    dist.all_reduce(total)
    return total


def process_id(rank: int, world_size: int) -> int:
    return os.getpid()


def fail_on_rank_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ZeroDivisionError("what rank one says")
    dist.barrier()


def hang_on_rank_zero(rank: int, world_size: int) -> None:
    if rank == 0:
        time.sleep(100)


def die_on_last_rank(rank: int, world_size: int) -> None:
    if rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def assert_small(rank: int, world_size: int, number: int) -> None:
    assert number < 3


def return_what_cannot_be_pickled(rank: int, world_size: int) -> object:
    return lambda: rank


def leave_state_behind(rank: int, world_size: int) -> None:
    torch.rand(3)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    dist.new_group([0, 1])


def look_at_state(rank: int, world_size: int) -> tuple[float, torch.dtype, bool, bool, str, int]:
    groups = len(dist.distributed_c10d._world.pg_map)
    drawn = torch.rand(1).item()
    return (
        drawn,
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        "LEFT_BEHIND" in os.environ,
        os.getcwd(),
        groups,
    )


def make_groups(rank: int, world_size: int, count: int) -> float:
    total = torch.ones(1)
    for _ in range(count):
        groups = [dist.new_group([first, first + 1]) for first in range(0, world_size, 2)]
        dist.all_reduce(total, group=groups[rank // 2])
    return total.item()


def group_on_one_rank_only(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)


def launcher_environment(rank: int, world_size: int) -> dict[str, str]:
    names = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    assert not dist.is_initialized()
    return {name: os.environ[name] for name in names}


def initialise_from_environment(rank: int, world_size: int) -> float:
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def start_a_child(rank: int, world_size: int) -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]).pid


def start_a_child_and_die(rank: int, world_size: int, folder: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    (Path(folder) / "child").write_text(str(child.pid))
    os.kill(os.getpid(), signal.SIGKILL)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_values_come_back_in_rank_order(world_size: int) -> None:
    expected = 2 * sum(range(world_size))
    assert [value.item() for value in run_ranks(sum_of_ranks, world_size, 2)] == [
        expected
    ] * world_size
    assert len(set(run_ranks(process_id, world_size))) == world_size


def test_ranks_stay_alive_between_calls() -> None:
    assert run_ranks(process_id, 2) == run_ranks(process_id, 2)


def test_a_failing_rank_is_named_with_its_own_traceback_and_the_next_call_works(
    capfd: pytest.CaptureFixture,
) -> None:
    before = run_ranks(process_id, 2)
    started = time.monotonic()
    with pytest.raises(RankError, match="what rank one says") as caught:
        run_ranks(fail_on_rank_one, 2)
    assert time.monotonic() - started < 10
    assert caught.value.rank == 1
    assert "in fail_on_rank_one" in str(caught.value)
    assert "[rank 1/2] ZeroDivisionError: what rank one says" in capfd.readouterr().err
    after = run_ranks(process_id, 2)
    assert set(before).isdisjoint(after)
    assert not any(is_running(pid) for pid in before)


def test_assertions_in_ranks_show_their_values() -> None:
    with pytest.raises(RankError, match="assert 5 < 3"):
        run_ranks(assert_small, 2, 5)


def test_a_hang_ends_at_the_limit_and_shows_where() -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match="did not finish within 1 s") as caught:
        run_ranks(hang_on_rank_zero, 2, timeout=1)
    assert time.monotonic() - started < 10
    assert "hang_on_rank_zero" in str(caught.value)
    assert "ranks [0] of 2" in str(caught.value)
    assert run_ranks(sum_of_ranks, 2, 1)[0].item() == 1


def test_a_rank_that_is_killed_is_reported() -> None:
    with pytest.raises(RankError, match="killed by SIGKILL") as caught:
        run_ranks(die_on_last_rank, 2)
    assert caught.value.rank == 1


def test_a_rank_that_died_between_two_calls_is_reported() -> None:
    victim = run_ranks(process_id, 3)[2]
    os.kill(victim, signal.SIGKILL)
    while is_running(victim):
        time.sleep(0.01)
    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(process_id, 3)
    assert len(run_ranks(process_id, 3)) == 3


def test_a_value_that_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(RankError, match="pickle"):
        run_ranks(return_what_cannot_be_pickled, 2)


def test_a_call_does_not_see_what_an_earlier_one_left_behind() -> None:
    first = run_ranks(look_at_state, 2)
    run_ranks(leave_state_behind, 2)
    assert run_ranks(look_at_state, 2) == first
    assert first[0] == first[1]
    assert first[0][1:] == (torch.float32, True, False, os.getcwd(), 1)


def test_groups_do_not_pile_up() -> None:
    for _ in range(30):
        assert run_ranks(make_groups, 4, 4) == [16.0] * 4


def test_a_pool_is_replaced_when_group_names_could_clash() -> None:
    before = run_ranks(process_id, 2)
    run_ranks(group_on_one_rank_only, 2)
    assert set(before).isdisjoint(run_ranks(process_id, 2))
    assert run_ranks(make_groups, 2, 2) == [4.0] * 2


def test_fresh_ranks_see_what_a_launcher_sets() -> None:
    seen = run_ranks_fresh(launcher_environment, 3)
    assert [one["RANK"] for one in seen] == ["0", "1", "2"]
    assert [one["LOCAL_RANK"] for one in seen] == ["0", "1", "2"]
    assert {one["WORLD_SIZE"] for one in seen} == {"3"}
    assert {one["MASTER_ADDR"] for one in seen} == {"127.0.0.1"}
    assert len({one["MASTER_PORT"] for one in seen}) == 1
    assert run_ranks_fresh(initialise_from_environment, 3) == [3.0] * 3


def test_fresh_ranks_are_gone_afterwards_with_what_they_started() -> None:
    ranks = run_ranks_fresh(process_id, 2)
    children = run_ranks_fresh(start_a_child, 2)
    assert set(ranks).isdisjoint(run_ranks_fresh(process_id, 2))
    assert not any(is_running(pid) for pid in ranks + children)


def test_what_a_dead_rank_started_ends_with_it(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="killed by SIGKILL"):
        run_ranks_fresh(start_a_child_and_die, 1, str(tmp_path))
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 5
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(child)


def test_failures_of_fresh_ranks_are_raised() -> None:
    with pytest.raises(RankError, match="did not finish within 1 s"):
        run_ranks_fresh(hang_on_rank_zero, 2, timeout=1)
    with pytest.raises(RankError, match="assert 7 < 3"):
        run_ranks_fresh(assert_small, 2, 7)


@pytest.mark.parametrize("world_size", [0, 17])
def test_a_world_size_out_of_range_is_refused(world_size: int) -> None:
    with pytest.raises(ValueError, match=f"world_size={world_size}"):
        run_ranks(process_id, world_size)


def test_a_call_costs_milliseconds() -> None:
    run_ranks(sum_of_ranks, 4, 1)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        run_ranks(sum_of_ranks, 4, 1)
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.5  # about 0.02 s on an idle machine


PARENT_THAT_IS_KILLED = """
import os, signal
from tests.harness import run_ranks
from tests.unit.test_harness import process_id
print(os.getpid(), *run_ranks(process_id, 2), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal")
@pytest.mark.slow
def test_ranks_do_not_outlive_a_killed_session() -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PARENT_THAT_IS_KILLED],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
    )
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 3, done.stderr
    deadline = time.monotonic() + 5
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_running(pid) for pid in pids)
