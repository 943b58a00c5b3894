"""The Transformer Engine back end without it: what it makes, what it refuses, and by a stand-in in
plain torch how its kernels are called.
"""

import itertools
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_lightning.config import GPTConfig, LoraConfig, MoEConfig, QuantizationConfig
from megatron_lightning.config.variants import StreamConfig
from megatron_lightning.layers import SequenceInfo, TorchBackend, TransformerLayer
from megatron_lightning.layers.rotary import RotaryEmbedding
from megatron_lightning.layers.te import TransformerEngineBackend, attention, products
from megatron_lightning.models.gpt import BackendName, GPTModel
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.quantized.products import QuantizedProducts, WeightClock
from megatron_lightning.parallel.random import Normal
from megatron_lightning.precision import te
from megatron_lightning.precision.delayed import DelayedScaling
from megatron_lightning.precision.operands import Operand, Recipe, Role
from megatron_lightning.precision.simulated import BlockRecipe, TensorRecipe
from megatron_lightning.precision.te_recipes import TEBlockRecipe, TETensorRecipe
from tests import te_stand_in
from tests.layout_runs import tiny_config
from tests.unit.parallel import test_quantized_region
from tests.unit.parallel.test_main_gradient import served

TE, TORCH = TransformerEngineBackend(), TorchBackend()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were installed, on the CPU."""
    monkeypatch.setattr(te, "missing", lambda: None)
    monkeypatch.setattr(te, "engine", te_stand_in.engine)


@pytest.fixture
def takes_all(installed: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in computes whatever comes."""
    monkeypatch.setattr(products, "_takes", lambda x, weight: True)
    monkeypatch.setattr(attention, "_fits", lambda query, value: True)
    attention._kernel.cache_clear()
    yield
    attention._kernel.cache_clear()


def test_absence_is_one_clear_message() -> None:
    with pytest.raises(ValueError, match=r"'transformer_engine': Transformer Engine is not inst"):
        GPTModel(tiny_config(), backend="transformer_engine").build_network("meta")


