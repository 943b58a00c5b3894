"""What a fork of this process has to be before it can be a rank: what forks can't inherit, and what
they change of what they have inherited.
"""

from __future__ import annotations

import builtins
import ctypes
import os
import signal
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

_PR_SET_PDEATHSIG = 1


def check_can_fork() -> None:
    """RuntimeError where forks of this process could not work."""
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "CUDA is initialised in this process, and forked ranks could not use it: restart the "
            "kernel, and before Trainer.fit move no tensor or module to a GPU and call no "
            "torch.cuda function that needs one; or run a script (python, torchrun)"
        )
    if dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is initialised in this process, and forked ranks would inherit it: "
            "call torch.distributed.destroy_process_group() before Trainer.fit"
        )


def check_inherited(device: torch.device) -> None:
    """RuntimeError in a rank whose parent has done what forks can't go on with, and which can't be
    seen in the parent: even gradients on the CPU start threads of autograd in a CUDA build.
    """
    try:
        torch.ones((), requires_grad=True, device=device).backward()
    except RuntimeError as error:
        raise RuntimeError(
            f"the process that forked this rank had used CUDA or computed gradients before "
            f"({str(error).splitlines()[0]}): restart the kernel and call Trainer.fit before "
            f"anything of that kind, or run a script (python, torchrun)"
        ) from error


def die_with(parent: int) -> None:
    """Let the system end this forked process when its parent, of that pid, is gone (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def become_rank(number: int, parent: int, forwarded: Sequence[int]) -> None:
    """In a forked process, before anything else: be local rank `number`, which signals of the
    numbers `forwarded` end as they would end any process.
    """
    die_with(parent)
    for signum in forwarded:
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not isinstance(sys.stdout, type(sys.__stdout__)):  # a notebook's, which needs its threads
        sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
        sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
        builtins.__dict__.pop("get_ipython", None)  # progress bars would draw widgets in vain
    os.environ["LOCAL_RANK"] = str(number)
    # GNU OpenMP hangs in a fork once the process has used its threads before.
    torch.set_num_threads(1)
