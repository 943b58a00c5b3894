"""What user code makes of weights: taken up by the masters that would undo it, and alike on tied
copies.

Before the first batch weights are compared by all their bits (`precision.changes`), later torch's
counters of writes are read (`runtime.user_writes`); tied copies of two stages are compared with
each other (`runtime.tied_copies`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer

from megatron_lightning.optim.local_parts import LocalParts
from megatron_lightning.optim.shards import ParameterShards
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.precision.changes import WeightChanges
from megatron_lightning.precision.masters import MasterParameters
from megatron_lightning.runtime.model import ParallelModel
from megatron_lightning.runtime.tied_copies import TiedCopies
from megatron_lightning.runtime.user_writes import UserWrites


class WeightWatch:
    """Watches a run's weights. `holder` has what is updated, if that is not the weights themselves.

    `suspects`: classes of which hooks may write to weights without a trace; none where what is
    updated are the weights' own parts. `agree` takes the least of all ranks' verdicts, in place.
    """

    def __init__(
        self,
        model: ParallelModel,
        mesh: ParallelMesh,
        holder: ParameterShards | LocalParts | MasterParameters | None,
        *,
        suspects: Sequence[str],
        agree: Callable[[Tensor], None],
    ) -> None:
        self._model = model
        self._holder = holder
        self._agree = agree
        self._tied = TiedCopies(model, mesh)
        self._changes: WeightChanges | None = None
        self._writes: UserWrites | None = None
        if isinstance(holder, ParameterShards | MasterParameters):
            self._writes = UserWrites(holder, suspects, mesh.control_group)
        self.remember()

    def remember(self) -> None:
        """Note what weights are, now that masters are as they are meant to be. All ranks must call
        it.
        """
        if self._writes is not None:
            self._writes.note()
        self._tied.note()
        if isinstance(self._holder, ParameterShards):
            self._holder.note_given()
        if self._has_copies():
            self._wait()
            self._changes = WeightChanges(self._weights_with_masters())

    def take_changes(self) -> None:
        """Before the first batch: take for masters what hooks have made of weights meanwhile. All
        ranks must call it; it waits for the device, once.
        """
        if self._changes is None:
            return
        self._wait()
        changed = self._changes.names(self._agree)
        self._changes = None
        if changed and self._holder is not None:
            self._holder.copy_from_model(changed)
        if self._writes is not None:
            self._writes.note()

    def open(self, optimizers: Sequence[Optimizer], updated: Mapping[str, Tensor]) -> None:
        """As a window begins: ValueError where tied copies were treated differently. All ranks must
        call it.
        """
        self.take_changes()
        if self._tied.look():
            self._wait()
        self._tied.check(optimizers, updated)

    def follow(self) -> None:
        """Watch what has masters since."""
        if self._writes is not None:
            self._writes.follow()

    def before_step(self) -> None:
        """Right before the optimizer's step: take what was written. All ranks must call it."""
        self._tied.look()  # first: what was written to other memory is put back below
        if self._writes is not None:
            self._writes.before_step()

    def finish_step(self) -> None:
        """What was just written to weights is their masters' own."""
        if isinstance(self._holder, MasterParameters) and self._writes is not None:
            self._writes.note()  # a sharded optimizer writes behind the counters
        self._tied.note()

    def take_writes(self, before: Callable[[], None]) -> None:
        """Take for masters what user code has written to weights since these were last made of
        them; see `UserWrites.take`.
        """
        self._tied.look()
        if self._writes is not None:
            self._writes.take(before)

    def end(self) -> None:
        """From now on whoever moves or casts the module means the weights alone."""
        self._writes = None

    def _has_copies(self) -> bool:
        """True when what is updated holds more than the weights, or lies elsewhere."""
        holder = self._holder
        if isinstance(holder, ParameterShards):
            return holder.has_copies
        return isinstance(holder, MasterParameters) or (holder is not None and holder.has_masters)

    def _weights_with_masters(self) -> dict[str, Tensor]:
        """By names that all ranks with equal parts of the model share. Frozen ones have none."""
        names: Collection[str] = ()
        if isinstance(self._holder, MasterParameters):
            names = self._holder.weights.keys()
        elif self._holder is not None:
            names = self._holder.names
        return {name: value for name, value in self._model.parameters.items() if name in names}

    def _wait(self) -> None:
        """Until weights may be read."""
        if isinstance(self._holder, ParameterShards | LocalParts):
            self._holder.wait()
