"""Which checkpoint a run begins from where the user names none: "last", "hpc", SLURM's requeue.

Lightning looks for `hpc_ckpt_N.ckpt` by digits in file names, and would take folders of an
interrupted save for one; "last" doesn't look at them at all. Here only complete checkpoints count,
and "last" takes the newest, whether a callback saved it or a signal.
"""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from megatron_lightning.checkpoint import CheckpointError, is_checkpoint, read_manifest
from megatron_lightning.strategies import _compat
from megatron_lightning.utils.logging import warn_once

if TYPE_CHECKING:
    from megatron_lightning.strategies.mesh_strategy import MeshStrategy

_PREEMPTED = re.compile(r"hpc_ckpt_(\d+)\.ckpt")


class FolderConnector(_CheckpointConnector):
    """The Trainer's choice of a checkpoint, among folders of this package."""

    _automatic = False
    """Whether the newest checkpoint is wanted, and not a certain one."""

    @property
    @override
    def _hpc_resume_path(self) -> str | None:
        return newest_preempted(self.trainer.default_root_dir)

    @staticmethod
    @override
    def hpc_save_path(folderpath: Any) -> str:
        """Name of the next preemption checkpoint."""
        return next_preempted(folderpath)

    @override
    def _select_ckpt_path(self, *args: Any, **kwargs: Any) -> Any:
        self._automatic = False
        return super()._select_ckpt_path(*args, **kwargs)

    @override
    def _parse_ckpt_path(self, state_fn: TrainerFn, ckpt_path: Any, *args: Any, **kw: Any) -> Any:
        found = super()._parse_ckpt_path(state_fn, ckpt_path, *args, **kw)
        preempted = self._hpc_resume_path if ckpt_path == "last" else None
        if preempted is not None and (found is None or _age(found) < _age(preempted)):
            found = preempted
        without_name = ckpt_path is None and found is not None
        self._automatic = state_fn == TrainerFn.FITTING and (
            without_name or ckpt_path in ("last", "hpc")
        )
        return found

    def look_up(self, name: Any, *, model_given: bool) -> Any:
        """What a run with `ckpt_path=name` begins from, as far as that is known before it starts
        (ranks choose among local copies); None where it is not, or there is nothing.

        ValueError where the name stands for nothing that there could be.
        """
        if name not in (None, "last", "best", "hpc"):
            return name
        if name is None and self._user_managed:
            return self._ckpt_path
        found = self._found_for(name, model_given)
        copies = _strategy_of(self.trainer).config.checkpoint.local
        return None if self._automatic and copies is not None else found

    def _found_for(self, name: str | None, model_given: bool) -> Any:
        function = self.trainer.state.fn
        assert function is not None
        fits = function == TrainerFn.FITTING
        looks = name == "last" or (fits and name is None)
        if looks and not _compat.knows_checkpoint_folders(self.trainer):
            # Asking a logger for its version may begin its run. Where it is new, nothing lies there
            # but what was saved at preemption, which "last" takes where it is the newest.
            self._automatic = fits
            return self._hpc_resume_path if not name and SLURMEnvironment.detect() else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self._parse_ckpt_path(
                function,
                name,
                model_provided=model_given,
                model_connected=self.trainer.lightning_module is not None,
            )

    @override
    def resume_start(self, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        """Lightning's, from what the ranks agree on where the newest is wanted."""
        if self._automatic:
            checkpoint_path = _strategy_of(self.trainer).choose_start(checkpoint_path)
        super().resume_start(checkpoint_path, weights_only)


def _strategy_of(trainer: Trainer) -> MeshStrategy:
    return trainer.strategy  # type: ignore[return-value]


def use_folders(trainer: Trainer) -> None:
    """Let `trainer` look for checkpoints of this package."""
    connector = trainer._checkpoint_connector
    if type(connector) is _CheckpointConnector:
        connector.__class__ = FolderConnector


def starting_point(trainer: Trainer, name: Any, *, model_given: bool) -> Any:
    """Path of the checkpoint that a `ckpt_path` stands for: see `FolderConnector.look_up`. Of
    another connector than this package's: the name itself.
    """
    connector = trainer._checkpoint_connector
    if not isinstance(connector, FolderConnector):
        return name
    return connector.look_up(name, model_given=model_given)


def newest_preempted(folder: str | os.PathLike[str]) -> str | None:
    """Path of the `hpc_ckpt_N.ckpt` of highest N that is complete; None without one."""
    for number in sorted(_numbers(folder), reverse=True):
        path = Path(folder, f"hpc_ckpt_{number}.ckpt")
        if is_checkpoint(path):
            return str(path)
        warn_once(f"{path} is not a complete checkpoint folder of this package; it is left aside")
    return None


def next_preempted(folder: str | os.PathLike[str]) -> str:
    """Path for the next one: a number higher than any there."""
    return str(Path(folder, f"hpc_ckpt_{max(_numbers(folder), default=0) + 1}.ckpt"))


def _numbers(folder: str | os.PathLike[str]) -> list[int]:
    if "://" in os.fspath(folder) or not Path(folder).is_dir():
        return []
    found = (_PREEMPTED.fullmatch(path.name) for path in Path(folder).iterdir())
    return [int(match[1]) for match in found if match is not None]


def _age(path: Any) -> int:
    """When a checkpoint was saved, in nanoseconds since 1970; 0 for one that can't be read."""
    try:
        return read_manifest(path).created_unix_ns
    except (CheckpointError, OSError, ValueError):
        return 0
