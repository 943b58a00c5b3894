"""The few touch points with Lightning that are not quite public. Each has a test that fails when
Lightning changes it.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core import saving
from lightning.pytorch.trainer.call import _call_and_handle_interrupt
from torch import Tensor
from torch.optim import Optimizer

from megatron_lightning.parallel.mesh import ParallelMesh

if TYPE_CHECKING:
    from megatron_lightning.strategies.mesh_strategy import MeshStrategy


def set_world_ranks(strategy: MeshStrategy) -> None:
    """Give the cluster environment this process' global rank and the world size, as Lightning's
    DDP strategy does.
    """
    environment = strategy.cluster_environment
    if environment is not None:
        environment.set_global_rank(
            strategy.node_rank * strategy.num_processes + strategy.local_rank
        )
        environment.set_world_size(strategy.num_nodes * strategy.num_processes)
    rank_zero_only.rank = strategy.global_rank


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """The Trainer's own list of callbacks: its connector sets it, nothing declares it."""
    return trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]


def is_trial(trainer: Trainer) -> bool:
    """Whether this is a `fast_dev_run`, which leaves nothing behind."""
    return bool(trainer.fast_dev_run)  # pyright: ignore[reportAttributeAccessIssue]


def set_callbacks(trainer: Trainer, callbacks: list[Callback]) -> None:
    """Exchange that list."""
    trainer.callbacks = callbacks  # pyright: ignore[reportAttributeAccessIssue]


def optimizers_to_device(optimizers: Sequence[Optimizer], device: torch.device) -> None:
    """Move optimizer state that exists already to `device`."""
    _optimizers_to_device(optimizers, device)


def reduce_tensor(tensor: Tensor, group: Any, reduce_op: Any) -> Tensor:
    """Sum or mean of `tensor` over `group` (None: all ranks), as Lightning's `Strategy.reduce`
    promises it.
    """
    group = dist.group.WORLD if group is None else group
    result = tensor.clone()
    mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
    if mean and not result.is_floating_point():
        result = result.float()
    op = reduce_op if isinstance(reduce_op, dist.ReduceOp) else _NAMED_OPS[str(reduce_op).lower()]
    dist.all_reduce(result, op=op, group=group)  # pyright: ignore[reportArgumentType]
    return result / dist.get_world_size(group) if mean else result


_NAMED_OPS: dict[str, Any] = {
    "mean": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def share_predictions(prediction: Any, mesh: ParallelMesh, source: int) -> Any:
    """Give every pipeline rank the prediction of the one that holds the last stage, `source` on the
    pipeline axis (its tensors on the CPU when they travelled).
    """
    if mesh.pp.size == 1:
        return prediction
    box = [prediction]
    dist.broadcast_object_list(box, src=mesh.pp.ranks[source], group=mesh.pp.group)
    return prediction if mesh.pp.rank == source else box[0]


# -------------------------------------------------------------------- signals


def replace_signal_handlers(
    trainer: Trainer, *, sigterm: Callable[..., None] | None, requeue: Callable[..., None]
) -> None:
    """Make the Trainer register these handlers of (signum, frame) instead of its own.

    None keeps Lightning's for SIGTERM. The one for SLURM's requeue signal is used where Lightning
    would register one. The handlers from before come back at the end of the run, as always.
    """
    connector = trainer._signal_connector
    if sigterm is not None:
        connector._sigterm_notifier_fn = sigterm  # type: ignore[method-assign]
    connector._slurm_sigusr_handler_fn = requeue  # type: ignore[method-assign]


def set_handler_from_before(trainer: Trainer, signum: int, handler: Any) -> None:
    """Make `handler` what the Trainer puts back at the end, if it was to put one back."""
    originals = trainer._signal_connector._original_handlers
    if signum in originals:
        originals[signum] = handler  # type: ignore[index]


def note_sigterm(trainer: Trainer) -> None:
    """Make the loops raise SIGTERMException at the end of this batch."""
    trainer._signal_connector.received_sigterm = True


def skip_sigterm_broadcast(trainer: Trainer) -> None:
    """Save the loop's own broadcast of SIGTERM before each batch, which waits for the device and
    hides errors: the flag is agreed on already.
    """
    loop = trainer.fit_loop.epoch_loop
    if hasattr(loop, "_broadcast_sigterm_tensor"):  # since Lightning 2.6
        loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def more_follows(trainer: Trainer) -> bool:
    """Whether a validation or the end of the epoch comes after this batch, before the next one."""
    loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
    assert fetcher is not None
    return loop._num_ready_batches_reached() or loop._should_check_val_fx(fetcher)


def dump_checkpoint(trainer: Trainer) -> dict[str, Any]:
    """What Lightning puts into a checkpoint at this moment."""
    return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)


def validation_to_be_done(trainer: Trainer) -> dict[str, Any]:
    """Saved progress of a validation that has just begun, by which a resumed run does all of it."""
    done = trainer.fit_loop.epoch_loop.val_loop.batch_progress.total.completed
    begun = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
    total = {name: number + done for name, number in begun.items()}
    return {"total": total, "current": begun, "is_last_batch": False}


def set_validation_progress(checkpoint: dict[str, Any], progress: dict[str, Any]) -> None:
    """Put what `validation_to_be_done` gave into a checkpoint that is being made."""
    loops = checkpoint["loops"]["fit_loop"]
    assert "epoch_loop.val_loop.batch_progress" in loops
    loops["epoch_loop.val_loop.batch_progress"] = progress


# -------------------------------------------------------------------- checkpoints


