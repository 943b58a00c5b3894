"""Low precision in whole runs: exact resume with delayed scaling, C28, users' own networks, and
what is refused before a start.
"""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from megatron_lightning.config import DataParallelConfig, MoEConfig, QuantizationConfig
from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.config.validate import ConfigurationError
from megatron_lightning.layers.linear import Linear
from megatron_lightning.layers.moe.experts import ExpertLinear
from megatron_lightning.models.gpt import GPTModel
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.quantized.experts_in_turn import QuantizedExperts
from megatron_lightning.parallel.quantized.products import QuantizedProducts, WeightClock
from megatron_lightning.parallel.random import Normal
from megatron_lightning.precision.fp8 import FP8RowRecipe, FP8TensorRecipe
from megatron_lightning.precision.operands import Recipe
from megatron_lightning.precision.simulated import RowRecipe, TensorRecipe
from megatron_lightning.strategies import MegatronStrategy
from tests.harness import run_ranks_fresh
from tests.layout_runs import Batches, Recorder, Run, boxes, make_strategy, tiny_config
from tests.user_modules import Decoder, OwnTransformer, decoder_plan
from tests.user_runs import user_run


def fit(
    rank: int, world_size: int, run: Run, folder: str, resume: str | None, module: str = "gpt"
) -> dict[str, Any]:
    model: L.LightningModule
    if module == "gpt":
        model = GPTModel(
            run.config,
            OptimizerConfig(lr=run.learning_rate),
            SchedulerConfig(lr_warmup_steps=2, lr_decay_steps=20),
        )
    else:
        model = OwnTransformer(Decoder)
    recorder = Recorder(run) if module == "gpt" else None
    callbacks: list[L.Callback] = [] if recorder is None else [recorder]
    if folder:
        callbacks.append(
            L.pytorch.callbacks.ModelCheckpoint(  # type: ignore[attr-defined]
                folder, filename="{step}", every_n_train_steps=3, save_top_k=-1
            )
        )
    trainer = L.Trainer(
        strategy=make_strategy(run.layout),
        accelerator="cpu",
        devices=world_size,
        max_steps=run.steps,
        gradient_clip_val=1.0,
        logger=False,
        callbacks=callbacks,
        enable_checkpointing=bool(folder),
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=2,
        val_check_interval=2,
        num_sanity_val_steps=1,
        **run.trainer,
    )
    trainer.fit(model, Batches(run), ckpt_path=resume)
    strategy: Any = trainer.strategy
    quantization = strategy.parallel_model.quantization
    layers = [
        name
        for name, layer in model.named_modules()
        if getattr(layer, "quantized", None) is not None
    ]
    return {
        "losses": [] if recorder is None else recorder.losses,
        "final": boxes(trainer, "master"),
        "histories": {}
        if quantization.delayed is None
        else {n: v.clone() for n, v in quantization.delayed.tensors().items()},
        "layers": layers,
        "experts": [
            name
            for name, layer in model.named_modules()
            if getattr(layer, "quantized_experts", None) is not None
        ],
        "names": sorted(n for n, _ in model.named_parameters()),
    }


