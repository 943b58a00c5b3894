"""Copies of the state on the nodes: made every few steps, kept by two ranks, taken up at a start.

After a step each rank copies what it holds to host memory, its writer process puts that into a
folder of the node, and a thread sends the folder to a partner on another node while training goes
on. A step counts once all ranks have it, which they tell each other with the votes of each step.
"""

from __future__ import annotations

import shutil
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.pytorch import Trainer

from megatron_lightning.checkpoint import CheckpointError, load_metadata, verify
from megatron_lightning.checkpoint.commit import begin, discard
from megatron_lightning.checkpoint.config_codec import CODEC
from megatron_lightning.checkpoint.exchange import exchange
from megatron_lightning.checkpoint.local import (
    Choice,
    Copy,
    clean,
    copies_in,
    newest_whole,
    own_path,
    partner_of,
    peer_path,
    prune,
)
from megatron_lightning.checkpoint.parts import PART, PartPlan
from megatron_lightning.checkpoint.saving import Objects, encode_objects
from megatron_lightning.checkpoint.staging import Staged, Stager
from megatron_lightning.config.validate import ConfigurationError
from megatron_lightning.strategies import _compat, checkpoint_tensors, random_states
from megatron_lightning.utils.logging import get_logger

if TYPE_CHECKING:
    from megatron_lightning.config.local_checkpoint import LocalCheckpointConfig
    from megatron_lightning.strategies.checkpoint_strategy import CheckpointStrategy


