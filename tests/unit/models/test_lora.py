"""Adapters of a module: what they add, where they may be, and what is refused by name."""

from typing import Any

import pytest
import torch

from megatron_lightning.config import LoraConfig, MoEConfig, ParallelConfig
from megatron_lightning.config.lora import is_adapter
from megatron_lightning.config.plan import Gradient, Role
from megatron_lightning.models import GPTModel
from tests.layout_runs import tiny_config

TOKENS = torch.arange(24).view(2, 12)


def trained(model: GPTModel) -> dict[str, torch.Tensor]:
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def stir(model: GPTModel) -> None:
    """Give every B other values than zero."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_b" in name:
                parameter.normal_(std=0.1, generator=generator)


def test_construction_is_free_and_the_beginning_changes_nothing() -> None:
    model = GPTModel(tiny_config()).add_lora(rank=4, targets=["linear_qkv", "linear_fc2"])
    assert model.network is None
    assert torch.equal(model(TOKENS), GPTModel(tiny_config())(TOKENS))
    assert all(is_adapter(name) for name in trained(model))
    assert len(trained(model)) == 4 * 4 * 2  # query, key, value, fc2 in four layers


def test_names_values_and_shapes_do_not_depend_on_when() -> None:
    early = GPTModel(tiny_config(), lora=LoraConfig(rank=4))
    late = GPTModel(tiny_config())
    before = late(TOKENS)
    late.add_lora(rank=4)
    assert torch.equal(late(TOKENS), before)
    early(TOKENS)
    ours, others = dict(early.named_parameters()), dict(late.named_parameters())
    assert ours.keys() == others.keys()
    for name, parameter in ours.items():
        assert torch.equal(parameter, others[name]), name
        assert parameter.requires_grad == others[name].requires_grad == is_adapter(name)


@pytest.mark.parametrize("joined", [True, False])
def test_the_output_is_that_of_added_weights(joined: bool) -> None:
    config = LoraConfig(rank=3, alpha=6, joined=joined)
    model, plain = GPTModel(tiny_config(), lora=config), GPTModel(tiny_config())
    model(TOKENS), plain(TOKENS)
    stir(model)
    layer = model.network.decoder.layers["1"]
    heads, kv = layer.self_attention.linear_qkv, layer.mlp.linear_fc1
    assert list(heads.adapters) == (["whole"] if joined else ["query", "key", "value"])
    for module, target in zip(
        model.network.decoder.layers.values(), plain.network.decoder.layers.values(), strict=True
    ):
        for path in ("self_attention.linear_qkv", "self_attention.linear_proj"):
            add_(module.get_submodule(path), target.get_submodule(path))
        for path in ("mlp.linear_fc1", "mlp.linear_fc2"):
            add_(module.get_submodule(path), target.get_submodule(path))
    assert kv.adapters is not None
    torch.testing.assert_close(model(TOKENS), plain(TOKENS), atol=1e-4, rtol=1e-4)
    assert (model(TOKENS) - GPTModel(tiny_config())(TOKENS)).abs().max() > 1e-2


def add_(adapted: Any, plain: Any) -> None:
    """Add to the weight what the adapters make of each input feature alone."""
    rows = torch.eye(adapted.weight.shape[-1])
    with torch.no_grad():
        delta = adapted(rows) - plain(rows)
        plain.weight += delta.movedim(0, -1)


@pytest.mark.slow
def test_compiled_layers_are_one_graph() -> None:
    gradients = []
    for compiled in (False, True):
        model = GPTModel(tiny_config(num_layers=1), lora=LoraConfig(rank=4))
        network = model.built_network()
        stir(model)
        if compiled:
            network.decoder.layers["0"].compile(backend="aot_eager", fullgraph=True)
        model(TOKENS).square().mean().backward()
        gradients.append({name: p.grad for name, p in trained(model).items()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


def test_rows_of_the_split_table() -> None:
    plan = GPTModel(tiny_config(), lora=LoraConfig()).parallel_plan()
    name = "decoder.layers.3.self_attention.linear_qkv.adapters.value.lora_{}.weight"
    a, b = (plan.split_of(name.format(kind)) for kind in "ab")
    assert (a.role, a.gradient, b.role, b.dim) == (
        Role.REPLICATED,
        Gradient.SEQUENCE,
        Role.COLUMN,
        0,
    )
    name = "decoder.layers.3.mlp.linear_fc2.adapters.whole.lora_{}.weight"
    a, b = (plan.split_of(name.format(kind)) for kind in "ab")
    assert (a.role, b.role, b.gradient) == (Role.ROW, Role.REPLICATED, Gradient.SEQUENCE)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(rank=0), "lora.rank=0"),
        (dict(alpha=0), "lora.alpha=0"),
        (dict(alpha=float("nan")), "lora.alpha=nan"),
        (dict(rank="8"), "lora.rank='8' must be a whole number"),
        (dict(dropout=1.0), r"lora.dropout=1.0"),
        (dict(targets=[]), "name the layers"),
        (dict(targets=["q_proj"]), "'q_proj' matches no linear layer; there are .*linear_qkv"),
        (dict(targets=["output_layer"]), "names output_layer, a VocabularyHead"),
        (dict(targets=["input_layernorm"]), "input_layernorm, a RMSNorm, which can't"),
        (dict(targets=["linear_qkv:q"]), "no projection 'q' .*'query', 'key', 'value'"),
        (dict(targets=["linear_qkv:query"], joined=True), r"there are \['whole'\]"),
        (dict(checkpoint="base"), "lora.checkpoint='base'"),
    ],
)
def test_refused_by_name(fields: dict[str, Any], message: str) -> None:
    model = GPTModel(tiny_config())
    with pytest.raises(ValueError, match=message):
        model.add_lora(**fields)
    assert model.lora is None
    assert torch.isfinite(model(TOKENS)).all()


def test_twice_and_both_forms_are_refused() -> None:
    model = GPTModel(tiny_config()).add_lora(rank=2)
    with pytest.raises(ValueError, match="there are adapters already"):
        model.add_lora(rank=4)
    with pytest.raises(ValueError, match="not both"):
        GPTModel(tiny_config()).add_lora(LoraConfig(), rank=2)
    with pytest.raises(ValueError, match=r"lora.rank=-1"):
        GPTModel(tiny_config(), lora=LoraConfig(rank=-1))


def test_experts_are_not_split_over_the_expert_tensor_axis() -> None:
    moe = MoEConfig(num_experts=4, ffn_hidden_size=64)
    model = GPTModel(tiny_config(moe=moe)).add_lora(rank=2)
    layout = ParallelConfig(tensor_parallel_size=2)
    assert any("expert_tensor_parallel_size=2: adapters" in p for p in model.check_parallel(layout))
    whole = ParallelConfig(tensor_parallel_size=2, expert_tensor_parallel_size=1)
    assert not any("adapters" in p for p in model.check_parallel(whole))
    heads = GPTModel(tiny_config(moe=moe)).add_lora(targets=["linear_qkv"])
    assert not any("adapters" in p for p in heads.check_parallel(layout))
