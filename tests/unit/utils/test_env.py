"""What launchers say, read from their real variables."""

import pytest

from megatron_lightning.utils import Launch
from megatron_lightning.utils.env import peer_access_is_off

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "GROUP_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
}
SLURM = {
    "SLURM_JOB_NAME": "train",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


def test_no_launcher_is_a_world_of_one() -> None:
    assert Launch.from_environment({}) == Launch(launcher="none", rank=0, world_size=1)


def test_torchrun() -> None:
    expected = Launch(launcher="torchrun", rank=5, world_size=8, local_rank=1, node_rank=1)
    assert Launch.from_environment(TORCHRUN) == expected


def test_torchrun_inside_a_slurm_allocation_wins() -> None:
    assert Launch.from_environment(SLURM | TORCHRUN).launcher == "torchrun"


def test_slurm() -> None:
    expected = Launch(launcher="slurm", rank=3, world_size=4, local_rank=1, node_rank=1)
    assert Launch.from_environment(SLURM) == expected


@pytest.mark.parametrize("name", ["bash", "interactive"])
def test_a_shell_in_an_allocation_is_one_process(name: str) -> None:
    assert Launch.from_environment(SLURM | {"SLURM_JOB_NAME": name}) == Launch()


def test_plain_variables() -> None:
    variables = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "NODE_RANK": "2"}
    expected = Launch(launcher="variables", rank=2, world_size=4, local_rank=0, node_rank=2)
    assert Launch.from_environment(variables) == expected
    assert Launch.from_environment({"LOCAL_RANK": "3", "WORLD_SIZE": "4"}).rank == 3


def test_the_variables_of_the_process_are_read_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert Launch.from_environment().rank == 5
    monkeypatch.setenv("RANK", "6")
    assert Launch.from_environment().rank == 6


@pytest.mark.parametrize(
    ("variables", "off"),
    [
        ({}, False),
        ({"NCCL_P2P_DISABLE": "0", "NCCL_P2P_LEVEL": "NVL"}, False),
        ({"NCCL_P2P_DISABLE": "1"}, True),
        ({"NCCL_P2P_LEVEL": "loc"}, True),
    ],
)
def test_peer_access(variables: dict[str, str], off: bool) -> None:
    assert peer_access_is_off(variables) is off


@pytest.mark.parametrize("value", ["-1", "two", "", "1.5"])
def test_a_value_that_is_no_number_is_named(value: str) -> None:
    with pytest.raises(ValueError, match=r"RANK='.*expected a whole number"):
        Launch.from_environment({"RANK": value})
