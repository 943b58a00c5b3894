"""`MegatronStrategy`: model parallelism as a Lightning strategy.

It owns the life-cycle (processes, mesh, cutting the model, steps, checkpoints) and no algorithm.
No loop, fetcher, callback or progress bar of Lightning is replaced. The one obstacle is the order
inside Lightning's closure, `training_step -> zero_grad -> backward`: a pipelined schedule does
forward and backward together. So `training_step` runs the whole schedule into gradient buckets
(which `zero_grad` doesn't touch), and `backward` reduces and publishes them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from megatron_lightning.config.checkpoint import CheckpointConfig
from megatron_lightning.config.context import ContextConfig
from megatron_lightning.config.expert import ExpertConfig
from megatron_lightning.config.loss_scale import LossScaleConfig
from megatron_lightning.config.names import NamesArguments
from megatron_lightning.config.parallel import (
    DataParallelConfig,
    ParallelConfig,
    PipelineConfig,
    RuntimeConfig,
)
from megatron_lightning.config.plan import ParallelPlan
from megatron_lightning.config.quantization import QuantizationConfig
from megatron_lightning.config.recompute import RecomputeConfig
from megatron_lightning.runtime.metrics import log_published
from megatron_lightning.runtime.step import StepResult
from megatron_lightning.runtime.window import check_zeroed, warn_no_tokens
from megatron_lightning.strategies import _compat, checkpoint_tensors, whole_module
from megatron_lightning.strategies.model_strategy import ModelStrategy
from megatron_lightning.strategies.trainer_checks import (
    evaluated_once,
)

_compat.read_folders_in_load_from_checkpoint(whole_module.is_folder, whole_module.read_folder)


class MegatronStrategy(NamesArguments, ModelStrategy):
    """Trains one model over tensor, pipeline, context, expert and data axes.

    With Lightning's ordinary semantics. The data-parallel size is what is left: devices x num_nodes
    / (tensor x pipeline x context).

    Parameters
    ----------
    tensor_parallel_size
        Ranks that share the products of one layer.
    pipeline_parallel_size
        Ranks that share out the layers.
    context_parallel_size
        Ranks that share out the tokens of each sample.
    expert_parallel_size
        Ranks that a layer's experts are dealt to, among those of one pipeline stage.
    expert_tensor_parallel_size
        Ranks that share the columns of one expert. None: `tensor_parallel_size`.
    sequence_parallel
        Split activations between tensor-parallel regions along the sequence.
    micro_batch_size
        Samples in one forward. None: the data module's `micro_batch_size`, else the batch is cut
        into as many micro-batches as there are pipeline stages (one if there is one stage).
    plan
        Split table of the user's own network; modules of this package bring theirs.
    batch_dims
        Batch dim of fields of a mapping that this package doesn't know, e.g. `{"pixels": 0}`.
    recompute
        What of a forward pass is computed again for its backward, or waits on the CPU.
    sequence_dims
        Sequence dim of fields that this package doesn't know, under context parallelism; None for
        a field without one.
    quantization
        Matrix products in eight or four bits (docs/precision.md). None: none.
    loss_scale
        How float16 losses are scaled, with `precision="16-mixed"`.
    pipeline
        How layers are dealt to pipeline ranks, and in which order micro-batches run.
    context
        Form of context-parallel attention.
    expert
        How tokens reach experts on other ranks.
    data_parallel
        Gradients, optimizer state and parameters over the data axis.
    checkpoint
        How checkpoints are written while a fit runs.
    runtime
        Processes, groups, random numbers, compiled layers.

    Raises
    ------
    ConfigurationError
        listing every violation of the layout, before any process is started.

    """

    def __init__(
        self,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        context_parallel_size: int = 1,
        *,
        expert_parallel_size: int = 1,
        expert_tensor_parallel_size: int | None = None,
        sequence_parallel: bool = False,
        micro_batch_size: int | None = None,
        plan: ParallelPlan | None = None,
        batch_dims: Mapping[str, int] | None = None,
        pipeline: PipelineConfig | None = None,
        data_parallel: DataParallelConfig | None = None,
        runtime: RuntimeConfig | None = None,
        recompute: RecomputeConfig | None = None,
        context: ContextConfig | None = None,
        expert: ExpertConfig | None = None,
        checkpoint: CheckpointConfig | None = None,
        quantization: QuantizationConfig | None = None,
        loss_scale: LossScaleConfig | None = None,
        sequence_dims: Mapping[str, int | None] | None = None,
    ) -> None:
        config = ParallelConfig(
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            context_parallel_size=context_parallel_size,
            expert_parallel_size=expert_parallel_size,
            expert_tensor_parallel_size=expert_tensor_parallel_size,
            sequence_parallel=sequence_parallel,
            micro_batch_size=micro_batch_size,
            pipeline=pipeline or PipelineConfig(),
            data_parallel=data_parallel or DataParallelConfig(),
            runtime=runtime or RuntimeConfig(),
            recompute=recompute or RecomputeConfig(),
            context=context or ContextConfig(),
            expert=expert or ExpertConfig(),
            checkpoint=checkpoint or CheckpointConfig(),
            quantization=quantization,
            loss_scale=loss_scale or LossScaleConfig(),
        )
        super().__init__(config, plan, batch_dims or {}, sequence_dims or {})
        self._reduce_now = True

    # ------------------------------------------------------------------ training

    @override
    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        assert self._window is not None
        self.generators.before_step(module.trainer)
        if not module.automatic_optimization:
            return self._manual_training_step(batch, *args, **kwargs)
        assert self._update is not None
        if not self._window.is_open:
            self._window.open()
            self._update.open()
        self._update.begin_run()
        context = self.precision_plugin.train_step_context
        result = self.steps.train(batch, args, context, reduce_now=self._reduce_now)
        self._update.end_run()
        log_published(module, result.published.logs, self._window.add(result.published))
        return self._training_output(result)

    def _training_output(self, result: StepResult) -> Any:
        """What Lightning and `on_train_batch_end` get: the mean loss, with the step's other
        entries if it is unambiguous. Also where this rank's step gave None: others may have a loss.
        """
        loss = result.published.loss
        if len(result.outputs) == 1 and isinstance(result.outputs[0], Mapping):
            return {**result.outputs[0], "loss": loss}
        return loss

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        module = self.lightning_module
        assert module is not None
        assert self._window is not None
        if not module.automatic_optimization:
            return self._manual_backward(closure_loss, optimizer, *args, **kwargs)
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        if self._reduce_now:
            assert self._update is not None
            check_zeroed(self._update.carriers())
            if not self._update.reduce(self._window.weight * self.loss_scale):
                warn_no_tokens()
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        assert self.lightning_module is not None
        if self.lightning_module.automatic_optimization:
            closure = evaluated_once(self._before_update(closure), optimizer)
        else:
            self.saves.before_update()
            self.saves.state_changes()
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._update is not None:
            assert self.lightning_module is not None
            self._update.finish_step(self.lightning_module.trainer.global_step)
            self.saves.prepare(self._tensors_of_checkpoint)
        if self._window is not None:
            self._window.close()
        return output

    def _before_update(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure, after which the optimizer changes what a save may still be copying."""

        def run() -> Any:
            output = closure()
            self.saves.before_update()
            return output

        return run

    def _tensors_of_checkpoint(self) -> Mapping[str, Tensor]:
        return checkpoint_tensors.shared_tensors(self, self.model_tensors(), with_optimizer=True)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Lightning enters this around every batch of a window except the last."""
        self._reduce_now = False
        try:
            yield
        finally:
            self._reduce_now = True

    # ------------------------------------------------------------------ manual optimization

    def _manual_training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """The user's step drives the optimizers itself; a schedule can't, so there is one stage
        (checked at start).
        """
        self.saves.poll()
        self.saves.state_changes()
        if self._update is not None:
            self._update.take_changes()
        with self.precision_plugin.train_step_context():
            return self.lightning_module.training_step(batch, *args, **kwargs)  # type: ignore[union-attr]

    def _manual_backward(
        self, loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """As DDP: each backward's own gradients are averaged over replicas, then added to what is
        there.
        """
        parameters = self.parallel_model.parameters
        before = {name: p.grad for name, p in parameters.items()}
        for parameter in parameters.values():
            parameter.grad = None
        result = super().backward(loss, optimizer, *args, **kwargs)
        self.parallel_model.average_gradients(self.mesh)
        for name, parameter in parameters.items():
            old = before[name]
            if old is not None:
                parameter.grad = old if parameter.grad is None else old.add_(parameter.grad)
        if self._update is not None:
            self._update.take_gradients()
        return result
