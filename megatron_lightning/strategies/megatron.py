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

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from megatron_lightning.config.context import ContextConfig
from megatron_lightning.config.parallel import (
    DataParallelConfig,
    ParallelConfig,
    PipelineConfig,
    RuntimeConfig,
)
from megatron_lightning.config.plan import ParallelPlan
from megatron_lightning.config.recompute import RecomputeConfig
from megatron_lightning.config.validate import raise_if_any
from megatron_lightning.precision.masters import MasterParameters
from megatron_lightning.precision.plugin import MegatronPrecision
from megatron_lightning.runtime.batch import BATCH_DIMS, MicroBatch, MicroBatches, split_batch
from megatron_lightning.runtime.context_batch import SEQUENCE_DIMS, ContextSlicer
from megatron_lightning.runtime.metrics import log_published, silence_advice_to_reduce
from megatron_lightning.runtime.model import ParallelModel
from megatron_lightning.runtime.parallelize import Target, parallelize
from megatron_lightning.runtime.step import Position, StepResult, StepRunner, join_step_outputs
from megatron_lightning.runtime.update import ParameterUpdate
from megatron_lightning.runtime.window import AccumulationWindow
from megatron_lightning.strategies import _compat, adjust, checkpoint_io, loaders, startup
from megatron_lightning.strategies.handover import load_pending
from megatron_lightning.strategies.mesh_strategy import MeshStrategy
from megatron_lightning.strategies.readers import may_defer_gather
from megatron_lightning.strategies.trainer_checks import (
    evaluated_once,
    optimizer_problems,
    trainer_problems,
)
from megatron_lightning.utils.env import global_seed

DEFAULT_SEED = 1234


