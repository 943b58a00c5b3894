"""Steps that all ranks take together, where a failure on one rank is an error on all of them.

Each step ends with a small exchange of objects, so no rank can hang in a later collective because
another one raised. The objects travel by pickle between the ranks of one job and never reach a
file.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_lightning.checkpoint.errors import CheckpointError

ALONE: Any = "this rank alone"
"""In place of a process group: each rank for itself, without a word to the others."""
T = TypeVar("T")
R = TypeVar("R")


class RankGroup:
    """The ranks that save or load together; one process alone if torch.distributed is not
    initialised.

    `process_group` should be able to talk about CPU objects (gloo, or a mixed cpu:gloo,cuda:nccl
    group). A pure NCCL group works too: torch then moves the objects through the current CUDA
    device, which must be set on every rank. None means all ranks of the world.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self._group = process_group
        distributed = dist.is_available() and dist.is_initialized()
        self._distributed = distributed and process_group is not ALONE
        self.size = dist.get_world_size(process_group) if self._distributed else 1
        self.rank = dist.get_rank(process_group) if self._distributed else 0
        if self.rank < 0:
            raise ValueError(
                "process_group does not contain this rank; only its members may call this"
            )
        self._first = 0
        if process_group is not None and self._distributed:
            self._first = dist.get_global_rank(process_group, 0)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that coordinates."""
        return self.rank == 0

    def gather(self, step: str, function: Callable[[], T]) -> list[T]:
        """Run `function` on every rank; the first rank gets all values by rank, the others an empty
        list.

        Raises CheckpointError on every rank if it failed on any.
        """
        value, error, text = _attempt(function)
        if self.size == 1:
            if error is not None:
                raise error
            return [value]  # type: ignore[list-item]
        answers: list[Any] = [None] * self.size if self.is_first else []
        mine = (text, value)
        dist.gather_object(
            mine, answers if self.is_first else None, dst=self._first, group=self._group
        )
        failures = [
            f"rank {rank}: {said}" for rank, (said, _) in enumerate(answers) if said is not None
        ]
        (failure,) = self._broadcast(["\n  ".join(failures) if failures else None])
        if failure is not None:
            _raise(step, failure, error)
        return [answer for _, answer in answers]

    def broadcast(self, step: str, function: Callable[[], T]) -> T:
        """Run `function` on the first rank; all ranks get its value, or CheckpointError if it
        failed.
        """
        value, error, text = _attempt(function) if self.is_first else (None, None, None)
        if self.size == 1:
            if error is not None:
                raise error
            return value  # type: ignore[return-value]
        text, value = self._broadcast([text, value])
        if text is not None:
            _raise(step, f"rank 0: {text}", error)
        return value  # type: ignore[return-value]

    def scatter(self, step: str, function: Callable[[], list[R]]) -> R:
        """Run `function` on the first rank; rank i gets element i of its list, or CheckpointError
        if it failed.
        """
        values, error, text = _attempt(function) if self.is_first else (None, None, None)
        if self.size == 1:
            if error is not None:
                raise error
            return values[0]  # type: ignore[index]
        parts = [(text, None if values is None else values[rank]) for rank in range(self.size)]
        mine: list[Any] = [None]
        dist.scatter_object_list(
            mine, parts if self.is_first else None, src=self._first, group=self._group
        )
        text, value = mine[0]
        if text is not None:
            _raise(step, f"rank 0: {text}", error)
        return value

    def minimum(self, *votes: bool) -> tuple[bool, ...]:
        """Whether all ranks say yes, to each of several questions: one small reduction."""
        if self.size == 1:
            return votes
        carries_cpu = "gloo" in dist.get_backend_config(self._group)
        device = "cpu" if carries_cpu else torch.device("cuda", torch.cuda.current_device())
        tally = torch.tensor(votes, dtype=torch.int32, device=device)
        dist.all_reduce(tally, op=dist.ReduceOp.MIN, group=self._group)
        return tuple(map(bool, tally.tolist()))

    def _broadcast(self, objects: list[Any]) -> list[Any]:
        dist.broadcast_object_list(objects, src=self._first, group=self._group)
        return objects


def _attempt(function: Callable[[], T]) -> tuple[T | None, BaseException | None, str | None]:
    try:
        return function(), None, None
    except BaseException as error:  # noqa: BLE001 - told to the other ranks first, then raised by the caller
        return None, error, f"{type(error).__name__}: {error}"


def _raise(step: str, failure: str, error: BaseException | None) -> None:
    if error is not None and not isinstance(error, Exception):
        raise error  # KeyboardInterrupt and the like keep their meaning where they happened
    raise CheckpointError(f"{step} failed:\n  {failure}") from error
