"""One Lightning step as a pipeline run: the user's own step function per micro-batch, on every
stage.

`StepRunner` binds the LightningModule to the action-list engine. A training run does forward and
backward of all micro-batches; the gradients land in the buckets, weighted so that one division at
the end of the accumulation window normalises them (architecture, "The loss is normalised once").
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.schedules.actions import ActionLists
from megatron_lightning.parallel.schedules.build import ScheduleName, build_schedule
from megatron_lightning.runtime.ballot import Ballot
from megatron_lightning.runtime.batch import MicroBatch, join_outputs
from megatron_lightning.runtime.metrics import LogRecorder
from megatron_lightning.runtime.model import ParallelModel, share_buffers, stateful_buffers
from megatron_lightning.runtime.pipeline_engine import PipelineEngine, StageRunner
from megatron_lightning.runtime.publish import Published, Publisher
from megatron_lightning.runtime.sharded import ChunkOutputs
from megatron_lightning.runtime.timeline import Category, Timeline, span
from megatron_lightning.utils.logging import warn_once
from megatron_lightning.utils.tensors import scalar

Received = tuple[Tensor, ...] | None

_schedule = functools.cache(build_schedule)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a run gave on this rank."""

    published: Published
    outputs: list[Any] = field(default_factory=list)
    """Results of the step function for each micro-batch, on the ranks of the last stage; empty
    elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where in training a batch stands: what dropout masks are a function of."""

    batch_index: int
    """Batches seen by this data-parallel rank since training began."""
    first_sample: int
    """Global index, within the batches of all data-parallel ranks, of this rank's first sample."""


class StepRunner:
    """Runs step functions of one LightningModule through its pipeline."""

    def __init__(
        self,
        module: LightningModule,
        model: ParallelModel,
        mesh: ParallelMesh,
        schedule: ScheduleName,
        ballot: Ballot | None = None,
    ) -> None:
        self._module = module
        self._model = model
        self._mesh = mesh
        self._publisher = Publisher(mesh, ballot)
        self._buffers = stateful_buffers(module)
        looped = model.num_chunks > 1 and not model.placement.v_shaped
        self._schedule: ScheduleName = "interleaved" if looped else schedule
        if mesh.lanes is not None:
            self._schedule = "paired"
        self._engine = PipelineEngine(
            mesh.pp,
            device=mesh.device,
            num_chunks=model.num_chunks,
            v_shaped=model.placement.v_shaped,
            weight_gradients=model.weight_gradients,
            lanes=mesh.lanes,
        )
        self.loss_scale: Callable[[], float] = _unscaled
        """Factor of losses in their backward passes (float16)."""
        self.timeline: Timeline | None = None
        """Set for a run whose times are wanted."""

    def run(
        self,
        hook: str,
        micro_batches: Sequence[MicroBatch],
        args: tuple[Any, ...],
        *,
        context: Callable[[], AbstractContextManager[Any]],
        position: Position | None = None,
        reduce_now: bool = False,
        batch_mark: int | None = None,
    ) -> StepResult:
        """Run the step function `hook` on all micro-batches; with a `position`, backward too.

        `reduce_now` says that this run closes the accumulation window, so that buckets may be
        reduced as they fill. `batch_mark` is a fingerprint of the batch, which the ranks of a model
        copy must share; None where a copy has one rank.
        """
        training = position is not None
        self._model.look_for_unfrozen()
        if self._model.quantization is not None:
            self._model.quantization.begin_run(training=training)
        actions = self.schedule(len(micro_batches), forward_only=not training)[self._mesh.pp.rank]
        share_buffers(self._buffers, self._mesh)
        recorder = LogRecorder(self._module, self._mesh.device, pipelined=self._mesh.pp.size > 1)
        stage = _Stage(self, hook, micro_batches, args, context, recorder, position)
        with recorder.capture():
            self._engine.run(
                actions,
                stage,
                signatures=[batch.signature() for batch in micro_batches],
                backward=training,
                before_last_backward=self._model.arming() if reduce_now else None,
                timeline=self.timeline,
            )
        if reduce_now:
            self._model.end_backward()
        source = self._model.holds_last
        with span(self.timeline, Category.COLLECTIVE, "publish losses and logs"):
            published = self._publisher.publish(
                stage.loss_total() if source else None,
                recorder.totals if source else None,
                batch_mark,
            )
        return StepResult(published=published, outputs=stage.outputs)

    def schedule(self, num_microbatches: int, *, forward_only: bool = False) -> ActionLists:
        """Action lists of all pipeline ranks."""
        return _schedule(
            self._schedule,
            pipeline_size=self._mesh.pp.size,
            num_chunks=self._model.num_chunks,
            num_microbatches=num_microbatches,
            forward_only=forward_only,
        )

    @property
    def module(self) -> LightningModule:
        """The user's module."""
        return self._module

    @property
    def model(self) -> ParallelModel:
        """The cut model."""
        return self._model

    @property
    def mesh(self) -> ParallelMesh:
        """The mesh."""
        return self._mesh


def _unscaled() -> float:
    return 1.0


