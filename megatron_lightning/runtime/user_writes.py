"""What user code writes to weights between optimizer steps is taken up by their masters.

Clamps after each step, best weights loaded again, layers that are reset: masters hold more than the
weights and would undo all of it in the next step. Which weights were written to is known to the
host by torch's counters (`precision.changes`); what of them differs is found and taken by the
device, element by element, so that no rank asks another. The counters don't know of writes through
`weight.data`: where hooks of the user's run, weights are compared with masters without being asked,
in a few steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch.nn import Parameter

from megatron_lightning.precision.changes import MasterCopy, WeightWrites
from megatron_lightning.utils.logging import warn_once


class HoldsMasters(Protocol):
    """Whole masters, or this rank's parts of them."""

    @property
    def weights(self) -> Mapping[str, Parameter]:
        """The model's, by name; may grow."""
        ...

    def master_copies(self, names: Iterable[str]) -> Mapping[str, MasterCopy]:
        """Those of `names` that this rank has masters of, ready to be compared."""
        ...


class UserWrites:
    """Takes them for the masters that `holder` has. `suspects` are names of classes whose hooks may
    write to weights; without any on a rank of `group` (None: one process) counters alone are read.
    """

    def __init__(
        self, holder: HoldsMasters, suspects: Sequence[str], group: dist.ProcessGroup | None
    ) -> None:
        self._holder = holder
        self._suspects = suspects
        self._group = group
        self._may_look = self._add_up(len(suspects)) > 0
        self._writes = WeightWrites(holder.weights)
        self._steps = 0
        self._looks_always = False
        self.follow, self.note = self._writes.follow, self._writes.note

    def take(self, before: Callable[[], None] = lambda: None) -> None:
        """Take what was written since the masters' values were last given to the weights; `before`
        is called first if there is any. Nothing waits for another rank, nor, unless masters lie in
        host memory, for the device.
        """
        written: Iterable[str] = self._writes.names()
        if self._looks_always:
            written = self._holder.weights
        if written:
            before()
            for copy in self._holder.master_copies(written).values():
                copy.take_written()
            self._writes.forget()  # what was put back lies elsewhere again

    def before_step(self) -> None:
        """Take what was written, right before the optimizer's step. All ranks must call it."""
        self.take()
        self._steps += 1
        if self._may_look and not self._looks_always and _looks_in(self._steps):
            self._look()

    def _look(self) -> None:
        """Whether a weight of any rank is not what its master was rounded to, though nothing is
        known of a write.
        """
        copies = self._holder.master_copies(self._holder.weights)
        differ = [copy.differs() for copy in copies.values()]
        verdicts = torch.stack(differ).tolist() if differ else []
        found = [name for name, differs in zip(copies, verdicts, strict=True) if differs]
        if not self._add_up(len(found)):
            return
        self._looks_always = True
        self.take()
        where = f" ({found[0]!r} is one)" if found else ""
        who = ", ".join(self._suspects) or "a hook of another rank"
        warn_once(
            f"Weights{where} are written to through `.data`, NumPy or an address, which leaves no"
            f" trace; {who} may do so. Masters would undo that in the next step, and may have since"
            " the third; from now on they are compared with all weights in each step, which"
            " takes time. Write to the parameter itself, under torch.no_grad()"
        )

    def _add_up(self, number: int) -> int:
        """The sum of all ranks' numbers."""
        total = torch.tensor(number)
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
        return int(total)


def _looks_in(step: int) -> bool:
    """In the first three steps, the 16th, and then four times later each."""
    return step <= 3 or (step >= 16 and step.bit_count() == 1 and step.bit_length() % 2 == 1)
