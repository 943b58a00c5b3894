"""float16 with dynamic loss scaling: every rank skips the same steps in every layout, scales change
alike, and a resumed run goes on bit for bit. On the CPU by the plugin itself, since
`precision="16-mixed"` is refused there.
"""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

from megatron_lightning.callbacks import SanityChecks
from megatron_lightning.config import DataParallelConfig, LossScaleConfig, MoEConfig
from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.config.validate import ConfigurationError
from megatron_lightning.models.gpt import GPTModel
from megatron_lightning.precision import MegatronPrecision
from tests.harness import run_ranks_fresh
from tests.layout_runs import Batches, Recorder, Run, boxes, make_strategy, tiny_config
from tests.user_modules import Decoder, OwnTransformer
from tests.user_runs import user_run

OVERFLOW = 2
"""Step at which one rank's gradient overflows."""
SCALE = LossScaleConfig(initial=1024.0, growth_interval=3)


class Overflow(L.Callback):
    """Makes one element of one rank's gradient infinite at one step, as float16 would."""

    def __init__(self, rank: int, step: int = OVERFLOW) -> None:
        self.rank, self.step = rank, step

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.global_rank != self.rank:
            return

        def poison(grad: Tensor) -> Tensor:
            if trainer.global_step == self.step:
                grad = grad.clone()
                grad.view(-1)[0] = torch.inf
            return grad

        def watch(layer: Any, inputs: Any, output: Tensor) -> None:
            assert output.dtype is torch.float16
            if output.requires_grad:
                output.register_hook(poison)

        layers = [m for name, m in module.named_modules() if name.endswith("linear_fc2")]
        layers[0].register_forward_hook(watch)


class Scales(L.Callback):
    """What the scale was at each step, and whether anything was updated."""

    reads_parameters = True

    def __init__(self) -> None:
        self.scales: list[float] = []
        self.changed: list[bool] = []
        self.rates: list[float] = []
        self.before: dict[str, Any] = {}

    def _values(self, trainer: L.Trainer) -> list[Tensor]:
        update = trainer.strategy.update
        values = [v.detach().clone() for v in update.updated().values()]
        for optimizer in update.optimizers:
            for state in optimizer.state.values():
                values += [v.clone() for v in state.values() if isinstance(v, Tensor)]
        return values

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.before = self._values(trainer)
        self.scales.append(trainer.strategy.loss_scale)
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        after = self._values(trainer)
        same = len(after) == len(self.before) and all(
            torch.equal(_local(a), _local(b)) for a, b in zip(after, self.before, strict=True)
        )
        self.changed.append(not same)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def fit(
    rank: int,
    world_size: int,
    run: Run,
    poisoned: int | None,
    folder: str = "",
    resume: str | None = None,
    save_at: int = 0,
) -> dict[str, Any]:
    model = GPTModel(
        run.config,
        OptimizerConfig(lr=run.learning_rate),
        SchedulerConfig(lr_warmup_steps=2, lr_decay_steps=20),
        loss_normalization=run.normalization,
    )
    scales, recorder = Scales(), Recorder(run)
    callbacks: list[L.Callback] = [recorder, scales, SanityChecks(every_n_steps=1)]
    callbacks += [] if poisoned is None else [Overflow(poisoned)]
    if folder:
        callbacks.append(
            L.pytorch.callbacks.ModelCheckpoint(
                folder, filename="{step}", every_n_train_steps=save_at, save_top_k=-1
            )
        )
    trainer = L.Trainer(
        strategy=make_strategy({**run.layout, "loss_scale": SCALE}),
        plugins=[MegatronPrecision(MixedPrecision("16-mixed", "cpu"))],
        accelerator="cpu",
        devices=world_size,
        max_steps=run.steps,
        gradient_clip_val=1.0,
        logger=False,
        callbacks=callbacks,
        enable_checkpointing=bool(folder),
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        **run.trainer,
    )
    trainer.fit(model, Batches(run), ckpt_path=resume)
    plugin = trainer.precision_plugin
    assert isinstance(plugin, MegatronPrecision)
    assert plugin.loss_scaler is not None
    return {
        "losses": recorder.losses,
        "norms": recorder.norms,
        "scales": scales.scales,
        "changed": scales.changed,
        "rates": scales.rates,
        "state": plugin.loss_scaler.state_dict(),
        "final": boxes(trainer, "master"),
        "step": trainer.global_step,
        "dtype": str(next(iter(trainer.strategy.parallel_model.parameters.values())).dtype),
    }


LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "pp2": (2, dict(pipeline_parallel_size=2, micro_batch_size=4), {}),
    "tp2_sp": (2, dict(tensor_parallel_size=2, sequence_parallel=True), {}),
    "dp2": (2, {}, {}),
    "zero1": (2, dict(data_parallel=DataParallelConfig(sharding="optimizer")), {}),
    "zero1_bf16_moments": (
        2,
        dict(
            data_parallel=DataParallelConfig(sharding="optimizer", moments_dtype="bfloat16"),
        ),
        {},
    ),
    "fsdp": (2, dict(data_parallel=DataParallelConfig(sharding="fsdp")), {}),
    "accumulate": (1, {}, dict(accumulate_grad_batches=2)),
}
FAST = ("pp2", "zero1")


@pytest.mark.parametrize(
    "layout", [x if x in FAST else pytest.param(x, marks=pytest.mark.slow) for x in LAYOUTS]
)
def test_one_ranks_overflow_skips_the_step_everywhere(layout: str) -> None:
    size, options, trainer = LAYOUTS[layout]
    run = Run(config=tiny_config(), layout=options, trainer=trainer, steps=6)
    ranks = run_ranks_fresh(fit, size, run, size - 1)
    every = run.trainer.get("accumulate_grad_batches", 1)
    for rank in ranks:
        assert rank["step"] == 6
        assert rank["scales"][::every] == [1024, 1024, 1024, 512, 512, 512]
        assert rank["state"]["scale"] == 1024  # three good steps: grown again
        assert rank["state"]["skipped_steps"] == 1
        assert rank["changed"][every - 1 :: every] == [True, True, False, True, True, True]
        assert rank["losses"] == ranks[0]["losses"]
        assert rank["norms"][:2] == ranks[0]["norms"][:2]
        assert not torch.isfinite(torch.tensor(rank["norms"][OVERFLOW]))
        # the schedule counts skipped steps, as `global_step` does
        assert rank["rates"][::every] == ranks[0]["rates"][::every]
        assert len(set(rank["rates"][::every])) == 6 - 1 + 1
    wanted = "torch.float32" if layout == "fsdp" else "torch.float16"
    assert ranks[0]["dtype"] == wanted


def test_losses_are_those_of_float32() -> None:
    """Ten steps within 0.5 %, and gradients that don't know of the scale."""
    run = Run(config=tiny_config(), steps=10)
    half = run_ranks_fresh(fit, 1, run, None)[0]
    from tests.layout_runs import train

    whole = run_ranks_fresh(train, 1, Run(config=tiny_config(), steps=10))[0]
    for got, want in zip(half["losses"], whole["losses"], strict=True):
        assert got == pytest.approx(want, rel=5e-3)
    assert half["norms"][0] == pytest.approx(whole["norms"][0], rel=1e-2)


@pytest.mark.parametrize("losses", [{"aux_loss_coeff": 5.0}, {"z_loss_coeff": 1.0}])
def test_losses_of_routers_are_scaled_too(losses: dict[str, float]) -> None:
    """The gradient norm of the first step is float32's, for which these losses matter much."""
    from tests.layout_runs import train

    def run(**moe: float) -> Run:
        options = MoEConfig(**{"num_experts": 4, "ffn_hidden_size": 48, "aux_loss_coeff": 0, **moe})  # type: ignore[arg-type]
        return Run(config=tiny_config(moe=options), steps=1, keep_gradients=())

    half = run_ranks_fresh(fit, 1, run(**losses), None)[0]
    whole = run_ranks_fresh(train, 1, run(**losses))[0]
    without = run_ranks_fresh(train, 1, run())[0]
    assert half["scales"] == [1024]
    assert half["norms"][0] == pytest.approx(whole["norms"][0], rel=1e-2)
    assert abs(without["norms"][0] / whole["norms"][0] - 1) > 0.1


