import copy

import pytest
import torch
from torch import nn

from megatron_lightning.config.plan import ParameterInfo, replicated
from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.optim.build import build_optimizer
from megatron_lightning.optim.schedules import build_schedule
from megatron_lightning.parallel.data import GradientBuckets
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.precision.masters import MasterParameters, still_initial


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4)).bfloat16()


def _x(step: int, micro_batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + micro_batch)
    return torch.randn(3, 6, generator=generator).bfloat16()


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x).float() - 1).square().sum()


def test_training_equals_a_handwritten_loop_with_masters_bitwise() -> None:
    steps, micro_batches = 12, 3
    config = OptimizerConfig(lr=1e-2, weight_decay=0.1)
    schedule_config = SchedulerConfig(lr_decay_style="cosine", lr_warmup_steps=3)

    model = network()
    named = dict(model.named_parameters())
    optimizer = build_optimizer(named, config)
    schedule = build_schedule(optimizer, config, schedule_config, total_steps=steps)
    masters = MasterParameters(optimizer, named)
    table = {
        n: ParameterInfo(
            name=n, global_shape=tuple(p.shape), offsets=(0,), sizes=(1,), split=replicated()
        )
        for n, p in named.items()
    }
    buckets = GradientBuckets(named, table, ParallelMesh.single(), sequence_parallel=False)
    for step in range(steps):
        buckets.reset()
        for index in range(micro_batches):
            _loss(model, _x(step, index)).backward()
        buckets.finish(float(micro_batches))
        buckets.publish()
        masters.attach_gradients()
        optimizer.step()
        masters.copy_to_model()
        masters.detach_gradients()
        schedule.step()

    # By hand: float32 weights, rounded to bfloat16 for each forward; AdamW written out.
    weights = {n: p.detach().float() for n, p in network().named_parameters()}
    m = {n: torch.zeros_like(w) for n, w in weights.items()}
    v = {n: torch.zeros_like(w) for n, w in weights.items()}
    reference = network()
    for step in range(steps):
        grads = {n: torch.zeros_like(w) for n, w in weights.items()}
        for index in range(micro_batches):
            reference.zero_grad()
            _loss(reference, _x(step, index)).backward()
            for n, p in reference.named_parameters():
                grads[n] += p.grad.float()
        lr = schedule.learning_rate(step)
        for n, w in weights.items():
            g = grads[n] / micro_batches
            w.mul_(1 - lr * (0.1 if w.dim() > 1 else 0.0))
            m[n].lerp_(g, 1 - 0.9)
            v[n].mul_(0.95).addcmul_(g, g, value=1 - 0.95)
            correction = (1 - 0.95 ** (step + 1)) ** 0.5
            w.addcdiv_(
                m[n], (v[n].sqrt() / correction).add_(1e-8), value=-lr / (1 - 0.9 ** (step + 1))
            )
        for n, p in reference.named_parameters():
            p.data.copy_(weights[n])
    for n, master in masters.named_masters().items():
        assert master.dtype is torch.float32
        assert torch.equal(master.detach(), weights[n]), n
        assert torch.equal(named[n].detach(), weights[n].bfloat16()), n
        assert torch.equal(optimizer.state[master]["exp_avg"], m[n])


@pytest.mark.gpu
def test_masters_under_the_fused_optimizer_equal_the_cpu() -> None:
    found = {}
    for device in ("cpu", "cuda"):
        named = {"w": nn.Parameter(network()[0].weight.detach().to(device))}
        optimizer = build_optimizer(named, OptimizerConfig(lr=1e-2))
        assert bool(optimizer.param_groups[0].get("fused")) is (device == "cuda")
        masters = MasterParameters(optimizer, named)
        named["w"].grad_dtype = None
        for step in range(5):
            generator = torch.Generator().manual_seed(step)
            named["w"].grad = torch.randn(16, 6, generator=generator).to(device)
            masters.attach_gradients()
            optimizer.step()
            masters.copy_to_model()
        found[device] = masters.named_masters()["w"].detach().cpu()
        assert torch.equal(named["w"].detach().cpu(), found[device].bfloat16())
    torch.testing.assert_close(found["cuda"], found["cpu"], rtol=1e-5, atol=1e-6)


def test_groups_keep_their_identity_and_float32_parameters_their_place() -> None:
    low = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    full = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([{"params": [low, full]}, {"params": []}], lr=0.1)
    groups, lists = list(optimizer.param_groups), [g["params"] for g in optimizer.param_groups]
    masters = MasterParameters(optimizer, {"low": low, "full": full})
    assert all(a is b for a, b in zip(optimizer.param_groups, groups, strict=True))
    assert all(g["params"] is p for g, p in zip(optimizer.param_groups, lists, strict=True))
    master, same = optimizer.param_groups[0]["params"]
    assert same is full
    assert masters.named_masters() == {"low": master, "full": full}
    assert masters.master_of(low) is master
    assert master.requires_grad
    masters.adopt()
    assert optimizer.param_groups[0]["params"][0] is master


