"""The Transformer Engine back end on CUDA: its products, norms and attention against float64 and
the torch back end, and whole runs.

pytest tests/gpu/test_te_cuda.py -m gpu -s
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lightning.config import (
    DataParallelConfig,
    LoraConfig,
    QuantizationConfig,
    RecomputeConfig,
    RuntimeConfig,
)
from megatron_lightning.config.model import GPTConfig
from megatron_lightning.config.quantization import ENGINE_RECIPES, RecipeName
from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.layers import SequenceInfo, TorchBackend, TransformerLayer
from megatron_lightning.layers.rotary import RotaryEmbedding
from megatron_lightning.layers.te import TransformerEngineBackend
from megatron_lightning.models.gpt import BackendName, GPTModel
from megatron_lightning.parallel.random import Normal
from megatron_lightning.precision.delayed import DelayedScaling
from megatron_lightning.precision.operands import Operand, Pair, Recipe
from megatron_lightning.precision.te_recipes import TEBlockRecipe, TETensorRecipe
from tests.harness import run_ranks_fresh
from tests.layout_runs import (
    Batches,
    Recorder,
    Run,
    assert_same_training,
    make_strategy,
    tiny_config,
    train,
)
from tests.tolerances import TOLERANCES
from tests.unit.parallel.test_main_gradient import served

pytest.importorskip("transformer_engine")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("not torch.cuda.is_available()", reason="needs a CUDA device"),
]

ROUNDING = 2.0**-8
TE, TORCH = TransformerEngineBackend(), TorchBackend()


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).to(dtype)


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def results(module: Callable[..., Tensor], x: Tensor, *more: Any) -> list[Tensor]:
    """Output, and gradients of input and parameters."""
    x = x.detach().clone().requires_grad_()
    y = module(x, *more)
    parameters = list(module.parameters()) if isinstance(module, nn.Module) else []
    grad = drawn(*y.shape, seed=1).to(y.dtype)
    return [y, *torch.autograd.grad(y, [x, *parameters], grad)]


def filled(module: nn.Module) -> nn.Module:
    generator = torch.Generator("cuda").manual_seed(7)
    for parameter in module.parameters():
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, device="cuda", generator=generator))
    return module


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(bias: bool, dtype: torch.dtype) -> None:
    layer = TE.linear(256, (2, 192), bias=bias, initial=Normal(1.0), device="cuda")
    filled(layer).to(dtype)
    exact = TORCH.linear(256, (2, 192), bias=bias, initial=Normal(1.0), device="cuda").double()
    exact.load_state_dict({name: x.double() for name, x in layer.state_dict().items()})
    x = drawn(40, 2, 256, dtype=dtype)
    for found, wanted in zip(results(layer, x), results(exact, x.double()), strict=True):
        assert found.shape == wanted.shape
        assert error(found, wanted) < ROUNDING


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("width", [64, 128, 2048])
def test_norm(norm: str, width: int) -> None:
    config = tiny_config(norm=norm)
    layer = filled(TE.norm(config, width, device="cuda")).bfloat16()
    exact = TORCH.norm(config, width, device="cuda").double()
    exact.load_state_dict({name: x.double() for name, x in layer.state_dict().items()})
    x = drawn(40, 3, width)
    for found, wanted in zip(results(layer, x), results(exact, x.double()), strict=True):
        assert error(found, wanted) < 2 * ROUNDING


LENGTHS = {"whole": None, "packed": ((100, 412), (512,), (1, 2, 509))}


@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_attention(lengths: str, window: int) -> None:
    packed = LENGTHS[lengths]
    sequence = None if packed is None else SequenceInfo(packed)
    config = tiny_config(num_attention_heads=8, hidden_size=512, window_size=window)
    core, exact = TE.core_attention(config, 0), TorchBackend(attention="reference")
    wanted_core = exact.core_attention(config, 0)
    sizes = [(512, 3, heads, 64) for heads in (8, 2, 2)]
    tensors = [drawn(*size, seed=i).requires_grad_() for i, size in enumerate(sizes)]
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    y, wanted = core(*tensors, sequence), wanted_core(*doubles, sequence)
    grad = drawn(*y.shape, seed=9)
    found = [y, *torch.autograd.grad(y, tensors, grad)]
    for a, b in zip(
        found, [wanted, *torch.autograd.grad(wanted, doubles, grad.double())], strict=True
    ):
        print(lengths, window, error(a, b))
        assert a.shape == b.shape
        assert error(a, b) < 2 * ROUNDING


def test_attention_is_its_own_kernel() -> None:
    core = TE.core_attention(tiny_config(num_attention_heads=8, hidden_size=512), 0)
    query, key = drawn(512, 2, 8, 64), drawn(512, 2, 2, 64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        core(query, key, key)
    assert any("te_attention" in event.key for event in profile.key_averages())


RECIPES: dict[str, Callable[[], Recipe]] = {
    "tensor": lambda: TETensorRecipe("e5m2"),
    "block": lambda: TEBlockRecipe("e4m3"),
}
LIMITS = {"tensor": 6e-2, "block": 6e-2}  # two factors of three and two bits of mantissa


def operand(pair: Pair, side: str) -> Operand:
    found = getattr(pair, side)
    assert found is not None
    return found


@pytest.mark.parametrize("rows", [256, 264, 250])
@pytest.mark.parametrize("kind", RECIPES)
def test_fp8_products(kind: str, rows: int) -> None:
    recipe = RECIPES[kind]()
    x, weight, grad = drawn(rows, 256), drawn(384, 256, seed=1), drawn(rows, 384, seed=2)
    of_x, of_w = recipe.pair(x, "input"), recipe.pair(weight, "weight")
    of_grad = recipe.pair(grad, "gradient")
    y = recipe.product(
        operand(of_x, "itself"), operand(of_w, "itself"), torch.bfloat16, forward=True
    )
    assert error(y[:rows], x.double() @ weight.double().t()) < LIMITS[kind]
    grad_x = recipe.product(
        operand(of_grad, "itself"), operand(of_w, "transposed"), torch.bfloat16, forward=False
    )
    assert error(grad_x[:rows], grad.double() @ weight.double()) < LIMITS[kind]
    exact = grad.double().t() @ x.double()
    factors = operand(of_grad, "transposed"), operand(of_x, "transposed")
    total = torch.full((384, 256), torch.nan, device="cuda")
    recipe.product(*factors, torch.float32, forward=False, out=total)
    assert error(total, exact) < LIMITS[kind]
    assert recipe.add_product_(total, *factors)
    assert error(total, 2 * exact) < LIMITS[kind]


def test_largest_values_are_recorded() -> None:
    store = DelayedScaling(["a"], gradient="e5m2", length=4, margin=0, device=torch.device("cuda"))
    recipe = TETensorRecipe("e5m2", store.recipe("a"))
    x = drawn(256, 256)
    for factor in (1.0, 0.25, 0.5):  # the first without a history
        recipe.pair(x * factor, "input")
        recipe.pair(x * factor / 2, "input")
        assert store.amax[0, 0] == (x * factor).abs().max().float()
        assert store.amax[0, 1] == 0
        store.finish_window(lambda amax: amax)
    itself = operand(recipe.pair(x, "input"), "itself")
    assert itself.scale is not None
    assert error(itself.values.float() * itself.scale, x) < LIMITS["tensor"]


def layer_config() -> GPTConfig:
    return tiny_config(
        num_attention_heads=8, hidden_size=512, ffn_hidden_size=1024, qk_layernorm=True
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_layer_adds_to_main_gradients(compiled: bool) -> None:
    config = layer_config()
    torch_layer = filled(TransformerLayer(config, 0, TORCH, device="cuda")).bfloat16()
    te_layer = TransformerLayer(config, 0, TE, device="cuda").bfloat16()
    te_layer.load_state_dict(torch_layer.state_dict())
    with torch.no_grad():
        for layer in (torch_layer, te_layer):
            for parameter in layer.parameters():
                parameter.mul_(0.05)
    tables = RotaryEmbedding(config.rotary_dim, config.rotary)(256, None, torch.device("cuda"))
    x, sums = drawn(256, 2, 512), {}
    for name, layer in (("torch", torch_layer), ("te", te_layer)):
        buckets = served(layer)
        buckets.reset()
        if compiled and name == "te":
            layer.compile(fullgraph=True)
        for _ in range(2):
            layer(x, tables).backward(drawn(256, 2, 512, seed=3))
        buckets.finish(1.0)
        sums[name] = {key: grad.clone() for key, grad in buckets.gradients().items()}
        buckets.release()
    for name, wanted in sums["torch"].items():
        assert error(sums["te"][name], wanted) < 8 * ROUNDING, name


def on_gpu(backend: str = "transformer_engine", **changes: Any) -> Run:
    layout = {"micro_batch_size": 2, **changes.pop("layout", {})}
    return Run(
        config=tiny_config(**changes.pop("config", {})),
        layout=layout,
        trainer=dict(accelerator="gpu", precision="bf16-mixed", limit_val_batches=0),
        keep_gradients=(0, 3),
        backend=backend,
        **changes,
    )


@functools.cache
def by_torch() -> dict[str, Any]:
    return run_ranks_fresh(train, 1, on_gpu("torch"), timeout=300)[0]


LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "autograd": dict(data_parallel=DataParallelConfig(fuse_weight_gradients=False)),
    "compiled": dict(runtime=RuntimeConfig(compile_layers=True)),
    "recomputed": dict(recompute=RecomputeConfig(mode="full")),
    "fsdp": dict(data_parallel=DataParallelConfig(sharding="fsdp")),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_training(name: str) -> None:
    found = run_ranks_fresh(train, 1, on_gpu(layout=LAYOUTS[name]), timeout=300)
    wanted = dict(by_torch())
    found[0]["metrics"] = wanted["metrics"] = {}
    assert_same_training(found, wanted, torch.bfloat16)


PAIRS: dict[str, dict[str, Any]] = {
    "tensor": dict(tensor_parallel_size=2, sequence_parallel=True),
    "context": dict(context_parallel_size=2),
    "pipeline": dict(pipeline_parallel_size=2),
}


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")
@pytest.mark.parametrize("name", PAIRS)
def test_training_on_two(name: str) -> None:
    found = run_ranks_fresh(train, 2, on_gpu(layout=PAIRS[name]), timeout=300)
    wanted = dict(by_torch())
    for each in found:
        each["metrics"] = {}
    wanted["metrics"] = {}
    assert_same_training(found, wanted, torch.bfloat16)


def test_training_of_adapters() -> None:
    lora = LoraConfig(rank=8)
    runs = [on_gpu(backend, lora=lora) for backend in ("transformer_engine", "torch")]
    found, wanted = (run_ranks_fresh(train, 1, run, timeout=300) for run in runs)
    found[0]["metrics"] = wanted[0]["metrics"] = {}
    assert_same_training(found, wanted[0], torch.bfloat16)


def test_same_names_and_losses() -> None:
    config = replace(tiny_config(), qk_layernorm=True)
    torch.manual_seed(0)
    networks = [
        GPTModel(config, backend=name).built_network() for name in ("torch", "transformer_engine")
    ]
    first, second = (dict(network.named_parameters()) for network in networks)
    assert list(first) == list(second)
    for name, parameter in first.items():
        assert torch.equal(parameter, second[name]), name
    tokens = torch.randint(0, 257, (2, 64), device="cuda")
    halves = [copy.deepcopy(network).cuda().bfloat16() for network in networks]
    losses = [network(tokens, None, tokens).float() for network in halves]
    assert F.mse_loss(*losses).sqrt() < 8 * ROUNDING * losses[0].mean()


@pytest.mark.parametrize("recipe", ENGINE_RECIPES)
def test_training_in_fp8(recipe: RecipeName) -> None:
    config = dict(hidden_size=128, ffn_hidden_size=256)
    losses = {}
    for kernels in ("torch", "transformer_engine"):
        quantization = QuantizationConfig(recipe=recipe, kernels=kernels)
        run = on_gpu(kernels, config=config, layout=dict(quantization=quantization))
        losses[kernels] = torch.tensor(run_ranks_fresh(train, 1, run, timeout=300)[0]["losses"])
    print(recipe, losses)
    assert losses["torch"].isfinite().all()
    assert ((losses["torch"] - losses["transformer_engine"]).abs() < 1e-2 * losses["torch"]).all()


def losses_in_two(
    rank: int, world_size: int, backends: tuple[BackendName, ...], folder: str
) -> Any:
    """Losses of six steps, of which the last three continue a checkpoint with another back end."""
    found = []
    for part, backend in enumerate(backends):
        run = on_gpu(backend, steps=6)
        model = GPTModel(
            run.config,
            OptimizerConfig(),
            SchedulerConfig(lr_decay_style="constant"),
            backend=backend,
        )
        recorder = Recorder(run)
        trainer = L.Trainer(
            strategy=make_strategy(run.layout),
            callbacks=[recorder],
            devices=1,
            max_steps=3 * (part + 1),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **run.trainer,
        )
        trainer.fit(model, Batches(run), ckpt_path=f"{folder}/half" if part else None)
        trainer.save_checkpoint(f"{folder}/half" if not part else f"{folder}/end")
        found += recorder.losses
    return found


def test_checkpoint_moves_between_back_ends(tmp_path: Path) -> None:
    losses = {}
    for backends in (("torch", "torch"), ("torch", "transformer_engine")):
        folder = tmp_path / backends[1]
        folder.mkdir()
        (found,) = run_ranks_fresh(losses_in_two, 1, backends, str(folder), timeout=300)
        losses[backends[1]] = torch.tensor(found)
    assert len(losses["torch"]) == 6
    limit = TOLERANCES[torch.bfloat16].loss
    assert error(losses["transformer_engine"], losses["torch"]) < limit
