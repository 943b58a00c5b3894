"""The part of the strategy that knows what is kept of a run: checkpoints, saves beside training,
copies on the nodes, states of random generators.

It asks for the cut model and for what updates it, and knows neither how a model is cut nor how it
is trained. `checkpoint_io.py` turns Lightning's dictionary into a checkpoint.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from megatron_lightning.checkpoint import SaveTimes
from megatron_lightning.config.parallel import ParallelConfig
from megatron_lightning.config.plan import ParallelPlan
from megatron_lightning.runtime.model import ParallelModel
from megatron_lightning.runtime.update import ParameterUpdate
from megatron_lightning.strategies import checkpoint_io, checkpoint_tensors
from megatron_lightning.strategies.local_copies import LocalCopies
from megatron_lightning.strategies.mesh_strategy import MeshStrategy
from megatron_lightning.strategies.random_states import Generators
from megatron_lightning.strategies.saves import Saves
from megatron_lightning.strategies.signals import SAVED_STEP


class CheckpointStrategy(MeshStrategy):
    """A mesh of which the model's state is kept. Abstract: `ModelStrategy` adds the model."""

    network_prefix = ""
    """What names of the cut network's parameters begin with, e.g. "network."."""

    def __init__(self, config: ParallelConfig, plan: ParallelPlan | None) -> None:
        super().__init__(config, plan)
        self._local: LocalCopies | None = None
        self.generators = Generators()
        self.saves = Saves(self)
        """Saves of checkpoints, in the background if asked for."""

    @property
    @abstractmethod
    def is_cut(self) -> bool:
        """Whether there is a `parallel_model`."""

    @property
    @abstractmethod
    def parallel_model(self) -> ParallelModel:
        """This rank's part of the model and its parameter table; RuntimeError before setup."""

    @property
    @abstractmethod
    def update(self) -> ParameterUpdate | None:
        """What the optimizers update, and how gradients get there; None unless fitting."""

    # ------------------------------------------------------------------ beside training

    def _begin_local_copies(self) -> None:
        if self._local is None and self.config.checkpoint.local is not None:
            self._local = LocalCopies(self, self.config.checkpoint.local)
        if self._local is not None:
            self._local.begin_fit()

    @override
    def choose_start(self, path: Any) -> Any:
        return path if self._local is None else self._local.choose(path)

    @override
    def at_step_boundary(self, complete: int) -> None:
        if self._local is not None:
            assert self._guard is not None
            self._local.after_batch(complete)
            self._guard.ballot.mine[SAVED_STEP] = self._local.newest

    @override
    def on_train_end(self) -> None:
        self.saves.finish()

    def _end_saves(self, together: bool) -> None:
        """End what runs beside training; `together`: no other rank has left."""
        self.saves.close(wait=not self.fails_alone)
        if self._local is not None:
            self._local.close(wait=together)

    # ------------------------------------------------------------------ checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Local tensors by canonical name; the checkpoint holds the global ones."""
        return checkpoint_tensors.model_tensors(self) if self.is_cut else {}

    def model_tensors(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers that this rank holds, by canonical name."""
        return checkpoint_tensors.model_tensors(self)

    @property
    def save_times(self) -> SaveTimes | None:
        """What the last checkpoint cost that was committed, the same on every rank; None before."""
        return self.saves.times

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Empty: the strategy saves optimizer state itself, as global tensors."""
        return {}

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        if self.may_save(filepath):
            checkpoint_io.save(self, checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        self.saves.finish()
        self.saves.state_changes()
        return checkpoint_io.load(self, checkpoint_path)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Only a check: `load_checkpoint` has put the weights in place."""
        checkpoint_io.check_loaded(self, checkpoint)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: `load_checkpoint` has put the optimizer state in place."""

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        checkpoint_io.remove(self, filepath)
