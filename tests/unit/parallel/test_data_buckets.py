import pytest
import torch
from torch import nn

from megatron_lightning.config.plan import ParameterInfo, replicated
from megatron_lightning.parallel.data import GradientBuckets
from megatron_lightning.parallel.flat import ALIGNMENT_ELEMENTS, plan_buckets
from megatron_lightning.parallel.mesh import ParallelMesh


def table_of(model: nn.Module) -> dict[str, ParameterInfo]:
    return {
        name: ParameterInfo(
            name=name,
            global_shape=tuple(p.shape),
            offsets=(0,) * p.dim(),
            sizes=tuple(p.shape),
            split=replicated(),
        )
        for name, p in model.named_parameters()
    }


def buckets_of(model: nn.Module, **options) -> GradientBuckets:
    return GradientBuckets(
        dict(model.named_parameters()),
        table_of(model),
        ParallelMesh.single(),
        sequence_parallel=False,
        **options,
    )


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def micro_batches(count: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 5, generator=generator).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("bucket_size", [1, 40, 64, 1000])
def test_plan_covers_every_parameter_once(bucket_size: int) -> None:
    numels = [3, 64, 1, 33, 100]
    begins, bounds = plan_buckets(numels, bucket_size)
    assert bounds[0] == 0
    assert bounds[-1] == begins[-1]
    assert bounds == sorted(set(bounds))
    assert set(bounds) <= set(begins)  # no parameter lies in two buckets
    for numel, begin, after in zip(numels, begins, begins[1:], strict=False):
        assert begin % ALIGNMENT_ELEMENTS == 0
        assert begin + numel <= after
    if bucket_size == 1000:
        assert len(bounds) == 2
    if bucket_size == 1:
        assert len(bounds) == len(numels) + 1


def test_accumulates_the_sum_of_micro_batches_and_divides_once() -> None:
    model, reference = network(), network()
    buckets = buckets_of(model)
    for _ in range(2):  # the second window starts from zero
        buckets.reset()
        reference.zero_grad()
        for x in micro_batches(3):
            model(x).square().sum().backward()
            reference(x).square().sum().backward()
            assert all(p.grad is None for p in model.parameters())
        buckets.finish(torch.tensor(12))
        buckets.publish()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad / 12)
    buckets.withdraw()
    assert all(p.grad is None for p in model.parameters())


def test_bfloat16_gradients_are_summed_in_float32() -> None:
    model, reference = network(torch.bfloat16), network(torch.bfloat16)
    buckets = buckets_of(model)
    buckets.reset()
    wanted = {name: torch.zeros(p.shape) for name, p in reference.named_parameters()}
    for x in micro_batches(8, torch.bfloat16):
        model(x).square().sum().backward()
        reference.zero_grad()
        reference(x).square().sum().backward()
        for name, p in reference.named_parameters():
            wanted[name] += p.grad.float()
    buckets.finish(1.0)
    buckets.publish()
    for name, p in model.named_parameters():
        assert p.dtype is torch.bfloat16
        assert p.grad.dtype is torch.float32
        assert torch.equal(p.grad, wanted[name])
        assert p.grad.data_ptr() == buckets.main_grad(name).data_ptr()
    buckets.publish(in_parameter_dtype=True)
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, wanted[name].bfloat16())
    # Autograd goes on after publishing and withdrawing.
    buckets.withdraw()
    buckets.reset()
    model(micro_batches(1, torch.bfloat16)[0]).sum().backward()
    buckets.release()
    model(micro_batches(1, torch.bfloat16)[0]).sum().backward()
    assert all(p.grad.dtype is torch.bfloat16 for p in model.parameters())


def test_a_parameter_without_a_gradient_publishes_none() -> None:
    model = network()
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    buckets = buckets_of(model)
    buckets.reset()
    model(micro_batches(1)[0]).sum().backward()
    buckets.finish(1)
    buckets.publish()
    assert model.unused.grad is None
    assert "unused" not in buckets.gradients()
    assert model[0].weight.grad is not None
    buckets.reset()
    model.unused.square().sum().backward()
    buckets.finish(1)
    assert list(buckets.gradients()) == ["unused"]