@pytest.mark.parametrize("has_parts", [True, False])
def test_another_version_is_one_clear_message(
    has_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules that are not where they were, or lack what is called: which version there is, what
    is missing and what to do.
    """
    names = ("", ".pytorch", ".pytorch.constants", ".pytorch.cpp_extensions", ".pytorch.tensor")
    modules = {
        f"transformer_engine{name}": ModuleType(f"transformer_engine{name}") for name in names
    }
    if has_parts:
        modules["transformer_engine_torch"] = ModuleType("transformer_engine_torch")
        for name in names[2:]:
            part = modules[f"transformer_engine{name}"]
            setattr(modules["transformer_engine.pytorch"], name.rpartition(".")[2], part)
        modules["transformer_engine"].pytorch = modules["transformer_engine.pytorch"]  # type: ignore[attr-defined]
    for name, module in modules.items():
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(te, "missing", lambda: None)
    monkeypatch.setattr(te.importlib.metadata, "version", lambda name: "3.1.0")
    te.engine.cache_clear()
    with pytest.raises(ValueError, match=r"Transformer Engine 3\.1\.0 is installed") as caught:
        te.engine()
    text = str(caught.value)
    assert ("general_gemm" if has_parts else "transformer_engine_torch") in text
    assert "install version 2.12" in text
    assert "backend='torch'" in text
    assert "kernels='torch'" in text


@pytest.mark.usefixtures("installed")
def test_refusals() -> None:
    with pytest.raises(ValueError, match="backend='apex': choose one of"):
        GPTModel(tiny_config(), backend="apex")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"attention='reference'.*backend='torch'"):
        GPTModel(tiny_config(), attention="reference", backend="transformer_engine").build_network(
            "meta"
        )


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": dict(tie_word_embeddings=True, norm="layernorm", add_bias_linear=True),
    "experts": dict(moe=MoEConfig(num_experts=4, router_topk=2, ffn_hidden_size=32)),
    "normed": dict(qk_layernorm=True, num_query_groups=4),
}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["all", "lora"])
@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_torch(name: str, lora: LoraConfig | None) -> None:
    config = tiny_config(**CONFIGS[name])
    backends: tuple[BackendName, ...] = ("torch", "transformer_engine")
    models = [GPTModel(config, lora=lora, backend=backend) for backend in backends]
    meta = [dict(model.build_network("meta").named_parameters()) for model in models]
    assert {k: v.shape for k, v in meta[0].items()} == {k: v.shape for k, v in meta[1].items()}
    first, second = (dict(model.built_network().named_parameters()) for model in models)
    assert list(first) == list(second)
    for key, parameter in first.items():
        assert torch.equal(parameter, second[key]), key


@pytest.mark.usefixtures("installed")
def test_falls_back_on_the_cpu() -> None:
    models = GPTModel(tiny_config()), GPTModel(tiny_config(), backend="transformer_engine")
    tokens = torch.randint(0, 257, (2, 16), generator=torch.Generator().manual_seed(0))
    first, second = (model.built_network()(tokens) for model in models)
    assert torch.equal(first, second)


def filled(module: nn.Module, seed: int = 3) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return module


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer_config(**changes: Any) -> GPTConfig:
    return tiny_config(**{"add_bias_linear": True, "qk_layernorm": True, **changes})


LAYERS: dict[str, dict[str, Any]] = {
    "rms": {},
    "centered": dict(stream=StreamConfig(zero_centered_norm=True)),
    "layernorm": dict(norm="layernorm", gated_linear_unit=False, activation="gelu"),
    "window": dict(window_size=5),
}


def layers(**changes: Any) -> tuple[TransformerLayer, TransformerLayer, GPTConfig]:
    config = layer_config(**changes)
    first = TransformerLayer(config, 0, TORCH)
    second = TransformerLayer(config, 0, TE)
    filled(first)
    second.load_state_dict(first.state_dict())
    return first, second, config


@pytest.mark.usefixtures("takes_all")
@pytest.mark.parametrize("packed", [None, ((5, 7), (12,))], ids=["whole", "packed"])
@pytest.mark.parametrize("name", LAYERS)
def test_layer_computes_what_torch_does(name: str, packed: Any) -> None:
    first, second, config = layers(**LAYERS[name])
    sequence = None if packed is None else SequenceInfo(packed)
    tables = RotaryEmbedding(config.rotary_dim, config.rotary)(12, None, torch.device("cpu"))
    found = []
    for layer in (first, second):
        x = drawn(12, 2, 64).requires_grad_()
        y = layer(x, tables, sequence)
        grads = torch.autograd.grad(y, [x, *layer.parameters()], drawn(12, 2, 64, seed=1))
        found.append([y, *grads])
    for wanted, got in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-5)


@pytest.mark.usefixtures("takes_all")
@pytest.mark.parametrize(
    ("frozen_input", "compiled"), [(False, False), (True, False), (False, True)]
)
def test_weight_gradients_go_to_their_sums(frozen_input: bool, compiled: bool) -> None:
    sums = []
    for layer in layers()[:2]:
        buckets = served(layer)
        buckets.reset()
        if compiled:
            layer.compile(backend="aot_eager", fullgraph=True)
        for seed in (0, 1):
            x = drawn(12, 2, 64, seed=seed).requires_grad_(not frozen_input)
            layer(x).backward(drawn(12, 2, 64, seed=7))
        assert dict(layer.named_parameters())["mlp.linear_fc1.weight"].grad is None
        buckets.finish(1.0)
        sums.append({name: grad.clone() for name, grad in buckets.gradients().items()})
        buckets.release()
    for name, wanted in sums[0].items():
        torch.testing.assert_close(sums[1][name], wanted, rtol=2e-4, atol=2e-5)


@pytest.mark.usefixtures("takes_all")
def test_compiled_layer_calls_its_operations() -> None:
    first, second, _ = layers()
    names: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    compiled = torch.compile(second, backend=backend, fullgraph=True)
    x = drawn(12, 2, 64)
    torch.testing.assert_close(compiled(x), first(x), rtol=2e-4, atol=2e-5)
    assert any("te_attention" in name for name in names)
    assert not any("rmsnorm_fwd" in name for name in names)


# ---------------------------------------------------------------------- FP8


def of(recipe: Recipe, x: Tensor, role: Role) -> tuple[Operand, Operand]:
    itself, transposed = recipe.pair(x, role)
    assert itself is not None
    assert transposed is not None
    return itself, transposed


def delayed(recipe: type[TETensorRecipe] | None) -> Recipe:
    store = DelayedScaling(["a"], gradient="e5m2", length=4, margin=0, device=torch.device("cpu"))
    return store.recipe("a") if recipe is None else recipe("e5m2", store.recipe("a"))


RECIPES = {
    "tensor": lambda: (TETensorRecipe("e5m2"), TensorRecipe("e5m2")),
    "delayed": lambda: (delayed(TETensorRecipe), delayed(None)),
    "block": lambda: (TEBlockRecipe("e4m3"), BlockRecipe("e4m3")),
}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("kind", "rows"), [*itertools.product(RECIPES, (256, 48, 50))])
def test_recipes_give_what_is_simulated(kind: str, rows: int) -> None:
    ours, simulated = RECIPES[kind]()
    x, weight, grad = drawn(rows, 160), drawn(144, 160, seed=1), drawn(rows, 144, seed=2)
    for _ in range(2):  # the second time with a history, where there is one
        results = []
        for recipe in (ours, simulated):
            x1, x2 = of(recipe, x, "input")
            w1, w2 = of(recipe, weight, "weight")
            g1, g2 = of(recipe, grad, "gradient")
            y = recipe.product(x1, w1, torch.float32, forward=True)
            dx = recipe.product(g1, w2, torch.float32, forward=False)
            dw = recipe.product(g2, x2, torch.float32, forward=False)
            results.append((y, dx, dw))
            if kind == "delayed":
                store = recipe._delayed.store if recipe is ours else recipe.store  # type: ignore[attr-defined]
                store.finish_window(lambda amax: amax)
        for got, wanted in zip(*results, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("kind", ["tensorwise", "delayed", "blockwise"])
def test_recipes_in_compiled_regions(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = test_quantized_region.train(kind, False) if kind != "blockwise" else None
    block = lambda gradient, delayed: TEBlockRecipe("e4m3")  # noqa: E731
    engine = block if kind == "blockwise" else TETensorRecipe
    monkeypatch.setattr(test_quantized_region, "FP8TensorRecipe", engine)
    outside = test_quantized_region.train(kind, False)
    inside = test_quantized_region.train(kind, True)
    for got, want in zip(inside, outside, strict=True):
        assert torch.equal(got, want)
    for got, want in zip(inside, ours or (), strict=ours is not None):
        assert torch.equal(got, want)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("kind", ["tensor", "block"])
def test_products_add_to_a_sum(kind: str) -> None:
    recipe = RECIPES[kind]()[0]
    _, x = of(recipe, drawn(32, 64), "input")
    _, grad = of(recipe, drawn(32, 48, seed=1), "gradient")
    total = torch.full((48, 64), torch.nan)
    once = recipe.product(grad, x, torch.float32, forward=False, out=total).clone()
    assert recipe.add_product_(total, grad, x)
    torch.testing.assert_close(total, 2 * once)


@pytest.mark.usefixtures("installed")
def test_a_layer_lets_its_product_add() -> None:
    layer = TORCH.linear(64, 48, bias=False, initial=Normal(1.0)).bfloat16()
    filled(layer)
    layer.quantized = QuantizedProducts(
        recipe=TETensorRecipe("e5m2"),
        split="none",
        tensor_axis=MeshAxis(name="tp"),
        context_axis=MeshAxis(name="cp"),
        splits_sequence=False,
        clock=WeightClock(),
    )
    x, grad = drawn(32, 64).bfloat16().requires_grad_(), drawn(32, 48, seed=1).bfloat16()
    layer(x).backward(grad)
    assert layer.weight.grad is not None
    wanted = 2 * layer.weight.grad.float()
    buckets = served(layer)
    buckets.reset()
    for _ in range(2):
        layer(x).backward(grad)
    buckets.finish(1.0)
    (total,) = buckets.gradients().values()  # in float32 throughout
    assert (total - wanted).norm() < 2**-8 * total.norm()
    buckets.release()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(kernels="apex"), "choose one of"),
        (dict(simulate=True), "it simulates nothing"),
        (dict(recipe="fp8_rowwise"), "it has no such recipe"),
        (dict(recipe="fp8_blockwise", gradient_format="e5m2"), "products of blocks take e4m3"),
        (dict(recipe="mxfp8"), "hardware"),
    ],
)
def test_config_refusals(changes: dict[str, Any], message: str) -> None:
    config = QuantizationConfig(**{"kernels": "transformer_engine", **changes})
    assert any(message in problem for problem in config.check())


def test_config_is_accepted() -> None:
    for recipe in ("fp8_tensorwise", "fp8_delayed", "fp8_blockwise"):
        assert not QuantizationConfig(recipe=recipe, kernels="transformer_engine").check()