class LocalCopies:
    """Of one strategy; made where `checkpoint.local` is set. All ranks call each method together,
    but for `close`.
    """

    def __init__(self, strategy: CheckpointStrategy, config: LocalCheckpointConfig) -> None:
        self._strategy = strategy
        self._config = config
        self._folder = Path(config.folder)
        self._rank, self._size = strategy.global_rank, strategy.world_size
        self._group: Any = None
        if config.peer_copies and self._size > 1:
            timeout = timedelta(seconds=strategy.config.runtime.timeout_seconds)
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._stager = Stager(
            strategy.root_device, pin_memory=strategy.config.checkpoint.pin_memory
        )
        self._layout = f"{strategy.mesh.describe()}, {strategy.config.data_parallel}"
        self._job: _Job | None = None
        self._taken_up = -1
        self._first = self._unchecked = True
        self._due = False
        self._last_step = 0
        self.newest = 0
        """The newest step of which this rank has done its part; 0 before any."""

    def begin_fit(self) -> None:
        """Before a fit has loaded anything."""
        self._taken_up = -1
        self._first = self._unchecked = True
        self._due = False
        self.newest = 0

    # ------------------------------------------------------------------ while training goes on

    def after_batch(self, complete: int) -> None:
        """After a batch: see to the copy under way, and begin another when it is time. `complete`
        is the newest step that all ranks have told to be done.

        Raises what went wrong with the copy under way.
        """
        if self._job is not None and not self._job.is_alive():
            self._finish()
        if complete > 0:
            prune(self._folder, self._rank, self._config.keep, complete)
        module = self._strategy.lightning_module
        assert module is not None
        trainer = module.trainer
        step = trainer.global_step
        if step != self._last_step and step % self._config.every_n_steps == 0:
            self._due = True
        self._last_step = step
        if self._strategy.window_is_open:
            return
        if self._unchecked:
            self._check_space()
        if self._due and not _compat.more_follows(trainer):  # what is in between is not done yet
            self._due = False
            self._begin(trainer, step)

    def _begin(self, trainer: Trainer, step: int) -> None:
        self._finish()
        began, strategy = time.monotonic(), self._strategy
        if self._first:
            clean(self._folder, self._rank, self._taken_up)
        weights, objects = checkpoint_tensors.split(strategy, _compat.dump_checkpoint(trainer))
        tensors = checkpoint_tensors.tensors_to_save(strategy, weights, with_optimizer=True)
        metadata = {"global_step": step, PART: self._rank, "local_layout": self._layout}
        encoded = encode_objects(objects, metadata, CODEC)
        own = random_states.collect(self._rank, strategy.root_device)
        plan = PartPlan({**tensors, **encoded.tensors, **own})
        self._first = False
        path = own_path(self._folder, self._rank, step)
        staging = begin(path)
        staging.joinpath("data").mkdir()
        staged = self._stager.stage(plan.plan, plan.planner, staging, lambda _: False, began)
        self._job = _Job(self, plan, staged, path, staging, encoded, step)
        self._job.start()
        get_logger(__name__).debug("step %s: %.3f s", step, time.monotonic() - began)

    def _finish(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            self.newest = job.result()

    def send_to_partner(self, path: Path, step: int) -> None:
        """In the job's thread: give the partner this rank's part, and keep that of another."""
        if self._group is None:
            return
        nodes = self._strategy.num_processes
        partner = partner_of(self._rank, self._size, nodes)
        ward = next(
            rank for rank in range(self._size) if partner_of(rank, self._size, nodes) == self._rank
        )
        kept = peer_path(self._folder, self._rank, ward, step)
        exchange(self._group, send=(path, partner), receive=(kept, ward))

    def _check_space(self) -> None:
        """After the first step: refuse a folder that can't hold what is asked for."""
        self._unchecked = False
        strategy = self._strategy
        num_bytes = PartPlan(
            checkpoint_tensors.tensors_to_save(
                strategy, strategy.model_tensors(), with_optimizer=True
            )
        ).num_bytes
        copies = (self._config.keep + 1) * (2 if self._group is not None else 1)
        needed = num_bytes * copies * self._strategy.num_processes
        self._folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            raise ConfigurationError(
                [
                    f"checkpoint.local.folder={str(self._folder)!r}: {free / 2**30:.1f} GiB are"
                    f" free, and {self._strategy.num_processes} ranks with {copies} copies of"
                    f" {num_bytes / 2**30:.2f} GiB each need {needed / 2**30:.1f}; give a larger"
                    f" folder, a smaller keep, or peer_copies=False"
                ]
            )

    def close(self, *, wait: bool) -> None:
        """End what runs beside the training; a copy under way is finished, or given up."""
        job, self._job = self._job, None
        try:
            if job is not None and wait:
                self.newest = job.result()
        except Exception as error:  # the run has ended, with or without this copy
            get_logger(__name__).error("local copy: %s", error)
        finally:
            if job is not None and not wait:
                self._stager.kill()
            else:
                self._stager.close()

    # ------------------------------------------------------------------ at a start

    def choose(self, durable: Any) -> Path | Any:
        """This rank's part of the newest step that is whole on the nodes, or `durable` if that is
        newer (None: there is none).
        """
        durable_step = self._strategy.broadcast(-1 if durable is None else _step_of(durable))
        copies = [copy for copy in copies_in(self._folder) if copy.layout == self._layout]
        while True:
            choice = newest_whole(self._everyone([(copy.rank, copy.step) for copy in copies]))
            if choice is None or choice.step < durable_step:
                return durable
            bad = self._damaged(choice, copies)
            if not any(self._everyone(bad)):
                break
            copies = [copy for copy in copies if copy.path not in bad]
        path = self._fetch(choice, copies)
        self._taken_up = choice.step
        self._say(choice, durable_step)
        return path

    def _damaged(self, choice: Choice, copies: list[Copy]) -> list[Path]:
        """Of what this rank is to provide: copies whose checksums differ."""
        bad = []
        for path in self._provided(choice, copies).values():
            try:
                verify(path)
            except (CheckpointError, OSError) as error:
                get_logger(__name__).warning("a local copy is left aside: %s", error)
                bad.append(path)
        return bad

    def _provided(self, choice: Choice, copies: list[Copy]) -> dict[int, Path]:
        found = {copy.rank: copy.path for copy in reversed(copies) if copy.step == choice.step}
        return {r: found[r] for r, provider in choice.providers.items() if provider == self._rank}

    def _fetch(self, choice: Choice, copies: list[Copy]) -> Path:
        """This rank's part on this node, from another node if need be."""
        provided = self._provided(choice, copies)
        mine = own_path(self._folder, self._rank, choice.step)
        for rank, provider in sorted(choice.providers.items()):
            if provider == rank:
                continue
            if provider == self._rank:
                exchange(self._strategy.mesh.control_group, send=(provided[rank], rank))
            elif rank == self._rank:
                exchange(self._strategy.mesh.control_group, receive=(mine, provider))
        return provided.get(self._rank, mine)

    def _say(self, choice: Choice, durable_step: int) -> None:
        if self._strategy.is_global_zero:
            moved = sum(rank != provider for rank, provider in choice.providers.items())
            older = "none" if durable_step < 0 else f"step {durable_step}"
            get_logger(__name__).warning(
                "Resuming from local copies of step %s (%s of %s parts came from another node;"
                " newest checkpoint: %s)",
                choice.step,
                moved,
                self._size,
                older,
            )

    def _everyone(self, mine: Any) -> list[Any]:
        if self._size == 1:
            return [mine]
        answers: list[Any] = [None] * self._size
        dist.all_gather_object(answers, mine, group=self._strategy.mesh.control_group)
        return answers


class _Job(threading.Thread):
    """One copy on its way: written, put in place, given to the partner."""

    def __init__(
        self,
        copies: LocalCopies,
        plan: PartPlan,
        staged: Staged,
        path: Path,
        staging: Path,
        objects: Objects,
        step: int,
    ) -> None:
        super().__init__(name="local copy", daemon=True)
        self._copies, self._plan, self._staged = copies, plan, staged
        self._path, self._staging, self._objects, self._step = path, staging, objects, step
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._plan.commit(self._path, self._staging, self._staged.job.result(), self._objects)
            self._copies.send_to_partner(self._path, self._step)
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            self._error = error
            discard(self._staging)

    def result(self) -> int:
        """Wait for the end; the step."""
        self.join()
        if self._error is not None:
            raise CheckpointError(f"local copy {self._path}: {self._error}") from self._error
        return self._step


def _step_of(path: Any) -> int:
    """Optimizer steps of a checkpoint; -1 where it says none or can't be read."""
    try:
        step = load_metadata(path, codec=CODEC).get("global_step")
    except (CheckpointError, OSError, ValueError):
        return -1
    return -1 if step is None else int(step)