def test_weight_zero_leaves_zeros() -> None:
    model = network()
    buckets = buckets_of(model)
    buckets.reset()
    (model(micro_batches(1)[0]) * 0).sum().backward()
    buckets.finish(torch.tensor(0))
    buckets.publish()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


def test_frozen_parameters_are_left_out_until_rebuilt() -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    buckets = buckets_of(model)
    assert not buckets.is_stale
    assert sum(buffer.numel() for buffer in buckets.buffers) == 3 * ALIGNMENT_ELEMENTS
    model[0].weight.requires_grad_(True)
    assert buckets.is_stale
    buckets.rebuild()
    assert not buckets.is_stale
    buckets.reset()
    model(micro_batches(1)[0]).sum().backward()
    buckets.finish(1)
    assert buckets.gradients().keys() == dict(model.named_parameters()).keys()
    model[2].bias.requires_grad_(False)
    assert buckets.is_stale
    buckets.rebuild()
    assert "2.bias" not in sum(buckets.bucket_names, [])


def test_buckets_run_backwards_and_do_not_straddle_chunks() -> None:
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    chunks = [
        {f"{part}.{name}": p for name, p in module.named_parameters()}
        for part, module in (("first", first), ("last", last))
    ]
    table = table_of(nn.ModuleDict({"first": first, "last": last}))
    buckets = GradientBuckets(
        chunks, table, ParallelMesh.single(), sequence_parallel=False, bucket_size=1000
    )
    assert buckets.bucket_names == [["last.bias", "last.weight"], ["first.bias", "first.weight"]]
    assert len(buckets.buffers) == 2


def test_buckets_start_in_order_during_the_armed_backward_only() -> None:
    torch.manual_seed(0)
    modules = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    buckets = buckets_of(modules, bucket_size=1)
    x = torch.ones(2, 4)
    launched: list[tuple[str, int]] = []
    for name, p in modules.named_parameters():
        p.register_post_accumulate_grad_hook(
            lambda _, name=name: launched.append((name, buckets.num_launched))
        )
    buckets.reset()
    modules["b"](modules["a"](x)).sum().backward()
    assert {count for _, count in launched} == {0}
    launched.clear()
    buckets.arm()
    modules["b"](modules["a"](x)).sum().backward()
    # The order of buckets is b.bias, b.weight, a.bias, a.weight: one may run late, none early.
    assert [count for _, count in launched] == sorted(count for _, count in launched)
    assert launched[-1][1] == 4
    buckets.finish(1)
    buckets.reset()
    buckets.arm()
    modules["a"](x).sum().backward()  # b never gets a gradient: everything waits for finish
    assert buckets.num_launched == 0
    buckets.finish(1)
    assert buckets.num_launched == 4
    assert sorted(buckets.gradients()) == ["a.bias", "a.weight"]


def test_a_gradient_after_the_reduction_is_an_error() -> None:
    model = network()
    buckets = buckets_of(model)
    buckets.reset()
    buckets.arm()
    x = micro_batches(1)[0]
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match="got a gradient after its bucket was reduced"):
        model(x).sum().backward()


def test_overlap_off_allows_any_number_of_passes() -> None:
    model = network()
    buckets = buckets_of(model, overlap=False)
    buckets.reset()
    buckets.arm()
    for x in micro_batches(2):
        model(x).sum().backward()
    assert buckets.num_launched == 0
    buckets.finish(1)


def test_ops_may_add_in_place_and_say_so() -> None:
    model = network()
    buckets = buckets_of(model)
    buckets.reset()
    buckets.main_grad("0.weight").add_(2.0)
    buckets.arrived("0.weight")
    buckets.finish(4)
    buckets.publish()
    assert torch.equal(model[0].weight.grad, torch.full((7, 5), 0.5))
    assert model[0].bias.grad is None


def test_second_order_gradients_do_not_keep_the_graph() -> None:
    model = network()
    buckets = buckets_of(model)
    buckets.reset()
    model(micro_batches(1)[0]).square().sum().backward(create_graph=True)
    assert all(not buffer.requires_grad for buffer in buckets.buffers)


def test_bucket_size_is_checked() -> None:
    with pytest.raises(ValueError, match="bucket_size=0"):
        buckets_of(network(), bucket_size=0)
