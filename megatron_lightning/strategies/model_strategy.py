"""The part of the strategy that holds the cut model: its set-up, and steps without training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

from megatron_lightning.config.parallel import ParallelConfig
from megatron_lightning.config.plan import ParallelPlan
from megatron_lightning.config.validate import check_world, raise_if_any
from megatron_lightning.precision.masters import MasterParameters
from megatron_lightning.precision.plugin import MegatronPrecision
from megatron_lightning.runtime.batch import BATCH_DIMS
from megatron_lightning.runtime.context_batch import SEQUENCE_DIMS
from megatron_lightning.runtime.metrics import silence_advice_to_reduce
from megatron_lightning.runtime.model import ParallelModel
from megatron_lightning.runtime.parallelize import Target, parallelize
from megatron_lightning.runtime.step import StepRunner
from megatron_lightning.runtime.update import ParameterUpdate
from megatron_lightning.runtime.window import AccumulationWindow
from megatron_lightning.strategies import _compat, adjust, loaders
from megatron_lightning.strategies.checkpoint_strategy import CheckpointStrategy
from megatron_lightning.strategies.handover import load_pending
from megatron_lightning.strategies.launchers import choose_launcher
from megatron_lightning.strategies.run_checks import raise_on_first_rank
from megatron_lightning.strategies.steps import Steps
from megatron_lightning.strategies.targets import claim, find_target
from megatron_lightning.strategies.trainer_checks import optimizer_problems, trainer_problems
from megatron_lightning.strategies.updates import begin_update
from megatron_lightning.utils.env import global_seed

DEFAULT_SEED = 1234


class ModelStrategy(CheckpointStrategy):
    """A mesh with a cut model on it. Abstract: `MegatronStrategy` adds training."""

    materialises_networks = True
    """Read by modules of this package: build on the meta device, the strategy gives the values."""

    def __init__(
        self,
        config: ParallelConfig,
        plan: ParallelPlan | None,
        batch_dims: Mapping[str, int],
        sequence_dims: Mapping[str, int | None],
    ) -> None:
        super().__init__(config, plan)
        self._batch_dims = {**BATCH_DIMS, **batch_dims}
        self._sequence_dims = {**SEQUENCE_DIMS, **sequence_dims}
        self._parallel: ParallelModel | None = None
        self._cut_module: LightningModule | None = None
        self._steps: Steps | None = None
        self._update: ParameterUpdate | None = None
        self._window: AccumulationWindow | None = None

    @override
    def _configure_launcher(self) -> None:
        raise_on_first_rank(
            check_world(self.config, self.num_processes * self.num_nodes), self.global_rank
        )
        self._launcher = choose_launcher(self)

    # ------------------------------------------------------------------ the model

    @property
    @override
    def is_cut(self) -> bool:
        return self._parallel is not None

    @property
    @override
    def parallel_model(self) -> ParallelModel:
        """This rank's part of the model and its parameter table; RuntimeError before setup."""
        if self._parallel is None:
            raise RuntimeError(
                "strategy.parallel_model: the model is cut in Trainer.fit (or validate, ...), "
                "not before"
            )
        return self._parallel

    @property
    def steps(self) -> Steps:
        """The module's step functions on batches; RuntimeError before setup."""
        if self._steps is None:
            raise RuntimeError("strategy.steps: the model is cut in Trainer.fit, not before")
        return self._steps

    @property
    def step_runner(self) -> StepRunner:
        """What runs this rank's steps; RuntimeError before setup."""
        return self.steps.runner

    @property
    def masters(self) -> MasterParameters | None:
        """Masters of whole low-precision weights while fitting, else None."""
        return None if self._update is None else self._update.masters

    @property
    @override
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
            precision_plugin.are_finite_fn = lambda: (
                self._update is None or self._update.gradients_are_finite()
            )
            precision_plugin.configure_loss_scale(self.config.loss_scale)
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
        target = find_target(module, self._plan)
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
        adjust.evaluate_with_no_grad(self, trainer)
        load_pending(self)
        if fitting:
            self._begin_local_copies()
            self.setup_optimizers(trainer)
            if module.automatic_optimization:
                raise_if_any(optimizer_problems(self.optimizers))
        self.setup_precision_plugin()
        if fitting:
            _compat.optimizers_to_device(self.optimizers, self.root_device)
            self._update = begin_update(self, plugin, trainer)
            self.saves.begin_fit(trainer)

    def _cut(self, module: LightningModule, target: Target | None, *, buckets: bool) -> None:
        claim(module, self)
        policy = self._megatron_precision().policy
        if self._parallel is None or self._cut_module is not module:
            self._cut_module = module
            self.network_prefix = "" if target is None else f"{target.attribute}."
            self._parallel = parallelize(
                module,
                target,
                self.mesh,
                self.config,
                seed=self.seed,
                params_dtype=policy.params_dtype if target is not None else None,
                main_params_dtype=policy.main_params_dtype if target is not None else None,
            )
            if target is not None:
                network = module.get_submodule(target.attribute)
                adjust.cast_inputs(network, policy.params_dtype)
                self._megatron_precision().keep_autocast_out(network)
        self._parallel.set_buckets(
            self.mesh, self.config, enabled=buckets, dtype=policy.main_grads_dtype
        )
        assert self._guard is not None
        self._steps = Steps(
            self,
            module,
            self._guard,
            batch_dims=self._batch_dims,
            sequence_dims=self._sequence_dims,
        )
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

    def grad_norm(self) -> Tensor:
        """Global L2 norm of the published gradients, a 0-dim tensor equal on all ranks. All ranks
        must call it.
        """
        assert self._update is not None, "there are gradients only while fitting"
        return self._update.grad_norm()

    @property
    def loss_scale(self) -> float:
        """Factor of the loss in this step: above 1 with precision="16-mixed", else 1."""
        return self._megatron_precision().loss_scale

    @property
    def scales_loss(self) -> bool:
        """Whether steps with gradients that are not finite are skipped (precision="16-mixed")."""
        return self._megatron_precision().loss_scaler is not None

    @property
    @override
    def window_is_open(self) -> bool:
        return self._window is not None and self._window.is_open

    @property
    def window_weight(self) -> Tensor:
        """Weight of the accumulation window so far over all ranks, a 0-dim tensor: its tokens, or
        its batches where the steps report none.
        """
        assert self._window is not None, "there is a window only once the model is set up"
        return self._window.weight

    # ------------------------------------------------------------------ data

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        return loaders.share_samples(self, dataloader)

    # ------------------------------------------------------------------ evaluation

    @override
    def validation_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        context = self.precision_plugin.val_step_context
        return self.steps.evaluate("validation_step", batch, args, context)

    @override
    def test_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        context = self.precision_plugin.test_step_context
        return self.steps.evaluate("test_step", batch, args, context)

    @override
    def predict_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        context = self.precision_plugin.predict_step_context
        prediction = self.steps.evaluate("predict_step", batch, args, context)
        source = self.parallel_model.placement.last_rank
        return _compat.share_predictions(prediction, self.mesh, source)

    # ------------------------------------------------------------------ end

    @override
    def teardown(self) -> None:
        if self._parallel is not None and self._parallel.graphs is not None:
            self._parallel.graphs.set_buckets(None)  # groups can't end before their graphs
        self.give_up_if_alone()
        together = not (self.fails_alone or self.failed_after_another)
        self._end_saves(together)
        if self._update is not None:
            self._update.close(wait=together)
        if self._parallel is not None:
            self._parallel.release_buckets()
        adjust.revert_layer_sync(self)
        super().teardown()
