"""The steps of a set-up model: a batch of the Trainer becomes this rank's micro-batches, which run
through the module's own step function.

How a batch is cut is known here; how micro-batches run (`runtime/step.py`), and what becomes of the
gradients (`MegatronStrategy`, `runtime/update.py`), is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule

from megatron_lightning.runtime.batch import MicroBatch, MicroBatches, split_batch
from megatron_lightning.runtime.context_batch import ContextSlicer
from megatron_lightning.runtime.metrics import log_published
from megatron_lightning.runtime.step import Position, StepResult, StepRunner, join_step_outputs
from megatron_lightning.strategies.guard import RunGuard
from megatron_lightning.strategies.loaders import begin_fingerprint, fingerprint

if TYPE_CHECKING:
    from megatron_lightning.strategies.model_strategy import ModelStrategy

MARKED_BATCHES, MARK_EVERY = 4, 64
"""Batches at the start of each pass, and every how many later, that the ranks of one model copy
compare: the first ones before their gradients are used (after a resume within a pass too), later
ones with the batch after them.
"""


class Steps:
    """Of one module, made anew by each set-up. All ranks call each method together.

    `batch_dims` and `sequence_dims` tell the dims of all fields of a batch, see
    `MegatronStrategy`.
    """

    def __init__(
        self,
        strategy: ModelStrategy,
        module: LightningModule,
        guard: RunGuard,
        *,
        batch_dims: Mapping[str, int],
        sequence_dims: Mapping[str, int | None],
    ) -> None:
        self._strategy = strategy
        self._module = module
        self._guard = guard
        self._batch_dims = batch_dims
        self._slice = ContextSlicer(
            strategy.mesh,
            batch_dims=batch_dims,
            sequence_dims=sequence_dims,
            sequence_parallel=strategy.config.sequence_parallel,
            contiguous=strategy.config.context.contiguous,
        )
        self.runner = StepRunner(
            module,
            strategy.parallel_model,
            strategy.mesh,
            strategy.config.pipeline.schedule,
            guard.ballot,
        )
        """Runs micro-batches through this rank's stages."""
        self._begun_mark: Callable[[], int] | None = None
        self._seen = 0
        """Batches of all passes."""
        self.runner.loss_scale = lambda: strategy.loss_scale

    def train(
        self,
        batch: Any,
        args: tuple[Any, ...],
        context: Callable[[], Any],
        *,
        reduce_now: bool,
    ) -> StepResult:
        """Run `training_step(batch, *args)` forward and backward. `reduce_now`: the batch is the
        last of its accumulation window, so that gradients may be reduced as they come.
        """
        self._begin()
        micro_batches = self._split(batch)
        samples = sum(micro_batch.num_samples for micro_batch in micro_batches)
        position = Position(
            batch_index=self._module.trainer.fit_loop.epoch_loop.total_batch_idx,
            first_sample=self._strategy.mesh.dp.rank * samples,
        )
        with self._guard.explaining():
            return self.runner.run(
                "training_step",
                micro_batches,
                args,
                context=context,
                batch_mark=self._mark(batch, args),
                position=position,
                reduce_now=reduce_now,
            )

    def evaluate(
        self, hook: str, batch: Any, args: tuple[Any, ...], context: Callable[[], Any]
    ) -> Any:
        """Run the step function `hook` without backward and log what it logged; what it gave for
        the whole batch, None on ranks without the last stage.
        """
        self._begin()
        if self._strategy.update is not None:
            self._strategy.update.wait()
        micro_batches = self._split(batch)
        with self._guard.explaining():
            result = self.runner.run(
                hook, micro_batches, args, context=context, batch_mark=self._mark(batch, args)
            )
        self._strategy.parallel_model.reshard()
        log_published(self._module, result.published.logs, None)  # Lightning refuses any of predict
        return join_step_outputs(result.outputs)

    def _begin(self) -> None:
        self._strategy.saves.poll()
        self._strategy.saves.state_changes()

    def _mark(self, batch: Any, args: tuple[Any, ...]) -> int | None:
        """What ranks of one model copy compare. Reading it makes the host wait for the device: at
        once on the first batches of a pass or of this set-up, later with the next batch of any
        pass, where it waits at most until the batch before has begun.
        """
        if self._strategy.config.model_parallel_size == 1:
            return None
        index = args[0] if args else self._seen  # a step function may leave the index out
        begun, self._begun_mark = self._begun_mark, None
        earlier = None if begun is None else begun()
        first = min(index, self._seen) < MARKED_BATCHES
        self._seen += 1
        if first:
            return (fingerprint(batch) + (earlier or 0)) % (1 << 62)
        if index % MARK_EVERY == 0:
            self._begun_mark = begin_fingerprint(batch)
        return earlier

    def _split(self, batch: Any) -> list[MicroBatch]:
        """This rank's micro-batches: of the batch's samples, with its slice of the sequence."""
        size = self._micro_batch_size()
        custom = getattr(self._module, "split_micro_batch", None)
        if custom is not None:
            batch = MicroBatches(custom(batch, size))
        whole = split_batch(
            batch,
            micro_batch_size=size,
            pipeline_size=self._strategy.mesh.pp.size,
            batch_dims=self._batch_dims,
        )
        return [self._slice(micro_batch) for micro_batch in self._weighed(whole)]

    def _micro_batch_size(self) -> int | None:
        """That of the strategy, else of the data module, else None."""
        size = self._strategy.config.micro_batch_size
        if size is not None:
            return size
        datamodule = self._module.trainer.datamodule  # type: ignore[attr-defined]
        return getattr(datamodule, "micro_batch_size", None)

    def _weighed(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """With the numbers of tokens by which losses of routers are weighed, if there are any."""
        balance = self._strategy.parallel_model.expert_balance
        count = getattr(self._module, "num_loss_tokens", None)
        if balance is None or not balance.has_losses or count is None:
            return micro_batches
        return [replace(part, num_loss_tokens=count(part.data)) for part in micro_batches]
