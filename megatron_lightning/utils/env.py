"""The one place where environment variables are read.

Each variable that changes what the package does has a field or function here, so that this file is
the complete list. Nothing is read at import time.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Launcher = Literal["torchrun", "slurm", "variables", "none"]

_INTERACTIVE_JOBS = ("bash", "interactive")  # a shell in an allocation is one process, not a task


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What a launcher said about this process. Without one, a world of one."""

    launcher: Launcher = "none"
    """Who started the processes; `variables` is anything that sets RANK or LOCAL_RANK itself."""
    rank: int = 0
    """Position in the world. Where only LOCAL_RANK is set: the position on this node."""
    world_size: int = 1
    """Processes in the world."""
    local_rank: int = 0
    """Position on this node."""
    node_rank: int = 0
    """Position of this node."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "Launch":
        """Read the variables of torchrun, SLURM or a plain launcher, in this order.

        `environment` stands in for the variables of the process. Raises ValueError naming the
        variable when one is not a whole number of at least 0.
        """
        variables = os.environ if environment is None else environment
        launcher = _launcher(variables)
        if launcher == "none":
            return cls()
        if launcher == "slurm":
            names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID")
        else:
            node = "GROUP_RANK" if "GROUP_RANK" in variables else "NODE_RANK"
            rank = "RANK" if "RANK" in variables else "LOCAL_RANK"
            names = (rank, "WORLD_SIZE", "LOCAL_RANK", node)
        rank, world_size, local_rank, node_rank = (
            _number(variables, name, default)
            for name, default in zip(names, (0, 1, 0, 0), strict=True)
        )
        return cls(
            launcher=launcher,
            rank=rank,
            world_size=max(world_size, 1),
            local_rank=local_rank,
            node_rank=node_rank,
        )


def _launcher(variables: Mapping[str, str]) -> Launcher:
    if "TORCHELASTIC_RUN_ID" in variables:
        return "torchrun"
    if "RANK" in variables or "LOCAL_RANK" in variables:
        return "variables"
    job = variables.get("SLURM_JOB_NAME", "")
    if "SLURM_PROCID" in variables and "SLURM_NTASKS" in variables and job not in _INTERACTIVE_JOBS:
        return "slurm"
    return "none"


def _number(variables: Mapping[str, str], name: str, default: int) -> int:
    text = variables.get(name)
    if text is None:
        return default
    if not text.isdecimal():
        raise ValueError(
            f"environment variable {name}={text!r}: expected a whole number of at least 0; "
            "unset it, or start through torchrun or srun, which set it"
        )
    return int(text)


def global_seed(environment: Mapping[str, str] | None = None) -> int | None:
    """Seed that `lightning.seed_everything` left for all processes (PL_GLOBAL_SEED), or None."""
    variables = os.environ if environment is None else environment
    return _number(variables, "PL_GLOBAL_SEED", 0) if "PL_GLOBAL_SEED" in variables else None


def slurm_job(environment: Mapping[str, str] | None = None) -> str | None:
    """The SLURM job of this process as `scontrol` wants it, `job` or `job_task`; None outside."""
    variables = os.environ if environment is None else environment
    array = variables.get("SLURM_ARRAY_JOB_ID")
    if array is not None:
        return f"{array}_{variables['SLURM_ARRAY_TASK_ID']}"
    return variables.get("SLURM_JOB_ID")


def peer_access_is_off(environment: Mapping[str, str] | None = None) -> bool:
    """Whether NCCL was told not to let GPUs write to each other's memory (NCCL_P2P_DISABLE=1, or
    NCCL_P2P_LEVEL=LOC).
    """
    variables = os.environ if environment is None else environment
    off = variables.get("NCCL_P2P_DISABLE", "0").strip() not in ("", "0")
    return off or variables.get("NCCL_P2P_LEVEL", "").strip().upper() in ("LOC", "0")


def provide(*, override: bool = True, **variables: str) -> None:
    """Set variables of this process, for libraries and for ranks that it starts; without `override`
    only those that nobody has set.
    """
    for name, value in variables.items():
        if override or name not in os.environ:
            os.environ[name] = value