def read_folders_in_load_from_checkpoint(
    is_folder: Callable[[Any], bool], read: Callable[[Any, Any], dict[str, Any]]
) -> None:
    """Let `LightningModule.load_from_checkpoint` read what `is_folder` knows with `read`(path,
    map_location); files are read as before. Said twice, the last one counts.
    """
    original: Any = getattr(saving.pl_load, _READS_FILES, saving.pl_load)

    def load(path: Any, map_location: Any = None, **options: Any) -> Any:
        if is_folder(path):
            return read(path, map_location)
        return original(path, map_location=map_location, **options)

    setattr(load, _READS_FILES, original)
    saving.pl_load = load  # type: ignore[assignment]


_READS_FILES = "_reads_files"
"""Attribute of what is in the place of Lightning's function: that function."""


def show_pending(
    trainer: Trainer,
    is_pending: Callable[[Any], bool],
    after_commit: Callable[[Callable[[], None]], None],
) -> list[Callable[[], None]]:
    """Let each `ModelCheckpoint` see a save under way as a file that is there, and link to it only
    when it is. Returns what undoes that.
    """
    return [
        _show_pending_to(callback, is_pending, after_commit)
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, ModelCheckpoint)
    ]


def _show_pending_to(
    callback: ModelCheckpoint,
    is_pending: Callable[[Any], bool],
    after_commit: Callable[[Callable[[], None]], None],
) -> Callable[[], None]:
    exists, link = callback.file_exists, callback._link_checkpoint

    def file_exists(filepath: Any, trainer: Trainer) -> bool:
        return is_pending(filepath) or exists(filepath, trainer)

    def link_checkpoint(trainer: Trainer, filepath: str, linkpath: str) -> None:
        if is_pending(filepath):
            after_commit(lambda: link(trainer, filepath, linkpath))
        else:
            link(trainer, filepath, linkpath)

    vars(callback).update(file_exists=file_exists, _link_checkpoint=link_checkpoint)

    def undo() -> None:
        for name in ("file_exists", "_link_checkpoint"):
            vars(callback).pop(name, None)

    return undo


def epochs_done(trainer: Trainer) -> tuple[int, int]:
    """Epochs whose batches are done, and those whose hooks are done too."""
    current: Any = trainer.fit_loop.epoch_progress.current
    return current.processed, current.completed


def began_within_epoch(trainer: Trainer) -> bool:
    """Before a training step: whether the epoch has had steps already."""
    current: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return current.processed > 0


def saves_training_state(trainer: Trainer) -> bool:
    """Whether a callback of Lightning will save more than weights."""
    found = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
    return any(not callback.save_weights_only for callback in found)


def checkpoint_folders(trainer: Trainer) -> list[str]:
    """Where `ModelCheckpoint`s of this Trainer save, as far as that can be known before it runs: a
    logger's next version is new.
    """
    versions = [vars(logger).get("_version") for logger in trainer.loggers]
    return [
        os.fspath(
            callback.dirpath
            if callback.dirpath is not None
            else callback._ModelCheckpoint__resolve_ckpt_dir(trainer)  # type: ignore[attr-defined]
        )
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, ModelCheckpoint)
        and (callback.dirpath is not None or not versions or versions[0] is not None)
    ]


def knows_checkpoint_folders(trainer: Trainer) -> bool:
    """Whether `checkpoint_folders` are all that there will be."""
    savers = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
    return len(checkpoint_folders(trainer)) == len(savers)


# -------------------------------------------------------------------- launching


def run_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Arguments of `Trainer.fit` (or validate, ...) by name, from what it gives to a launcher."""
    return dict(inspect.signature(function).bind(*args, **kwargs).arguments)


def set_num_threads(num_processes: int) -> None:
    """Share the cores between the ranks of this node, unless OMP_NUM_THREADS says otherwise."""
    _set_num_threads_if_needed(num_processes=num_processes)


# -------------------------------------------------------------------- ranks forked from the Trainer


def call_in_rank(
    trainer: Trainer, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the Trainer's function in this process with Lightning's handling of exceptions."""
    return _call_and_handle_interrupt(trainer, lambda: function(*args, **kwargs))


def trainer_results(trainer: Trainer) -> dict[str, Any]:
    """Metrics, progress and state of a Trainer as plain objects, to be put into another process'
    Trainer.
    """
    loops = trainer.fit_loop.state_dict()
    for value in loops.values():
        value.pop("combined_loader", None)
    return {
        "callback_metrics": dict(trainer.callback_metrics),
        "logged_metrics": dict(trainer.logged_metrics),
        "progress_bar_metrics": dict(trainer.progress_bar_metrics),
        "state": trainer.state,
        "should_stop": trainer.should_stop,
        "loops": loops,
    }


def num_predict_dataloaders(trainer: Trainer) -> int:
    """Loaders of the last `predict`; 0 before any."""
    combined = trainer.predict_loop._combined_loader
    return 0 if combined is None else len(combined.flattened)


def restore_trainer_results(trainer: Trainer, results: dict[str, Any]) -> None:
    """Put what `trainer_results` gave into this process' Trainer, which then looks as if it had
    run itself.
    """
    for name in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
        held = getattr(trainer, name)
        held.clear()
        held.update(results[name])
    trainer.state = results["state"]
    trainer.should_stop = results["should_stop"]
    trainer.fit_loop.load_state_dict(results["loops"])
    loops = [trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop]
    loops.append(trainer.fit_loop.epoch_loop.automatic_optimization)  # type: ignore[arg-type]
    loops.append(trainer.fit_loop.epoch_loop.manual_optimization)  # type: ignore[arg-type]
    for loop in loops:  # not a restart in the middle: the next fit goes on where this one ended
        loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
