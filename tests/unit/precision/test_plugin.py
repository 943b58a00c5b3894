import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy

from megatron_lightning.precision.plugin import MegatronPrecision, requested_precision


class Stand(SingleDeviceStrategy):
    """Takes the connector's plugin as MegatronStrategy does."""

    @property
    def precision_plugin(self) -> Precision:
        return self._precision_plugin or Precision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = (
            None if plugin is None else MegatronPrecision.from_lightning(plugin)
        )


def _trainer(tmp_path, **options) -> L.Trainer:
    return L.Trainer(
        strategy=Stand("cpu"),
        accelerator="cpu",
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        limit_val_batches=0,
        **options,
    )


@pytest.mark.parametrize(
    "precision", [None, 32, "32-true", "bf16", "bf16-mixed", "bf16-true", "64-true"]
)
def test_the_connectors_plugins_are_taken(tmp_path, precision) -> None:
    plugin = _trainer(tmp_path, precision=precision).strategy.precision_plugin
    assert isinstance(plugin, MegatronPrecision)
    names = {None: "32-true", 32: "32-true", "bf16": "bf16-mixed"}
    assert plugin.precision == plugin.policy.name == names.get(precision, precision)


@pytest.mark.parametrize("precision", [16, "16", "16-mixed"])
def test_float16_on_the_cpu_is_an_error(tmp_path, precision) -> None:
    with pytest.raises(ValueError, match="no float16 training on this device"):
        _trainer(tmp_path, precision=precision)
    assert requested_precision() is None


def test_other_precisions_are_refused_by_name(tmp_path) -> None:
    with pytest.raises(ValueError, match="precision='16-true'"):
        _trainer(tmp_path, precision="16-true")

    class Own(Precision):
        pass

    with pytest.raises(ValueError, match="plugin Own does not work"):
        MegatronPrecision(Own())


def test_a_plan_switches_conversions_off_and_autocast_within_the_network() -> None:
    x = torch.ones(2, 2)
    linear, network = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    mixed = MegatronPrecision(MixedPrecision("bf16-mixed", "cpu"))
    half = MegatronPrecision(HalfPrecision("bf16-true"))
    for plugin, around in ((mixed, torch.bfloat16), (half, torch.float32)):
        plugin.keep_autocast_out(network)
        with plugin.train_step_context(), plugin.tensor_init_context():
            assert linear(x).dtype is around
            assert network(x).dtype is torch.float32
            assert torch.get_default_dtype() is torch.float32
        assert plugin.convert_module(linear).weight.dtype is torch.float32
        assert plugin.convert_input(x).dtype is torch.float32
        assert plugin.policy.params_dtype is torch.bfloat16
        plugin.has_plan = False
    assert mixed.policy.params_dtype is torch.float32
    assert half.policy.params_dtype is torch.bfloat16
    with mixed.val_step_context():
        assert linear(x).dtype is torch.bfloat16
    with half.forward_context():
        assert torch.get_default_dtype() is torch.bfloat16
    assert half.convert_input(x).dtype is torch.bfloat16
    assert half.convert_module(linear).weight.dtype is torch.bfloat16


@pytest.mark.parametrize(("precision", "device"), [("bf16-mixed", "cpu"), ("16-mixed", "cpu")])
def test_steps_are_autocast_as_lightning_does(precision, device) -> None:
    def states(plugin: Precision) -> list[tuple[bool, torch.dtype, bool]]:
        found = []
        for name in ("train", "val", "test", "predict"):
            with getattr(plugin, f"{name}_step_context")():
                dtype = torch.get_autocast_dtype(device)
                cached = torch.is_autocast_cache_enabled()
                found.append((torch.is_autocast_enabled(device), dtype, cached))
        return found

    ours = MegatronPrecision(MixedPrecision(precision, device))
    assert states(ours) == states(MixedPrecision(precision, device))
    assert all(enabled for enabled, _, _ in states(ours))


@pytest.mark.parametrize("has_plan", [True, False])
def test_a_backward_pass_within_a_step(has_plan) -> None:
    """Of a network with a plan it is not autocast; else it is as under Lightning."""
    enabled = []

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            enabled.append(torch.is_autocast_enabled("cpu"))
            return grad

    plugin = MegatronPrecision(MixedPrecision("bf16-mixed", "cpu"))
    plugin.has_plan = has_plan
    with plugin.train_step_context():
        loss = Identity.apply(torch.ones((), requires_grad=True))
        plugin.backward(loss, L.LightningModule(), None)
        assert torch.is_autocast_enabled("cpu")
    assert enabled == [not has_plan]


class Recorder(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.norms: list[float] = []

    def on_before_backward(self, loss) -> None:
        self.calls.append("before_backward")

    def on_after_backward(self) -> None:
        self.calls.append("after_backward")

    def on_before_optimizer_step(self, optimizer) -> None:
        self.calls.append("before_step")
        self.largest = max(p.grad.abs().max().item() for p in self.parameters())

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        self.calls.append("clip")
        super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
        grads = [p.grad for p in self.parameters()]
        self.norms.append(torch.nn.utils.get_total_norm(grads).item())
        self.largest_clipped = max(g.abs().max().item() for g in grads)


def test_clipping_uses_the_given_global_norm_and_hooks_keep_their_order(tmp_path) -> None:
    model = Recorder()
    trainer = _trainer(tmp_path, max_steps=1, gradient_clip_val=1e-3, precision="bf16-mixed")
    plugin = trainer.strategy.precision_plugin
    plugin.has_plan = False
    asked = []

    def norm(optimizer: torch.optim.Optimizer) -> torch.Tensor:
        asked.append(optimizer)
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        return torch.nn.utils.get_total_norm(grads).double() * 2  # as if other ranks held more

    plugin.grad_norm_fn = norm
    trainer.fit(model)
    assert model.calls == ["before_backward", "after_backward", "before_step", "clip"]
    assert len(asked) == 1
    assert model.norms[0] == pytest.approx(0.5e-3, rel=1e-2)


def test_clipping_without_a_global_norm_and_by_value(tmp_path) -> None:
    model = Recorder()
    _trainer(tmp_path, max_steps=1, gradient_clip_val=1e-3).fit(model)
    assert model.norms[0] == pytest.approx(1e-3, rel=1e-2)
    model = Recorder()
    trainer = _trainer(
        tmp_path, max_steps=1, gradient_clip_val=1e-4, gradient_clip_algorithm="value"
    )
    trainer.fit(model)
    assert model.largest > 1e-4
    assert model.largest_clipped == pytest.approx(1e-4)
