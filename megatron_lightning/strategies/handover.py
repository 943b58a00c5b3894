"""What forked ranks leave to the process that waits for them.

Results, metrics, loop progress and the attributes of callbacks go through a pipe. Weights go
through a checkpoint folder in the temporary directory, written by all ranks together; a network
that is built late reads it when it is used, and the ranks of the next run read their parts alone.
"""

from __future__ import annotations

import io
import itertools
import pickle
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

import megatron_lightning.checkpoint as store
from megatron_lightning.config.plan import canonical_name
from megatron_lightning.strategies import _compat, checkpoint_io
from megatron_lightning.strategies.checkpoint_tensors import MODEL
from megatron_lightning.strategies.failure import RankFailure, reason_of
from megatron_lightning.strategies.run_checks import given_datamodule, given_module
from megatron_lightning.utils.logging import get_logger, warn_once

if TYPE_CHECKING:
    from megatron_lightning.strategies.model_strategy import ModelStrategy

_PENDING = "_weights_of_ranks"
"""Attribute of a LightningModule: the folder with weights that it has not read yet."""
_VERSION_OF_RANKS = "_version_of_ranks"
"""Attribute of a logger: its version was chosen in a rank."""


class Handover:
    """From the ranks of one call of the Trainer to this process. Made before forking.

    Objects that exist at the fork are the same on both sides: they travel by identity.
    """

    def __init__(self, trainer: Trainer, arguments: dict[str, Any]) -> None:
        self._trainer = trainer
        self._module = given_module(trainer, arguments)
        data = given_datamodule(arguments)
        for logger in trainer.loggers:
            if vars(logger).pop(_VERSION_OF_RANKS, False):
                vars(logger)["_version"] = None  # each run logs into a version of its own
        known: list[Any] = [trainer, trainer.strategy, self._module, data]
        known += [*_compat.callbacks_of(trainer), *trainer.loggers]
        self._known = {id(thing): thing for thing in known if thing is not None}

    # ------------------------------------------------------------------ in a rank

    def collect(self, strategy: ModelStrategy, result: Any) -> bytes:
        """Everything that this rank has to give. All ranks call it together."""
        trainer, mesh = self._trainer, strategy.mesh
        weights = _save_weights(strategy) if trainer.state.fn == TrainerFn.FITTING else None
        content: dict[str, Any] = {}
        if mesh.tp.rank == 0 and mesh.pp.rank == 0 and mesh.cp.rank == 0:
            content["result"] = result  # predictions differ between data-parallel ranks
        if mesh.rank == 0:
            content |= {
                "weights": weights,
                "trainer": _compat.trainer_results(trainer),
                "dataloaders": _compat.num_predict_dataloaders(trainer),
                "versions": {
                    id(logger): vars(logger).get("_version") for logger in trainer.loggers
                },
            }
        packed = {"content": self._pack(content)}
        if mesh.rank == 0:
            packed |= {"callbacks": self._pack_callbacks()}
        return pickle.dumps(packed)

    def _pack(self, value: Any) -> bytes:
        buffer = io.BytesIO()
        _Pickler(buffer, self._known).dump(value)
        return buffer.getvalue()

    def _pack_callbacks(self) -> dict[int, dict[str, bytes]]:
        """Attributes of callbacks, each for itself; what can't be pickled stays behind."""
        packed: dict[int, dict[str, bytes]] = {}
        for callback in _compat.callbacks_of(self._trainer):
            if id(callback) not in self._known or isinstance(callback, ProgressBar):
                continue
            packed[id(callback)] = {}
            for name, value in vars(callback).items():
                try:
                    packed[id(callback)][name] = self._pack(value)
                except Exception as error:  # whatever a foreign object raises
                    get_logger(__name__).debug("%s.%s stays in the rank: %s", callback, name, error)
        return packed

    # ------------------------------------------------------------------ in the waiting process

    def receive(self, parts: Sequence[bytes | None]) -> Any:
        """Take over what the ranks gave, in rank order; returns what the Trainer is to return."""
        packed = [pickle.loads(part) for part in parts if part is not None]
        contents = [self._unpack(part["content"]) for part in packed]
        first = contents[0]
        trainer = self._trainer
        for identity, attributes in packed[0]["callbacks"].items():
            callback = self._known[identity]
            for name, value in attributes.items():
                vars(callback)[name] = self._unpack(value)
        _compat.restore_trainer_results(trainer, first["trainer"])
        for identity, version in first["versions"].items():
            logger = self._known.get(identity)
            if logger is not None and "_version" in vars(logger) and logger._version is None:
                vars(logger).update({"_version": version, _VERSION_OF_RANKS: True})
        if first["weights"] is not None and self._module is not None:
            _attach_weights(self._module, Path(first["weights"]))
        results = [content["result"] for content in contents if "result" in content]
        if trainer.state.fn == TrainerFn.PREDICTING:
            return _join_predictions(results, first["dataloaders"])
        return results[0]

    def _unpack(self, value: bytes) -> Any:
        return _Unpickler(io.BytesIO(value), self._known).load()