def test_state_that_is_there_moves_to_the_master() -> None:
    p = nn.Parameter(torch.randn(4, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([p], lr=1e-3)
    p.grad = torch.randn(4).bfloat16()
    optimizer.step()
    before = copy.deepcopy(dict(optimizer.state[p]))
    masters = MasterParameters(optimizer, {"p": p})
    assert p not in optimizer.state
    state = optimizer.state[masters.master_of(p)]
    assert state["step"] == before["step"]
    assert state["exp_avg"].dtype is torch.float32
    assert torch.equal(state["exp_avg"], before["exp_avg"].float())


def test_groups_added_later_are_adopted_and_frozen_parameters_stay_frozen() -> None:
    a = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    b = nn.Parameter(torch.ones(2, dtype=torch.bfloat16), requires_grad=False)
    optimizer = torch.optim.SGD([a], lr=0.1)
    masters = MasterParameters([optimizer], {"a": a, "b": b})
    optimizer.add_param_group({"params": [b]})
    masters.adopt()
    master = optimizer.param_groups[1]["params"][0]
    assert master is masters.master_of(b)
    assert not master.requires_grad
    assert len(masters.named_masters()) == 2


def test_small_updates_are_not_lost_and_weights_can_be_taken_over() -> None:
    p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([p], lr=1e-4)
    masters = MasterParameters(optimizer, {"p": p})
    for _ in range(100):  # each step is far below bfloat16's resolution at 1
        p.grad = torch.ones(3, dtype=torch.bfloat16)
        masters.attach_gradients()
        optimizer.step()
        masters.copy_to_model()
    assert torch.equal(p.detach(), torch.full((3,), 0.99).bfloat16())
    with torch.no_grad():
        p.fill_(2.0)
    masters.copy_from_model()
    assert torch.equal(masters.master_of(p).detach(), torch.full((3,), 2.0))
    p.grad = None
    masters.attach_gradients()
    assert masters.master_of(p).grad is None


def test_a_strange_parameter_is_an_error() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))], lr=1.0)
    with pytest.raises(ValueError, match=r"shape \(2, 3\) that is not one of the module's"):
        MasterParameters(optimizer, {})


def test_masters_begin_unrounded_unless_other_weights_were_loaded() -> None:
    drawn = {name: torch.randn(50, generator=torch.Generator().manual_seed(1)) for name in "ab"}
    a, b = (torch.nn.Parameter(value.bfloat16()) for value in drawn.values())
    initial = {a: lambda: drawn["a"].clone(), b: lambda: drawn["b"].clone()}
    with torch.no_grad():
        b[7] = 3.0
    optimizer = torch.optim.SGD([a, b], lr=0.1)
    held = MasterParameters(optimizer, {"a": a, "b": b}, initial=initial).named_masters()
    assert torch.equal(held["a"], drawn["a"])
    assert torch.equal(held["b"], b.float())
    assert list(still_initial([b, a, a], initial)) == [a]
    assert not still_initial([a], {})


def test_values_that_are_read_rounded_get_back_what_was_rounded_away() -> None:
    drawn = torch.randn(50, generator=torch.Generator().manual_seed(1))
    a, b = (torch.nn.Parameter(drawn.bfloat16().float()) for _ in range(2))
    with torch.no_grad():
        b[7] = 3.0
    changed = b.detach().clone()
    found = still_initial([a, b], {a: drawn.clone, b: drawn.clone}, restore=torch.bfloat16)
    assert list(found) == [a]
    assert torch.equal(a, drawn)
    assert torch.equal(b, changed)


def test_parts_of_other_ranks_decide_too() -> None:
    drawn = torch.randn(50)
    a, b = (torch.nn.Parameter(drawn.bfloat16()) for _ in range(2))
    initial = {a: drawn.clone, b: drawn.clone}

    def agree(verdicts: torch.Tensor) -> None:  # another rank has changed its part of b
        verdicts.mul_(torch.tensor([1, 0]))

    optimizer = torch.optim.SGD([a, b], lr=0.1)
    masters = MasterParameters(optimizer, {"a": a, "b": b}, initial=initial, agree=agree)
    held = masters.named_masters()
    assert torch.equal(held["a"], drawn)
    assert torch.equal(held["b"], b.float())