def quantized(recipe: str, **options: Any) -> QuantizationConfig:
    return QuantizationConfig(recipe=recipe, simulate=True, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "options", "recipe"),
    [
        (2, dict(tensor_parallel_size=2, sequence_parallel=True), "fp8_delayed"),
        pytest.param(
            2,
            dict(pipeline_parallel_size=2, micro_batch_size=4),
            "fp8_delayed",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            2,
            dict(data_parallel=DataParallelConfig(sharding="optimizer")),
            "nvfp4",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_resume_is_exact(size: int, options: dict[str, Any], recipe: str, tmp_path: Path) -> None:
    """Histories of largest values, or the noise of stochastic rounding, go on; validation in
    between leaves no trace.
    """
    quantization = (
        quantized(recipe, amax_history_length=4) if recipe == "fp8_delayed" else quantized(recipe)
    )
    run = Run(
        config=tiny_config(hidden_dropout=0.1),
        layout={**options, "quantization": quantization},
        steps=6,
    )
    whole = run_ranks_fresh(fit, size, run, str(tmp_path), None)
    rest = run_ranks_fresh(fit, size, run, "", str(tmp_path / "step=3.ckpt"))
    for old, new in zip(whole, rest, strict=True):
        assert new["losses"] == old["losses"][3:]
        for name, history in old["histories"].items():
            assert torch.equal(new["histories"][name], history), name
            assert (history > 0).all()
        for name, value in old["final"].items():
            parts, others = (
                [v] if isinstance(v, tuple) else v for v in (value, new["final"][name])
            )
            assert all(torch.equal(a[-1], b[-1]) for a, b in zip(parts, others, strict=True)), name
    if recipe == "fp8_delayed" and "tensor_parallel_size" in options:
        for name, history in whole[0]["histories"].items():
            assert torch.equal(whole[1]["histories"][name], history), name


@pytest.mark.slow
def test_another_layout_takes_the_histories(tmp_path: Path) -> None:
    """Saved by two pipeline stages, read by one process; names are those of the whole network."""
    quantization = quantized("fp8_delayed", amax_history_length=4)
    options = dict(pipeline_parallel_size=2, micro_batch_size=4, quantization=quantization)
    run = Run(config=tiny_config(), layout=options, steps=3)
    stages = run_ranks_fresh(fit, 2, run, str(tmp_path), None)
    alone = Run(config=tiny_config(), layout={"quantization": quantization}, steps=4)
    result = run_ranks_fresh(fit, 1, alone, "", str(tmp_path / "step=3.ckpt"))[0]
    saved = stages[0]["histories"] | stages[1]["histories"]
    assert saved.keys() == result["histories"].keys()
    for name, history in saved.items():
        assert torch.equal(result["histories"][name][:, 1:], history[:, :-1]), name


def test_first_last_and_excluded_layers_stay() -> None:
    quantization = quantized("fp8_tensorwise", keep_first=1, keep_last=2, exclude=["*.linear_proj"])
    run = Run(config=tiny_config(), layout={"quantization": quantization}, steps=2)
    low = run_ranks_fresh(fit, 1, run, "", None)[0]
    layer = "network.decoder.layers.1"
    assert low["layers"] == [
        f"{layer}.self_attention.linear_qkv",
        f"{layer}.mlp.linear_fc1",
        f"{layer}.mlp.linear_fc2",
    ]
    assert "network.decoder.layers.1.mlp.linear_fc1.weight" in low["names"]


@pytest.mark.parametrize(("size", "recipe"), [(2, "nvfp4"), (1, "fp8_delayed")])
def test_users_own_networks(size: int, recipe: str) -> None:
    """Linear layers of torch, within a plan's layers."""
    layout = dict(
        plan=decoder_plan(),
        quantization=quantized(recipe, keep_first=0),
        tensor_parallel_size=size,
    )
    ranks = run_ranks_fresh(fit, size, user_run(layout=layout, steps=2), "", None, "own")
    assert ranks[0]["layers"] == ranks[-1]["layers"]
    assert ranks[0]["layers"]
    assert bool(ranks[0]["histories"]) == (recipe == "fp8_delayed")
    assert not any(".head" in name or ".3." in name for name in ranks[0]["layers"])


# ---------------------------------------------------------------------- C28


def products(recipe: Recipe) -> QuantizedProducts:
    axis = MeshAxis(name="alone")
    return QuantizedProducts(
        recipe=recipe,
        split="none",
        tensor_axis=axis,
        context_axis=axis,
        splits_sequence=False,
        clock=WeightClock(),
    )


@pytest.mark.parametrize("tokens", [509, 512, 3])
@pytest.mark.parametrize(
    ("real", "simulated"),
    [(FP8TensorRecipe, TensorRecipe), (FP8RowRecipe, RowRecipe)],
    ids=["tensorwise", "rowwise"],
)
def test_c28_token_counts(
    real: type[FP8TensorRecipe], simulated: type[TensorRecipe], tokens: int
) -> None:
    """C28: sequences of 509 and 512 tokens and three tokens of an expert, by torch's scaled
    products: scales and results of real tokens do not know of the padding, and results lie within
    what FP8 loses (6e-2) of bfloat16's.
    """
    torch.manual_seed(4)
    layer = Linear(128, (2, 96), bias=True, initial=Normal(1.0)).bfloat16()
    nn.init.normal_(layer.weight, std=0.05)
    nn.init.normal_(layer.bias)  # type: ignore[arg-type]
    x = torch.randn(tokens, 1, 128).bfloat16()
    grad = torch.randn(tokens, 1, 2, 96).bfloat16() * 1e-3

    def run(recipe: Recipe | None) -> list[Tensor]:
        layer.quantized = None if recipe is None else products(recipe)
        layer.zero_grad()
        own = x.clone().requires_grad_()
        y = layer(own)
        y.backward(grad)
        assert own.grad is not None
        assert layer.weight.grad is not None
        return [y.detach().float(), own.grad.float(), layer.weight.grad.float()]

    plain, low, exact = run(None), run(real("e5m2")), run(simulated("e5m2"))
    for got, same, full in zip(low, exact, plain, strict=True):
        assert torch.allclose(got, same, rtol=1e-2, atol=1e-6)
        assert float((got - full).norm() / full.norm()) < 8e-2


@pytest.mark.parametrize("recipe", [FP8TensorRecipe("e5m2"), FP8RowRecipe("e5m2")])
def test_c28_an_expert_with_three_tokens(recipe: Recipe) -> None:
    """C28: experts with 3, 0, 20 and 9 tokens and rows of garbage behind: each gives bitwise what
    it gives alone, so that neither padding nor other rows are in its scales.
    """
    torch.manual_seed(5)
    counts = torch.tensor([3, 0, 20, 9])
    layer = ExpertLinear(4, 64, (2, 32), bias=False, initial=Normal(1.0)).bfloat16()
    nn.init.normal_(layer.weight, std=0.1)
    rows = torch.randn(40, 64).bfloat16() * torch.logspace(0, 3, 40)[:, None].bfloat16()
    grad = torch.randn(40, 2, 32).bfloat16()
    grad[32:] = 0

    def run(experts: QuantizedExperts | None) -> list[Tensor]:
        layer.quantized_experts = experts
        layer.zero_grad()
        own = rows.clone().requires_grad_()
        y = layer(own, counts)
        y.backward(grad)
        assert own.grad is not None
        assert layer.weight.grad is not None
        return [y.detach()[:32], own.grad[:32], layer.weight.grad.clone()]

    plain = run(None)
    low = run(QuantizedExperts(tuple(products(recipe) for _ in range(4))))
    for got, full in zip(low, plain, strict=True):
        error = (got.float() - full.float()).norm() / full.float().norm()
        assert float(error) < 8e-2
    assert not low[2][1].any()
    for expert, (begin, end) in enumerate([(0, 3), (3, 3), (3, 23), (23, 32)]):
        if begin == end:
            continue
        alone = Linear(64, (2, 32), bias=False, initial=Normal(1.0)).bfloat16()
        alone.weight.data.copy_(layer.weight[expert])
        alone.quantized = products(recipe)
        own = rows[begin:end].clone().requires_grad_()
        y = alone(own)
        y.backward(grad[begin:end])
        assert torch.equal(y, low[0][begin:end])
        assert own.grad is not None
        assert torch.equal(own.grad, low[1][begin:end])
        assert alone.weight.grad is not None
        assert torch.equal(alone.weight.grad, low[2][expert])


@pytest.mark.slow
def test_experts_in_low_precision() -> None:
    """Expert parallel ranks round as one process; experts are left alone unless asked for."""
    config = tiny_config(moe=MoEConfig(num_experts=4, ffn_hidden_size=48, router_topk=2))
    quantization = quantized("mxfp8", experts=True, keep_first=1, keep_last=1)
    layout = {"quantization": quantization, "micro_batch_size": 4}
    alone = run_ranks_fresh(fit, 1, Run(config=config, layout=layout, steps=4), "", None)[0]
    layout = {**layout, "expert_parallel_size": 2}
    ranks = run_ranks_fresh(fit, 2, Run(config=config, layout=layout, steps=4), "", None)
    for got, want in zip(ranks[0]["losses"], alone["losses"], strict=True):
        assert got == pytest.approx(want, rel=1e-3)
    assert len(alone["experts"]) == 4
    layout = {"quantization": quantized("mxfp8"), "micro_batch_size": 4}
    left = run_ranks_fresh(fit, 1, Run(config=config, layout=layout, steps=2), "", None)[0]
    assert not left["experts"]


class ExpertNoise(L.Callback):
    """Draws the noise of an expert's gradients as its backward pass does, after each step."""

    def __init__(self) -> None:
        self.drawn: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        model = trainer.strategy.parallel_model
        found = (getattr(layer, "quantized_experts", None) for layer in module.modules())
        noise = next(each for each in found if each is not None).products[0].noise
        for micro_batch in (0, 1):
            model.streams.begin(trainer.global_step, micro_batch, 0)
            self.drawn.append(
                noise(torch.Size((4, 64)), torch.Size((4, 16)), torch.device("cpu"))()
            )


def fit_with_noise(rank: int, world_size: int, run: Run) -> list[Tensor]:
    callback = ExpertNoise()
    trainer = L.Trainer(
        strategy=make_strategy(run.layout),
        accelerator="cpu",
        devices=world_size,
        max_steps=run.steps,
        logger=False,
        callbacks=[callback],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(GPTModel(run.config), Batches(run))
    return callback.drawn


def test_experts_round_by_other_noise_in_each_micro_batch() -> None:
    """By the same in all, a gradient's error would stay however many steps it is averaged over."""
    config = tiny_config(moe=MoEConfig(num_experts=4, ffn_hidden_size=48, router_topk=2))
    layout = {"quantization": quantized("nvfp4", experts=True)}
    drawn = run_ranks_fresh(fit_with_noise, 1, Run(config=config, layout=layout, steps=2))[0]
    assert len(drawn) == 4
    for i, noise in enumerate(drawn):
        assert not any((noise == other).float().mean() > 0.1 for other in drawn[:i])


# ---------------------------------------------------------------------- refusals


def refused(
    layout: dict[str, Any], *, precision: Any = None, config: Any = None, automatic: bool = True
) -> str:
    model = GPTModel(config or tiny_config())
    model.automatic_optimization = automatic
    trainer = L.Trainer(
        strategy=MegatronStrategy(**layout),
        accelerator="cpu",
        devices=layout.get("tensor_parallel_size", 1),
        precision=precision,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    with pytest.raises(ConfigurationError) as caught:
        trainer.fit(model, Batches(Run()))
    return str(caught.value)


def test_what_is_refused_before_the_start() -> None:
    text = refused({"quantization": QuantizationConfig(recipe="fp8_tensorwise")})
    assert "simulate=True" in text
    assert "cpu" in text
    text = refused({"quantization": quantized("fp8_tensorwise", keep_first=2, keep_last=2)})
    assert "no linear layer" in text
    text = refused({"quantization": quantized("fp8_tensorwise", exclude=["*.linear_prj"])})
    assert "['*.linear_prj'] match no module" in text
    text = refused({"quantization": quantized("fp8_tensorwise")}, precision="64-true")
    assert "64-true" in text
    text = refused({"quantization": quantized("fp8_tensorwise", fp8_gather=True)})
    assert "data_parallel.sharding='none'" in text
    assert "sharding='optimizer'" in text
    text = refused({"quantization": quantized("fp8_delayed")}, automatic=False)
    assert "automatic_optimization=False with quantization.recipe='fp8_delayed'" in text
    assert "recipe='fp8_tensorwise'" in text
    text = refused({"quantization": quantized("fp8_blockwise"), "tensor_parallel_size": 2})
    assert "blocks of 128 values do not divide" in text
    config = tiny_config(ffn_hidden_size=120)
    text = refused({"quantization": QuantizationConfig(recipe="fp8_rowwise")}, config=config)
    assert "multiples of 16" in text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"recipe": "fp6"}, "quantization.recipe='fp6'"),
        ({"recipe": "nvfp4"}, "simulate=True"),
        ({"keep_first": -1}, "quantization.keep_first=-1"),
        ({"recipe": "fp8_rowwise", "fp8_gather": True}, "fp8_gather=True"),
        ({"gradient_format": "e3m4"}, "quantization.gradient_format='e3m4'"),
        ({"amax_history_length": 0}, "quantization.amax_history_length=0"),
        ({"exclude": "*"}, "quantization.exclude='*'"),
        ({"exclude": [1]}, r"quantization.exclude=\[1\]: give a list of globs"),
        ({"exclude": 1}, "quantization.exclude=1: give a list of globs"),
        ({"margin": 18}, "quantization.margin=18: must be at most 17"),
    ],
)
def test_bad_values_are_explained(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words.replace("*", r"\*")):
        MegatronStrategy(quantization=QuantizationConfig(**fields))


def test_a_module_without_a_plan_is_refused() -> None:
    trainer = L.Trainer(
        strategy=MegatronStrategy(quantization=quantized("fp8_tensorwise")),
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
    )
    with pytest.raises(ConfigurationError, match="has no plan"):
        trainer.fit(OwnTransformer(Decoder), Batches(Run()))
