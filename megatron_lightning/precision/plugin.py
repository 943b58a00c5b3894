"""Lightning's precision plugin for MegatronStrategy.

The dtypes of a network with a plan come from the `PrecisionPolicy`. For "bf16-mixed" and "16-mixed"
the user's steps around it run under the autocast of Lightning's own plugin, the network itself and
backward passes do not. For a user's module without a plan it behaves as the plugin that Lightning
chose. Either way gradients are clipped by the global norm that the strategy computes. Order of
hooks, closures and `optimizer_step` are Lightning's own.

With "16-mixed" the strategy scales the loss and divides gradients (`precision.loss_scale`); the
plugin skips steps whose gradients are not finite. Lightning's `GradScaler` is not used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from megatron_lightning.config.loss_scale import LossScaleConfig
from megatron_lightning.precision.autocast import keep_autocast_out, without_autocast
from megatron_lightning.precision.loss_scale import LossScaler
from megatron_lightning.precision.policy import POLICIES, PrecisionPolicy, policy_for
from megatron_lightning.utils.gradients import clip_by_norm, clip_factor

GradNorm = Callable[[Optimizer], Tensor]
AreFinite = Callable[[], bool]
Fold = Callable[[Tensor], bool]
BeforeStep = Callable[[], None]


class MegatronPrecision(Precision):
    """Wraps the plugin that Lightning's connector made.

    `has_plan` is set by the strategy when it knows the module: True switches the wrapped plugin's
    conversions off, and its autocast within the network, which `keep_autocast_out` is called with.
    `grad_norm_fn` is set once by the strategy: it returns the global norm of an optimizer's
    gradients; while it is None, clipping is Lightning's. `are_finite_fn` likewise says, alike on
    all ranks, whether all gradients are finite. `fold_fn` may take the factor of clipping and see
    to it later; `before_step_fn` is called when clipping is done.

    On CUDA `Trainer(precision="16-mixed")` is enough. On the CPU, for tests, give
    `plugins=[MegatronPrecision(MixedPrecision("16-mixed", "cpu"))]`: it is slow there.
    """

    def __init__(
        self, wrapped: Precision | None = None, *, requested: str | int | None = None
    ) -> None:
        self.wrapped = Precision() if wrapped is None else wrapped
        self.precision = self.wrapped.precision
        if not isinstance(self.wrapped, MixedPrecision | HalfPrecision | DoublePrecision) and (
            type(self.wrapped) is not Precision
        ):
            raise ValueError(
                f"precision plugin {type(self.wrapped).__name__} does not work with"
                f" MegatronStrategy; give the Trainer precision=..., one of {list(POLICIES)}"
            )
        if str(requested) in ("16", "16-mixed") and self.precision != "16-mixed":
            raise ValueError(
                f"precision={requested!r}: there is no float16 training on this device, and"
                f" Lightning would silently use {self.precision!r} instead; ask for"
                " precision='bf16-mixed' or '32-true'"
            )
        policy_for(self.precision)
        self.has_plan = True
        self.grad_norm_fn: GradNorm | None = None
        self.are_finite_fn: AreFinite | None = None
        self.fold_fn: Fold | None = None
        self.before_step_fn: BeforeStep | None = None
        self.loss_scaler = LossScaler() if self.precision == "16-mixed" else None
        """How the loss is scaled; None where it isn't."""

    @property
    def loss_scale(self) -> float:
        """Factor of the loss in the next step; 1 where it isn't scaled."""
        return 1.0 if self.loss_scaler is None else self.loss_scaler.scale

    def configure_loss_scale(self, config: LossScaleConfig) -> None:
        """Begin anew with a scale by `config`, where there is one."""
        if self.loss_scaler is not None and self.loss_scaler.config != config:
            self.loss_scaler = LossScaler(config)

    @classmethod
    def from_lightning(cls, plugin: Precision | None) -> MegatronPrecision:
        """Return the plugin for the one that Lightning's connector set, in the strategy's setter.

        ValueError for precisions that don't work, also where the connector replaced "16-mixed" on
        the CPU.
        """
        return plugin if isinstance(plugin, cls) else cls(plugin, requested=requested_precision())

    @property
    def policy(self) -> PrecisionPolicy:
        """Dtypes of this run: under autocast (no plan) the weights are plain float32."""
        autocast = not self.has_plan and self.precision.endswith("-mixed")
        return policy_for("32-true" if autocast else self.precision)

    # ------------------------------------------------------------------ conversions and contexts

    @override
    def convert_module(self, module: Module) -> Module:
        """Leave a network with a plan alone: it is built in the policy's dtype."""
        return module if self.has_plan else self.wrapped.convert_module(module)

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """No change of the default dtype for a network with a plan."""
        return nullcontext() if self.has_plan else self.wrapped.tensor_init_context()

    @override
    def module_init_context(self) -> AbstractContextManager[Any]:
        """No change of the default dtype for a network with a plan."""
        return nullcontext() if self.has_plan else self.wrapped.module_init_context()

    @override
    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """The wrapped plugin's autocast; its default dtype only for modules without a plan."""
        takes_part = self._autocast_device is not None or not self.has_plan
        with self.wrapped.forward_context() if takes_part else nullcontext():
            yield

    @property
    def _autocast_device(self) -> str | None:
        """Type of the device whose operations are autocast in steps; None without autocast."""
        return self.wrapped.device if isinstance(self.wrapped, MixedPrecision) else None

    def keep_autocast_out(self, network: Module) -> None:
        """Let the network of the plan run without the autocast of the step that calls it."""
        if self._autocast_device is not None:
            keep_autocast_out(network, self._autocast_device)

    @override
    def convert_input(self, data: Any) -> Any:
        """Leave batches of a network with a plan alone: loss masks stay float32. They are converted
        to float64, which loses nothing.
        """
        keep = self.has_plan and self.precision != "64-true"
        return data if keep else self.wrapped.convert_input(data)

    @override
    def convert_output(self, data: Any) -> Any:
        """Leave outputs of a network with a plan alone."""
        return data if self.has_plan else self.wrapped.convert_output(data)

    # ------------------------------------------------------------------ steps

    @override
    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Go back through a network with a plan without autocast, also from within a step, as under
        manual optimization.
        """
        device = self._autocast_device if self.has_plan else None
        with nullcontext() if device is None else without_autocast(device):
            super().backward(tensor, model, optimizer, *args, **kwargs)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Make a step, or with a loss scale skip it where gradients are not finite.

        Hooks and clipping run either way, as with torch's own scaler, and the step counts for
        schedules and `global_step`; parameters and optimizer state stay as they are.
        """
        if self.loss_scaler is None or self.are_finite_fn is None:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        finite = []

        def checked() -> Any:
            result = closure()
            assert self.are_finite_fn is not None
            finite.append(self.are_finite_fn())  # before clipping by value hides it
            return result

        result = self._wrap_closure(model, optimizer, checked)
        self.loss_scaler.update(finite=finite[-1])
        if finite[-1]:
            optimizer.step(closure=lambda: result, **kwargs)
        else:
            # torch's schedulers warn when their first step comes before one of the optimizer.
            vars(optimizer)["_opt_called"] = True
        return result

    @override
    def state_dict(self) -> dict[str, Any]:
        """The loss scale, where there is one."""
        return {} if self.loss_scaler is None else self.loss_scaler.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the loss scale of a checkpoint; one of another precision has none."""
        if self.loss_scaler is not None and state_dict:
            self.loss_scaler.load_state_dict(state_dict)

    # ------------------------------------------------------------------ clipping

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip what the optimizer will read by the true global norm."""
        if self.grad_norm_fn is None:
            super().clip_grad_by_norm(optimizer, clip_val)
            return
        norm = self.grad_norm_fn(optimizer)
        if self.fold_fn is not None and self.fold_fn(clip_factor(norm, float(clip_val))):
            return
        grads = [p.grad for p in self.main_params(optimizer) if p.grad is not None]
        clip_by_norm(grads, norm, float(clip_val))

    @override
    def _after_closure(self, model: Any, optimizer: Any) -> None:
        """Hooks and clipping, which come last before the optimizer's step."""
        super()._after_closure(model, optimizer)
        if self.before_step_fn is not None:
            self.before_step_fn()


def requested_precision() -> str | int | None:
    """Return the `precision` that the Trainer under construction was given; None outside a
    Trainer's constructor.

    Lightning's connector replaces "16-mixed" by "bf16-mixed" on the CPU and keeps no record, so the
    argument is read from the connector's frame, which is on the stack whenever it hands a plugin to
    a strategy.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is _AcceleratorConnector.__init__.__code__:
            return frame.f_locals.get("precision")
        frame = frame.f_back
    return None
