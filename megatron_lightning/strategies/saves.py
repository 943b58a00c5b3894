"""The saves of a strategy: what is saved in the background, what was saved already, what waits.

A background save is committed between two steps, or at the end of the fit. `ModelCheckpoint` works
unchanged: it sees a checkpoint under way as one that is there, and what it removes or links to the
new one waits until that is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_lightning.checkpoint import CheckpointError, Saver, SaveTimes
from megatron_lightning.checkpoint.config_codec import CODEC
from megatron_lightning.strategies import _compat, random_states
from megatron_lightning.strategies.readers import changers
from megatron_lightning.utils.logging import get_logger

if TYPE_CHECKING:
    from megatron_lightning.strategies.checkpoint_strategy import CheckpointStrategy


class Saves:
    """Made with the strategy; holds memory and a process only while a fit saves in the background.

    All ranks call each method together, but for `before_update`, `after_commit` and `delete`.
    """

    def __init__(self, strategy: CheckpointStrategy) -> None:
        self._strategy = strategy
        self._config = strategy.config.checkpoint
        self._saver: Saver | None = None
        self._changes = 0
        self._prepared = False
        self._may_overlap = False
        self._undo: list[Callable[[], None]] = []

    @property
    def times(self) -> SaveTimes | None:
        """Of the last save that was committed."""
        return None if self._saver is None else self._saver.times

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way in the background."""
        return self._saver is not None and self._saver.is_saving

    @property
    def overlaps_copies(self) -> bool:
        """Whether copies from a GPU may run beside the next step of this fit."""
        return self._may_overlap

    def begin_fit(self, trainer: Trainer) -> None:
        """Before the first hook of a fit."""
        self._changes += 1
        self._prepared = not self._config.asynchronous
        if not self._config.asynchronous:
            return
        module = self._strategy.lightning_module
        assert module is not None
        self._may_overlap = (
            self._config.overlap_copies and module.automatic_optimization and not changers(trainer)
        )
        saver = self._get_saver()
        self._undo = _compat.show_pending(
            trainer, lambda path: saver.is_pending(_absolute(path)), saver.after_commit
        )

    def state_changes(self) -> None:
        """To be called where weights may change: what was saved before is another state."""
        self._changes += 1

    def save(
        self,
        path: Any,
        tensors: Mapping[str, Tensor],
        objects: Mapping[str, Any],
        metadata: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        own: Mapping[str, Tensor],
    ) -> None:
        """Save; in the background while a fit runs, if asked for. `weights` are those that the
        tensors were made of, `own` what belongs to this rank alone.
        """
        fitting = self._is_fitting()
        self._get_saver().save(
            _absolute(self._strategy.broadcast(str(path))),
            tensors,
            objects,
            metadata=metadata,
            codec=CODEC,
            own=own,
            state=self._state_of(tensors, weights) if fitting else None,
            background=fitting and self._config.asynchronous,
            steady=self._is_steady,
        )

    def _get_saver(self) -> Saver:
        if self._saver is None:
            self._saver = Saver(
                process_group=self._strategy.mesh.control_group,
                device=self._strategy.root_device,
                pin_memory=self._config.pin_memory,
            )
        return self._saver

    def _is_fitting(self) -> bool:
        """Whether the loops of a fit run. After a failure, and between fits, a save is complete
        when it returns.
        """
        module = self._strategy.lightning_module
        if module is None or module._trainer is None:
            return False
        state = module.trainer.state
        return state.fn == TrainerFn.FITTING and state.status == TrainerStatus.RUNNING

    def _state_of(self, tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Hashable:
        """What stands for the values of the tensors; None where a hook has exchanged weights."""
        own = {_identity(tensor) for tensor in self._strategy.model_tensors().values()}
        given = tuple((name, _identity(tensor)) for name, tensor in weights.items())
        if not own.issuperset(identity for _, identity in given):
            return None
        trainer = self._strategy.lightning_module.trainer  # type: ignore[union-attr]
        return self._changes, _compat.epochs_done(trainer), given, tuple(tensors)

    def _is_steady(self, name: str) -> bool:
        """Whether only the optimizer changes this tensor of a checkpoint."""
        if not self._may_overlap:
            return False
        kind, _, rest = name.partition(".")
        if kind != "model":
            return kind in ("master", "optimizer")
        parameter = self._strategy.parallel_model.parameters.get(rest)
        return parameter is not None and parameter.requires_grad

    # ------------------------------------------------------------------ while training goes on

    def prepare(self, collect: Callable[[], Mapping[str, Tensor]]) -> None:
        """After an optimizer step: allocate what the first save will need, if there will be one.
        `collect` gives what will be saved.
        """
        if self._prepared:
            return
        self._prepared = True
        trainer = self._strategy.lightning_module.trainer  # type: ignore[union-attr]
        if _compat.saves_training_state(trainer):
            strategy = self._strategy
            own = random_states.collect(strategy.mesh.rank, strategy.root_device)
            self._get_saver().prepare(collect(), own)

    def poll(self) -> None:
        """Between two steps: commit what all ranks have written. Raises CheckpointError on all
        ranks if the writing has failed on any.
        """
        if self._saver is not None:
            self._saver.poll()

    def before_update(self) -> None:
        """Before an optimizer changes weights."""
        if self._saver is not None:
            self._saver.before_update()

    def finish(self) -> None:
        """Wait until a save that is under way is committed; raises as `poll`."""
        if self._saver is not None:
            self._saver.finish()

    def after_commit(self, action: Callable[[], None]) -> None:
        """Call `action` when a save that is under way is committed; at once if there is none."""
        if self._saver is None:
            action()
        else:
            self._saver.after_commit(action)

    def delete(self, path: Path) -> None:
        """Delete a checkpoint, on the rank that calls this; beside training if saves are."""
        self._get_saver().remove(path, later=self._config.asynchronous and self._is_fitting())

    def close(self, *, wait: bool) -> None:
        """End what runs beside a fit; a save that is under way is committed, or, without `wait`,
        given up.
        """
        for undo in self._undo:
            undo()
        self._undo = []
        if self._saver is None:
            return
        try:
            if wait:
                self._saver.finish()
        except CheckpointError as error:
            if not self._strategy.has_failed:
                raise
            get_logger(__name__).error("%s", error)  # the run ends for another reason
        finally:
            self._saver.close()


def _absolute(path: Any) -> Path:
    return Path(path).absolute() if "://" not in str(path) else Path(path)


def _identity(tensor: Tensor) -> tuple[int, int]:
    """Which memory, and how often it was changed in place (`.data` is not counted)."""
    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.data_ptr(), 0 if local.is_inference() else local._version
