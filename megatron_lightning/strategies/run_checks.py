"""What is checked when `Trainer.fit` (or validate, ...) is called, before anything starts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden

from megatron_lightning.config.validate import raise_if_any
from megatron_lightning.strategies import _compat
from megatron_lightning.strategies.checkpoint_checks import check_checkpoint_path
from megatron_lightning.strategies.module_checks import module_problems
from megatron_lightning.strategies.recovery import recover_folders
from megatron_lightning.strategies.resume import starting_point, use_folders
from megatron_lightning.strategies.trainer_checks import trainer_problems
from megatron_lightning.utils.env import Launch

if TYPE_CHECKING:
    from megatron_lightning.strategies.mesh_strategy import MeshStrategy

_FIRST_RANK_SECONDS = 10.0
_LOADERS = {
    TrainerFn.FITTING: "train",
    TrainerFn.VALIDATING: "val",
    TrainerFn.TESTING: "test",
    TrainerFn.PREDICTING: "predict",
}


def check_run(strategy: MeshStrategy, trainer: Trainer, arguments: Mapping[str, Any]) -> None:
    """Check what `Trainer.fit` (or validate, ...) was given against the layout.

    No process group is needed, and no file but indexes is opened. Raises ConfigurationError with
    every violation.
    """
    use_folders(trainer)
    recover_folders(strategy, trainer)
    problems = _started_problems(strategy)
    problems += _checkpoint_problems(trainer, arguments)
    problems += _loader_problems(trainer, arguments)
    trainer_check = getattr(given_datamodule(arguments), "check_trainer", None)
    if trainer_check is not None:
        problems += trainer_check(trainer)
    module = given_module(trainer, arguments)
    if module is not None:
        world_size = strategy.num_processes * strategy.num_nodes
        problems += module_problems(strategy, module, given_datamodule(arguments), world_size)
        problems += trainer_problems(strategy, trainer, module)
    raise_on_first_rank(problems, strategy.global_rank)


def _checkpoint_problems(trainer: Trainer, arguments: Mapping[str, Any]) -> list[str]:
    """What is wrong with the checkpoint to begin from, also where "last" or the like names it."""
    name = arguments.get("ckpt_path")
    try:
        path = starting_point(trainer, name, model_given=arguments.get("model") is not None)
    except ValueError as error:
        return [f"ckpt_path={name!r}: {error}"]
    return check_checkpoint_path(
        path, given_module(trainer, arguments), given_datamodule(arguments), name=name
    )


def _loader_problems(trainer: Trainer, arguments: Mapping[str, Any]) -> list[str]:
    """Whether data module or module gives what is to be run over, where no loader was passed."""
    function = trainer.state.fn
    given = given_datamodule(arguments)
    passed = arguments.get("train_dataloaders", arguments.get("dataloaders"))
    source = given if given is not None else given_module(trainer, arguments)
    if function is None or source is None or passed is not None and given is None:
        return []
    part = _LOADERS[function]
    name = f"{part}_dataloader"
    unused = getattr(trainer, f"limit_{part}_batches") == 0
    if unused or is_overridden(name, source) or _comes_later(trainer, arguments):
        return []
    goes_on = function == TrainerFn.PREDICTING and hasattr(
        given_module(trainer, arguments), "generate"
    )
    otherwise = ", or go on with prompts by `megatron-lightning generate`" if goes_on else ""
    return [
        f"{function.value}: {type(source).__name__} has no {name}; give data with one (on the"
        f" command line `--data my.module.Class`){otherwise}"
    ]


def _comes_later(trainer: Trainer, arguments: Mapping[str, Any]) -> bool:
    """Whether somebody's own code may still give a loader when the run is set up."""
    hooks = {
        given_module(trainer, arguments): ("prepare_data", "setup"),
        given_datamodule(arguments): ("prepare_data", "setup"),
        **dict.fromkeys(_compat.callbacks_of(trainer), ("setup",)),
    }
    return any(
        one is not None
        and type(one).__module__.partition(".")[0] not in ("lightning", "megatron_lightning")
        and is_overridden(name, one)
        for one, names in hooks.items()
        for name in names
    )


def raise_on_first_rank(problems: Sequence[str], rank: int) -> None:
    """Raise the full message on global rank 0. Other ranks, started from outside, leave quietly
    with status 1, and not before rank 0 has had time to speak: launchers end all ranks with the
    first.
    """
    if problems and rank != 0:
        time.sleep(_FIRST_RANK_SECONDS)
        raise SystemExit(1)
    raise_if_any(problems)


def given_module(trainer: Trainer, arguments: Mapping[str, Any]) -> LightningModule | None:
    """The module of this call of the Trainer, else that of the call before."""
    module = arguments.get("model")
    return module if module is not None else trainer.lightning_module


def given_datamodule(arguments: Mapping[str, Any]) -> LightningDataModule | None:
    """The data module of this call of the Trainer."""
    for name in ("datamodule", "train_dataloaders", "dataloaders"):
        if isinstance(arguments.get(name), LightningDataModule):
            return arguments[name]
    return None


def _started_problems(strategy: MeshStrategy) -> list[str]:
    """Whether as many processes run as devices and num_nodes say."""
    environment = strategy.cluster_environment
    assert environment is not None
    if not environment.creates_processes_externally:
        return []
    started = (
        dist.get_world_size() if dist.is_initialized() else Launch.from_environment().world_size
    )
    wanted = strategy.num_processes * strategy.num_nodes
    if started in (1, wanted):  # 1 also where nothing says how many
        return []
    return [
        f"devices x num_nodes = {strategy.num_processes} x {strategy.num_nodes} = {wanted}, but "
        f"{started} processes were started (by torchrun, srun, or an earlier Trainer of this "
        f"script); start {wanted}, or set devices and num_nodes to match"
    ]