class _Pickler(pickle.Pickler):
    """Known objects by identity, tensors on the CPU."""

    def __init__(self, file: io.BytesIO, known: dict[int, Any]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._known = known

    def persistent_id(self, obj: Any) -> int | None:
        return id(obj) if id(obj) in self._known and self._known[id(obj)] is obj else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor) and obj.device.type not in ("cpu", "meta"):
            return obj.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, known: dict[int, Any]) -> None:
        super().__init__(file)
        self._known = known

    def persistent_load(self, pid: int) -> Any:
        return self._known[pid]


def picklable(exception: BaseException, rank: int) -> BaseException:
    """The exception itself if it survives a pipe, else a RankFailure that names it."""
    if isinstance(exception, SystemExit):
        kind = SIGTERMException if isinstance(exception, SIGTERMException) else SystemExit
        return kind(exception.code)
    try:
        copy = pickle.loads(pickle.dumps(exception))
    except Exception:  # whatever a foreign class raises
        copy = None
    if type(copy) is type(exception) and str(copy) == str(exception):
        return exception
    return RankFailure(rank, reason_of(exception))


def _join_predictions(results: Sequence[Any], dataloaders: int) -> Any:
    """Predictions of all data-parallel ranks: their first batches, their second ones, ..."""
    if any(result is None for result in results):
        return None
    if dataloaders > 1:
        return [_join_predictions(part, 1) for part in zip(*results, strict=True)]
    missing = object()
    rows = itertools.zip_longest(*results, fillvalue=missing)
    return [batch for row in rows for batch in row if batch is not missing]


# -------------------------------------------------------------------- weights


def _save_weights(strategy: ModelStrategy) -> str | None:
    """Write the weights into a new temporary folder. A collective."""
    folder = tempfile.mkdtemp(prefix="megatron-lightning-") if strategy.is_global_zero else None
    path = Path(strategy.broadcast(folder)) / "weights.ckpt"
    try:
        checkpoint_io.save(strategy, {}, path, None)
    except (OSError, store.CheckpointError) as error:
        warn_once(
            f"The trained weights could not be handed to this process ({error}): its module keeps "
            f"the old ones; set TMPDIR to a folder with room for them, or load a checkpoint"
        )
        return None
    return str(path)


def _attach_weights(module: LightningModule, path: Path) -> None:
    """Let `module` have the weights, at once if it holds tensors for them, else when it is
    built.
    """
    forget_pending(module)
    tensors = {f"{MODEL}{canonical_name(n)}": t for n, t in module.state_dict().items()}
    if tensors:
        with torch.no_grad():
            store.load(path, tensors, strict="none", scope=MODEL)
        shutil.rmtree(path.parent, ignore_errors=True)
        return
    vars(module)[_PENDING] = path
    weakref.finalize(module, shutil.rmtree, path.parent, ignore_errors=True)
    if not hasattr(module, "load_weights"):
        return  # the ranks of the next run read them

    def configure_model() -> None:
        type(module).configure_model(module)
        if not any(parameter.is_meta for parameter in module.parameters()):
            forget_pending(module)
            load: Any = module.load_weights
            load(path)

    vars(module)["configure_model"] = configure_model


def load_pending(strategy: ModelStrategy) -> None:
    """Read this rank's part of the weights that an earlier run left to the module, if it did."""
    module = strategy.lightning_module
    assert module is not None
    path = vars(module).get(_PENDING)
    if path is not None:
        checkpoint_io.load(strategy, path)
        forget_pending(module)


def forget_pending(module: LightningModule) -> None:
    """Note that `module` has its weights."""
    if vars(module).pop(_PENDING, None) is not None:
        vars(module).pop("configure_model", None)