class MegatronStrategy(MeshStrategy):
    """Trains one model over tensor, sequence, pipeline and data axes with Lightning's ordinary
    semantics.

    Parameters
    ----------
    tensor_parallel_size, pipeline_parallel_size, context_parallel_size
        Degrees; the data-parallel size is what is left: devices x num_nodes / (tensor x pipeline x
        context).
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
        Sequence dim of such fields under context parallelism, None for a field without one.
    pipeline, context, data_parallel, runtime
        Everything else, see the config classes.

    Raises
    ------
    ConfigurationError
        listing every violation of the layout, before any process is started.

    """

    materialises_networks = True
    """Read by modules of this package: build on the meta device, the strategy gives the values."""

    def __init__(
        self,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        context_parallel_size: int = 1,
        *,
        sequence_parallel: bool = False,
        micro_batch_size: int | None = None,
        plan: ParallelPlan | None = None,
        batch_dims: Mapping[str, int] | None = None,
        pipeline: PipelineConfig | None = None,
        data_parallel: DataParallelConfig | None = None,
        runtime: RuntimeConfig | None = None,
        recompute: RecomputeConfig | None = None,
        context: ContextConfig | None = None,
        sequence_dims: Mapping[str, int | None] | None = None,
    ) -> None:
        config = ParallelConfig(
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            context_parallel_size=context_parallel_size,
            sequence_parallel=sequence_parallel,
            micro_batch_size=micro_batch_size,
            pipeline=pipeline or PipelineConfig(),
            data_parallel=data_parallel or DataParallelConfig(),
            runtime=runtime or RuntimeConfig(),
            recompute=recompute or RecomputeConfig(),
            context=context or ContextConfig(),
        )
        super().__init__(config, plan)
        self._batch_dims = {**BATCH_DIMS, **(batch_dims or {})}
        self._sequence_dims = {**SEQUENCE_DIMS, **(sequence_dims or {})}
        self._parallel: ParallelModel | None = None
        self._cut_module: LightningModule | None = None
        self._runner: StepRunner | None = None
        self._update: ParameterUpdate | None = None
        self._window: AccumulationWindow | None = None
        self._reduce_now = True

    # ------------------------------------------------------------------ the model

    @property
    def parallel_model(self) -> ParallelModel:
        """This rank's part of the model and its parameter table; RuntimeError before setup."""
        if self._parallel is None:
            raise RuntimeError(
                "strategy.parallel_model: the model is cut in Trainer.fit (or validate, ...), "
                "not before"
            )
        return self._parallel

    @property
    def step_runner(self) -> StepRunner:
        """What runs this rank's steps; RuntimeError before setup."""
        if self._runner is None:
            raise RuntimeError("strategy.step_runner: the model is cut in Trainer.fit, not before")
        return self._runner

    @property
    def masters(self) -> MasterParameters | None:
        """Masters of whole low-precision weights while fitting, else None."""
        return None if self._update is None else self._update.masters

    @property
    def update(self) -> ParameterUpdate | None:
        """What the optimizers update, and how gradients get there; None unless fitting."""
        return self._update

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if precision_plugin is not None:
            precision_plugin = MegatronPrecision.from_lightning(precision_plugin)
            precision_plugin.grad_norm_fn = lambda _: self.grad_norm()
        self._precision_plugin = precision_plugin

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        raise_if_any(trainer_problems(self, trainer, self.lightning_module))
        self.accelerator.setup(trainer)
        silence_advice_to_reduce()
        module = self.lightning_module
        assert module is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        target = startup.find_target(module, self._plan)
        plugin = self._megatron_precision()
        plugin.has_plan = target is not None
        if self._update is not None and (fitting or self._cut_module is not module):
            self._update.release()
            self._update = None
        self.precision_plugin.convert_module(module)  # in place
        if fitting:
            adjust.apply_layer_sync(self, module)
        self._cut(module, target, buckets=fitting and bool(module.automatic_optimization))
        self.model = module
        adjust.confine_metrics(module, self.mesh)
        adjust.announce_summary(self, trainer)
        load_pending(self)
        if fitting:
            self.setup_optimizers(trainer)
            if module.automatic_optimization:
                raise_if_any(optimizer_problems(self.optimizers))
        self.setup_precision_plugin()
        if fitting:
            _compat.optimizers_to_device(self.optimizers, self.root_device)
            self._update = ParameterUpdate(
                self.parallel_model,
                self.mesh,
                self.config,
                self._megatron_precision().policy,
                self.optimizers,
                seed=self.seed,
                defer=may_defer_gather(self.config, trainer),
            )

    def _cut(self, module: LightningModule, target: Target | None, *, buckets: bool) -> None:
        startup.claim(module, self)
        policy = self._megatron_precision().policy
        if self._parallel is None or self._cut_module is not module:
            self._cut_module = module
            self._parallel = parallelize(
                module,
                target,
                self.mesh,
                self.config,
                seed=self.seed,
                params_dtype=policy.params_dtype if target is not None else None,
                main_params_dtype=policy.main_params_dtype if target is not None else None,
            )
        self._parallel.set_buckets(
            self.mesh, self.config, enabled=buckets, dtype=policy.main_grads_dtype
        )
        self._runner = StepRunner(module, self._parallel, self.mesh, self.config.pipeline.schedule)
        self._window = AccumulationWindow(self.mesh.device)

    @property
    def seed(self) -> int:
        """Seed of initial weights and dropout: `RuntimeConfig.seed`, else that of
        `seed_everything`, else 1234.
        """
        if self.config.runtime.seed is not None:
            return self.config.runtime.seed
        seed = global_seed()
        return DEFAULT_SEED if seed is None else seed

    def _megatron_precision(self) -> MegatronPrecision:
        if not isinstance(self._precision_plugin, MegatronPrecision):
            self.precision_plugin = Precision()
        assert isinstance(self._precision_plugin, MegatronPrecision)
        return self._precision_plugin

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    # ------------------------------------------------------------------ training

    @override
    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        assert self._window is not None
        if not module.automatic_optimization:
            return self._manual_training_step(batch, *args, **kwargs)
        assert self._update is not None
        if not self._window.is_open:
            self._window.open()
            self._update.open()
        self._update.begin_run()
        result = self._run(
            "training_step", batch, args, self.precision_plugin.train_step_context, training=True
        )
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
            startup.check_zeroed(self._update.carriers())
            if not self._update.reduce(self._window.weight):
                startup.warn_no_tokens()
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
            closure = evaluated_once(closure, optimizer)
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._update is not None:
            assert self.lightning_module is not None
            self._update.finish_step(self.lightning_module.trainer.global_step)
        if self._window is not None:
            self._window.close()
        return output

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Lightning enters this around every batch of a window except the last."""
        self._reduce_now = False
        try:
            yield
        finally:
            self._reduce_now = True

    def grad_norm(self) -> Tensor:
        """Global L2 norm of the published gradients, a 0-dim tensor equal on all ranks. All ranks
        must call it.
        """
        assert self._update is not None, "there are gradients only while fitting"
        return self._update.grad_norm()

    # ------------------------------------------------------------------ manual optimization

    def _manual_training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """The user's step drives the optimizers itself; a schedule can't, so there is one stage
        (checked at start).
        """
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

    # ------------------------------------------------------------------ data

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        return loaders.share_samples(self, dataloader)

    # ------------------------------------------------------------------ evaluation

    @override
    def validation_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(
            "validation_step", batch, args, self.precision_plugin.val_step_context
        )

    @override
    def test_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", batch, args, self.precision_plugin.test_step_context)

    @override
    def predict_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = self._run(
            "predict_step", batch, args, self.precision_plugin.predict_step_context, training=False
        )
        assert self.lightning_module is not None
        log_published(self.lightning_module, result.published.logs, None)  # Lightning refuses any
        return _compat.share_predictions(
            join_step_outputs(result.outputs), self.mesh, self.parallel_model.placement.last_rank
        )

    def _evaluate(
        self, hook: str, batch: Any, args: tuple[Any, ...], context: Callable[[], Any]
    ) -> Any:
        result = self._run(hook, batch, args, context, training=False)
        assert self.lightning_module is not None
        log_published(self.lightning_module, result.published.logs, None)
        return join_step_outputs(result.outputs)

    def _run(
        self,
        hook: str,
        batch: Any,
        args: tuple[Any, ...],
        context: Callable[[], Any],
        *,
        training: bool,
    ) -> StepResult:
        assert self._runner is not None
        assert self.lightning_module is not None
        if self._update is not None and not training:
            self._update.wait()
        micro_batches = self._split(batch)
        position = None
        if training:
            samples = sum(micro_batch.num_samples for micro_batch in micro_batches)
            batch_index = self.lightning_module.trainer.fit_loop.epoch_loop.total_batch_idx
            position = Position(batch_index=batch_index, first_sample=self.mesh.dp.rank * samples)
        result = self._runner.run(
            hook,
            micro_batches,
            args,
            context=context,
            batch_mark=self._mark(batch),
            position=position,
            reduce_now=training and self._reduce_now,
        )
        if not training:
            self.parallel_model.reshard()
        return result

    def _mark(self, batch: Any) -> int | None:
        return loaders.fingerprint(batch) if self.config.model_parallel_size > 1 else None

    def _split(self, batch: Any) -> list[MicroBatch]:
        assert self.lightning_module is not None
        size = startup.micro_batch_size(self.config, self.lightning_module)
        custom = getattr(self.lightning_module, "split_micro_batch", None)
        if custom is not None:
            batch = MicroBatches(custom(batch, size))
        whole = split_batch(
            batch,
            micro_batch_size=size,
            pipeline_size=self.mesh.pp.size,
            batch_dims=self._batch_dims,
        )
        cut = ContextSlicer(
            self.mesh,
            batch_dims=self._batch_dims,
            sequence_dims=self._sequence_dims,
            sequence_parallel=self.config.sequence_parallel,
        )
        return [cut(micro_batch) for micro_batch in whole]

    # ------------------------------------------------------------------ checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Local tensors by canonical name; the checkpoint holds the global ones."""
        return checkpoint_io.model_tensors(self) if self._parallel is not None else {}

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

    # ------------------------------------------------------------------ end

    @override
    def teardown(self) -> None:
        self.end_run()
        if self._update is not None:
            self._update.close(wait=not (self.fails_alone or self.failed_after_another))
        if self._parallel is not None:
            self._parallel.release_buckets()
        adjust.revert_layer_sync(self)
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