class _Stage(StageRunner):
    """The engine's callbacks for one run."""

    def __init__(
        self,
        runner: StepRunner,
        hook: str,
        micro_batches: Sequence[MicroBatch],
        args: tuple[Any, ...],
        context: Callable[[], AbstractContextManager[Any]],
        recorder: LogRecorder,
        position: Position | None,
    ) -> None:
        self._runner = runner
        self._step = getattr(runner.module, hook)
        self._hook = hook
        self._micro_batches = micro_batches
        self._args = args
        self._context = context
        self._recorder = recorder
        self._position = position
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=runner.mesh.device)
        self._weight = torch.zeros((), dtype=torch.float64, device=runner.mesh.device)
        self.outputs: list[Any] = []

    def loss_total(self) -> tuple[Tensor, Tensor]:
        """(sum of weight x loss, sum of weights) over this rank's micro-batches."""
        return self._loss_sum, self._weight

    def forward(self, micro_batch: int, chunk: int, received: Received) -> Any:
        """Run one chunk on one micro-batch; on the last chunk, the weighted loss."""
        batch = self._micro_batches[micro_batch]
        self._recorder.begin_micro_batch()
        held = None if batch.context is None else batch.context.held
        if self._position is None:
            self._runner.model.begin_evaluation(held)
        else:
            self._runner.model.begin_forward(
                self._position.batch_index,
                micro_batch,
                self._first_sample(micro_batch),
                chunk,
                held,
            )
            if self._runner.model.expert_balance is not None:
                weight = batch.share if batch.num_loss_tokens is None else batch.num_loss_tokens
                self._runner.model.expert_balance.begin_forward(weight * self._runner.loss_scale())

        def step() -> Any:
            with self._context():
                return self._step(batch.data, *self._args)

        carried = received[0] if received is not None and len(received) == 1 else received
        model = self._runner.model
        if self._position is None or not model.backward_is_shared:
            done, result = model.run_chunk(chunk, carried, step)
            return self._finish(batch, result) if done else result
        with ChunkOutputs(model, chunk) as outputs:
            done, result = model.run_chunk(chunk, carried, step)
        if not done:
            return result
        loss = self._finish(batch, result)
        return outputs.zero() if loss is None else loss

    def _first_sample(self, micro_batch: int) -> int:
        assert self._position is not None
        return self._position.first_sample + sum(
            batch.num_samples for batch in self._micro_batches[:micro_batch]
        )

    def _finish(self, batch: MicroBatch, result: Any) -> Tensor | None:
        """Take the step's result of one micro-batch on the last chunk."""
        loss, tokens = (
            _loss_of(result, self._hook)
            if self._position is not None
            else (None, _tokens_of(result))
        )
        here: Tensor | float = 1.0
        if batch.context is not None:
            here = batch.context.share
            result = batch.context.whole(result) if self._hook == "predict_step" else result
        self._recorder.end_micro_batch(batch.num_samples * here if tokens is None else tokens, here)
        self.outputs.append(result)
        if loss is None:
            return None
        self._check_weight(batch, tokens)
        if not loss.requires_grad:
            warn_once(_NO_GRADIENT)
        weight = scalar(batch.share * here if tokens is None else tokens, loss.device)
        # A mean over no token is not a number for many losses, and its weight is 0.
        raw = loss.detach()
        loss = torch.where(weight > 0, loss, torch.zeros_like(loss))
        self._loss_sum += (
            torch.where(weight > 0, loss.detach().to(torch.float64), self._loss_sum.new_zeros(()))
            * weight
        )
        self._weight += weight
        if self._has_no_gradient(batch, raw, weight):
            return None
        scale = self._runner.loss_scale()
        if scale == 1.0:
            return loss * weight.to(loss.dtype)
        return loss.float() * (weight * scale).float()

    def _check_weight(self, batch: MicroBatch, tokens: Any) -> None:
        """Auxiliary losses were weighed before the step said by what its loss is."""
        balance = self._runner.model.expert_balance
        if balance is None or not balance.has_losses:
            return
        if (tokens is None) != (batch.num_loss_tokens is None):
            told = "None" if batch.num_loss_tokens is None else "a number"
            raise ValueError(
                f"{self._hook} returned {'no' if tokens is None else 'a'} num_tokens while the"
                f" module's num_loss_tokens(batch) gives {told}: stages without the loss weigh the"
                " routers' losses by it, so define both alike (the tokens of a whole micro-batch"
                " over which the loss is a mean, or None for a plain mean)"
            )

    def _has_no_gradient(self, batch: MicroBatch, loss: Tensor, weight: Tensor) -> bool:
        """Whether the loss is a 0/0 whose gradient isn't a number either, and may be left out.

        It is not asked on a GPU, which would have to stop, nor where peers would wait for this
        backward pass: there the module has to take care (`layers.masked_mean` does).
        """
        alone = batch.context is None and not self._runner.model.backward_is_shared
        return alone and not loss.is_cuda and float(weight) == 0 and not bool(loss.isfinite())


_NO_GRADIENT = (
    "The loss that training_step returned does not depend on any trainable parameter: such a"
    " micro-batch changes nothing. Is everything frozen, or was the loss computed under no_grad or"
    " detached?"
)


def _tokens_of(result: Any) -> Any:
    return result.get("num_tokens") if isinstance(result, Mapping) else None


def _loss_of(result: Any, hook: str) -> tuple[Tensor | None, Any]:
    """(loss, num_tokens or None) from what `training_step` returned; ValueError when it is
    something else.
    """
    if result is None:
        return None, None
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ValueError(
            f"{hook} returned {type(result).__name__}: return a scalar loss tensor, or a dict "
            f"with 'loss' (and 'num_tokens'"
            " if the loss is a mean over that many tokens)"
        )
    return loss.reshape(()), _tokens_of(result)


def join_step_outputs(outputs: Sequence[Any]) -> Any:
    """Outputs of the micro-batches as one: what `predict_step` and `validation_step` give for the
    whole batch.
    """
    return (
        join_outputs(outputs) if outputs and all(output is not None for output in outputs) else None
    )
