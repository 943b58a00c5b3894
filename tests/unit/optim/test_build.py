import pytest
import torch
from torch import nn

from megatron_lightning.config.training import OptimizerConfig
from megatron_lightning.optim.build import build_optimizer, decays


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.norm = nn.LayerNorm(4)
        self.fc = nn.Linear(4, 8)
        self.gated_fc = nn.Linear(4, 8)
        self.gated_fc.bias = nn.Parameter(torch.zeros(2, 4))


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, set[str]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {g["name"]: {names[p] for p in g["params"]} for g in optimizer.param_groups}


def test_vectors_and_biases_do_not_decay_by_default() -> None:
    model = Tiny()
    optimizer = build_optimizer(model.named_parameters(), OptimizerConfig(weight_decay=0.3))
    assert _names(model, optimizer) == {
        "decay": {"embedding.weight", "fc.weight", "gated_fc.weight"},
        "no_decay": {"norm.weight", "norm.bias", "fc.bias", "gated_fc.bias"},
    }
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.3, 0.0]


def test_globs_add_to_the_rule_and_idle_globs_are_errors() -> None:
    model = Tiny()
    config = OptimizerConfig(no_decay=("embedding.*",))
    optimizer = build_optimizer(model.named_parameters(), config)
    assert "embedding.weight" in _names(model, optimizer)["no_decay"]
    with pytest.raises(ValueError, match=r"no_decay=\['embeding.*matches none"):
        build_optimizer(model.named_parameters(), OptimizerConfig(no_decay=("embeding.*",)))


def test_global_shapes_decide_and_name_other_stages() -> None:
    flat = nn.Parameter(torch.zeros(32))  # a master or shard of a matrix is a flat vector
    config = OptimizerConfig(no_decay=("head.*",))
    shapes = {"fc.weight": (8, 4), "head.weight": (8, 4)}
    optimizer = build_optimizer({"fc.weight": flat}, config, shapes)
    assert optimizer.param_groups[0]["params"] == [flat]
    assert optimizer.param_groups[1]["params"] == []


def test_decay_vectors_and_frozen_parameters() -> None:
    model = Tiny()
    model.fc.weight.requires_grad_(False)
    optimizer = build_optimizer(model.named_parameters(), OptimizerConfig(decay_vectors=True))
    names = _names(model, optimizer)
    assert "norm.weight" in names["decay"]
    assert "fc.weight" not in names["decay"] | names["no_decay"]


def test_a_shared_parameter_is_listed_once() -> None:
    shared = nn.Parameter(torch.zeros(2, 2))
    optimizer = build_optimizer({"a.weight": shared, "b.weight": shared}, OptimizerConfig())
    assert optimizer.param_groups[0]["params"] == [shared]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam), ("sgd", torch.optim.SGD)],
)
def test_registered_optimizers(name: str, kind: type) -> None:
    config = OptimizerConfig(name=name, lr=0.5, adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-6)
    optimizer = build_optimizer(Tiny().named_parameters(), config)
    assert type(optimizer) is kind
    assert all(g["lr"] == 0.5 and g["foreach"] for g in optimizer.param_groups)
    if name != "sgd":
        assert all(g["betas"] == (0.8, 0.9) and g["eps"] == 1e-6 for g in optimizer.param_groups)


def test_adamw_step_equals_the_formula() -> None:
    torch.manual_seed(0)
    weight, bias = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(3))
    config = OptimizerConfig(lr=1e-2, weight_decay=0.1)
    optimizer = build_optimizer({"fc.weight": weight, "fc.bias": bias}, config)
    before = {"w": weight.detach().clone(), "b": bias.detach().clone()}
    weight.grad, bias.grad = torch.randn(3, 2), torch.randn(3)
    optimizer.step()
    # At the first step both corrected moments are those of the gradient: the step is lr * sign(g).
    want = before["w"] * (1 - 1e-2 * 0.1) - 1e-2 * weight.grad / (weight.grad.abs() + 1e-8)
    torch.testing.assert_close(weight.detach(), want)
    want = before["b"] - 1e-2 * bias.grad / (bias.grad.abs() + 1e-8)
    torch.testing.assert_close(bias.detach(), want)


def test_bad_numbers_are_all_named() -> None:
    config = OptimizerConfig(lr=-1.0, adam_beta2=1.0, adam_eps=0.0)
    with pytest.raises(ValueError, match="lr=-1.0.*adam_beta2=1.0.*adam_eps=0.0"):
        build_optimizer(Tiny().named_parameters(), config)


def test_decays_reads_the_name_of_gated_biases() -> None:
    assert not decays("mlp.linear_fc1.bias", (2, 8), OptimizerConfig())
    assert decays("mlp.linear_fc1.weight", (2, 8, 4), OptimizerConfig())