def fit_without_a_plan(rank: int, world_size: int, run: Run) -> dict[str, Any]:
    class Watch(L.Callback):
        def __init__(self) -> None:
            self.losses: list[float] = []
            self.dtypes: set[torch.dtype] = set()
            self.scales: list[float] = []

        def on_train_start(self, trainer: Any, module: Any) -> None:
            block = next(m for name, m in module.named_modules() if name.endswith("up"))
            block.register_forward_hook(lambda _, __, y: self.dtypes.add(y.dtype))
            if trainer.global_rank == world_size - 1:

                def poison(grad: Tensor) -> Tensor:
                    return grad * (torch.inf if trainer.global_step == OVERFLOW else 1.0)

                next(iter(module.parameters())).register_hook(poison)

        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int
        ) -> None:
            self.losses.append(float(outputs["loss"]))
            self.scales.append(trainer.strategy.loss_scale)

    watch = Watch()
    model = OwnTransformer(Decoder)
    trainer = L.Trainer(
        strategy=make_strategy({"loss_scale": SCALE}),
        plugins=[MegatronPrecision(MixedPrecision("16-mixed", "cpu"))],
        accelerator="cpu",
        devices=world_size,
        max_steps=run.steps,
        logger=False,
        callbacks=[watch],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(model, Batches(run))
    return {
        "losses": watch.losses,
        "dtypes": {str(dtype) for dtype in watch.dtypes},
        "scales": watch.scales,
        "parameters": {str(p.dtype) for p in model.parameters()},
    }


def test_a_module_without_a_plan_gets_autocast_and_the_same_scale() -> None:
    ranks = run_ranks_fresh(fit_without_a_plan, 2, user_run(steps=4))
    for rank in ranks:
        assert rank["dtypes"] == {"torch.float16"}
        assert rank["parameters"] == {"torch.float32"}
        assert rank["scales"] == [1024, 1024, 512, 512]
        assert rank["losses"] == ranks[0]["losses"]


def test_manual_optimization_is_refused() -> None:
    model = OwnTransformer(Decoder)
    model.automatic_optimization = False
    trainer = L.Trainer(
        strategy=make_strategy({}),
        plugins=[MegatronPrecision(MixedPrecision("16-mixed", "cpu"))],
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
    )
    with pytest.raises(ConfigurationError, match=r"automatic_optimization=False.*16-mixed"):
        trainer.fit(model, Batches(user_run()))


@pytest.mark.parametrize(
    "layout", ["pp2", *(pytest.param(x, marks=pytest.mark.slow) for x in ("zero1", "fsdp"))]
)
def test_resume_is_exact_with_the_scale(layout: str, tmp_path: Path) -> None:
    """Saved right after the skipped step: scale, counts, masters and moments go on."""
    size, options, _ = LAYOUTS[layout]
    run = Run(config=tiny_config(), layout=options, steps=7)
    whole = run_ranks_fresh(fit, size, run, size - 1, str(tmp_path), None, 3)
    path = str(tmp_path / "step=3.ckpt")
    rest = run_ranks_fresh(fit, size, run, None, "", path)
    for old, new in zip(whole, rest, strict=True):
        assert new["losses"] == old["losses"][3:]
        assert new["scales"] == old["scales"][3:]
        assert new["state"] == old["state"]
        for name, value in old["final"].items():
            boxes_of = [value] if isinstance(value, tuple) else value
            other = new["final"][name]
            others = [other] if isinstance(other, tuple) else other
            for a, b in zip(boxes_of, others, strict=True):
                assert torch.equal(a[-1], b[-1]), name
