"""Training with the optimizer's step as one pass, in place of division, clipping, step, rounding.

The kernel needs a GPU; here a function of torch takes its place.
"""

import ctypes
import sys
import types
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron_lightning.config import DataParallelConfig, MoEConfig
from megatron_lightning.layers import kernels
from megatron_lightning.optim import adam_pass, shards
from megatron_lightning.optim.distributed import DistributedOptimizer
from megatron_lightning.parallel.data import GradientBuckets
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.runtime import folded_step
from megatron_lightning.runtime import update as update_module
from tests import layout_runs
from tests.distributed.test_distributed_optimizer import table_of
from tests.harness import run_ranks_fresh
from tests.layout_runs import (
    Recorder,
    Run,
    assemble,
    assert_same_training,
    tiny_config,
    train,
)

_WIDTHS = {torch.float32: (ctypes.c_float, torch.float32), torch.bfloat16: (ctypes.c_int16, None)}


def _memory(address: int, elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
    kind, _ = _WIDTHS[dtype]
    array = numpy.ctypeslib.as_array((kind * elements).from_address(address))
    found = torch.from_numpy(array)
    return found.view(torch.bfloat16) if dtype is torch.bfloat16 else found


def update(
    table: Tensor,
    tensor_of: Tensor,
    block_of: Tensor,
    corrections: Tensor,
    factor: Tensor,
    active: Tensor,
    **options: Any,
) -> None:
    """What the kernel computes, from the same arguments."""
    if not bool(active):
        return
    lr, decay = options["lr"], options["weight_decay"]
    beta1, beta2 = options["beta1"], options["beta2"]
    rows = table.tolist()
    for number in tensor_of.unique().tolist():  # a stage's
        row, (first, second) = rows[number], corrections[number]
        size = row[-1]
        assert int((tensor_of == number).sum()) == -(-size // 64)
        p, grad, m, v = (_memory(address, size) for address in row[:4])
        grad = grad * factor
        if options["decoupled"]:
            p.mul_(1 - lr * decay)
        else:
            grad = grad + decay * p
        m.lerp_(grad, 1 - beta1)
        v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        p.sub_(lr / first * m / (v.sqrt() / second + options["eps"]))
        if row[4]:
            _memory(row[4], size, options["copy_dtype"]).copy_(p)


def use_pass() -> None:
    """In this process, as if its CPU could run the kernel."""
    fake: Any = types.ModuleType("megatron_lightning.layers.kernels.adam")
    fake.update, fake.BLOCK = update, 64
    sys.modules[fake.__name__] = fake
    kernels.adam = fake  # type: ignore[attr-defined]
    adam_pass.can_run = lambda tensor: True
    adam_pass.can_pass = folded_step.can_pass = lambda optimizer: True


class Silent(Recorder):
    """Asks the strategy alone for gradients; `grad` is gone after a step that did not need them."""

    reads_gradients = False

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, module, *args)
        if len(self.norms) - 1 not in self.run.keep_gradients and batch_closes_window(trainer):
            assert all(parameter.grad is None for parameter in module.parameters())


def batch_closes_window(trainer: Any) -> bool:
    return not trainer.fit_loop._should_accumulate()


def train_with_pass(rank: int, world_size: int, run: Run, fold: bool) -> dict[str, Any]:
    use_pass()
    if fold:
        layout_runs.Recorder = Silent
    steps: list[bool] = []
    before = folded_step.FoldedStep.before_step

    def counted(self: Any) -> None:
        folds = self.factor is not None
        before(self)
        steps.append(self.is_rounded and folds == (fold and len(steps) not in run.keep_gradients))

    folded_step.FoldedStep.before_step = counted  # type: ignore[method-assign]
    given: list[int] = []
    give = shards._give

    def noted(made: Any) -> None:
        given.append(id(made))
        give(made)

    shards._give = noted
    known: list[int] = []
    total_norm = update_module.global_grad_norm

    def with_known(grads: Any, *args: Any, **options: Any) -> Tensor:
        norm = total_norm(grads, *args, **options)
        if options.get("known"):
            known.append(len(options["known"]))
            found = options.pop("known")
            assert {name for name in found if found[name]} <= grads.keys()
            assert torch.equal(norm, total_norm(grads, *args, **options))
        return norm

    update_module.global_grad_norm = with_known
    result = train(rank, world_size, run)
    assert steps == [True] * run.steps
    assert len(known) >= run.steps - 1 - 2 * len(run.keep_gradients) if fold else not known
    data_parallel = run.layout.get("data_parallel")
    if data_parallel is not None:  # each bucket in each step, as soon as it is updated
        assert len(given) == run.steps * len(set(given))
        assert (len(set(given)) > 3) is (data_parallel.bucket_size == 10_000)
    return result


ZERO = dict(data_parallel=DataParallelConfig(sharding="optimizer"))
STAGED = dict(data_parallel=DataParallelConfig(sharding="optimizer", bucket_size=10_000))
BF16 = dict(precision="bf16-mixed")
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any], bool]] = {
    "one_fp32": (1, {}, {}, True),
    "one_bf16": (1, {}, BF16, True),
    "one_bf16_read": (1, {}, BF16, False),
    "dp2_bf16_windows": (
        2,
        {},
        BF16 | dict(accumulate_grad_batches=2, val_check_interval=1.0),
        True,
    ),
    "zero_dp2_bf16": (2, ZERO, BF16, True),
    "zero_dp2_bf16_stages": (2, STAGED, BF16, True),
    "zero_dp2_fp32_read": (2, ZERO, {}, False),
    "pp2_bf16": (2, dict(pipeline_parallel_size=2, micro_batch_size=2), BF16, True),
}


@pytest.mark.parametrize("case", CASES)
def test_training_is_the_same(case: str) -> None:
    world_size, layout, trainer, fold = CASES[case]
    run = Run(layout=layout, trainer=trainer, steps=5, keep_gradients=(1,))
    wanted = run_ranks_fresh(train, world_size, run)
    found = run_ranks_fresh(train_with_pass, world_size, run, fold)
    dtype = torch.bfloat16 if trainer.get("precision") else torch.float32
    assert_same_training(found, _as_one(wanted), dtype)
    assert found[0]["norms"][:2] == pytest.approx(wanted[0]["norms"][:2], rel=1e-6)  # rate 0 before


def _as_one(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    one = dict(ranks[0])
    for key in ("initial", "final"):
        one[key] = _whole([rank[key] for rank in ranks])
    one["masters"] = tuple(_whole([rank["masters"][i] for rank in ranks]) for i in (0, 1))
    one["gradients"] = {
        step: _whole([rank["gradients"][step] for rank in ranks]) for step in one["gradients"]
    }
    return one


def _whole(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        name: (tuple(t.shape), (0,) * t.dim(), tuple(t.shape), t)
        for name, t in assemble(parts).items()
    }


def test_experts_are_stepped_alike() -> None:
    moe = MoEConfig(num_experts=4, router_topk=2, ffn_hidden_size=32, aux_loss_coeff=0.01)
    run = Run(config=tiny_config(moe=moe), steps=3, keep_gradients=(1,))
    wanted = run_ranks_fresh(train, 1, run)
    found = run_ranks_fresh(train_with_pass, 1, run, True)
    assert_same_training(found, _as_one(wanted))


def masked_second_step(run: Run, index: int) -> dict[str, Tensor]:
    batch = layout_runs.global_batch(Run(), index)
    if index == 1:
        batch["loss_mask"].zero_()
    return batch


def test_window_without_tokens_changes_nothing() -> None:
    options = BF16 | dict(limit_val_batches=0, num_sanity_val_steps=0)
    run = Run(steps=3, keep_gradients=(), make_batch=masked_second_step, trainer=options)
    wanted = run_ranks_fresh(train, 1, run)
    found = run_ranks_fresh(train_with_pass, 1, run, True)
    assert_same_training(found, wanted[0], torch.bfloat16)
    assert found[0]["norms"][1] == 0.0


def step_of_few(rank: int, world_size: int) -> tuple[int, list[bool], list[float]]:
    """Elements of this rank, whether gathers began within the step, and what was updated."""
    use_pass()
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    named = {"a": Parameter(torch.ones(5)), "b": Parameter(torch.ones(2, 3))}
    table, mesh = table_of(named), ParallelMesh.build(device=torch.device("cpu"))
    buckets = GradientBuckets(
        named, table, mesh, sequence_parallel=False, sharded=True, bucket_size=1
    )
    held = shards.ParameterShards(buckets)
    optimizer = torch.optim.AdamW(list(named.values()), lr=0.1)
    distributed = DistributedOptimizer([optimizer], held, named)
    step = adam_pass.AdamPass(optimizer, held.copies, held.stages)
    buckets.reset()
    sum(p.sum() for p in named.values()).backward()  # type: ignore[union-attr]
    buckets.finish(1.0)
    distributed.attach_gradients()
    one = torch.ones(())
    assert step.take(one, one, keep=False)
    optimizer.step()
    given = [made.is_given for made in held._made]
    distributed.finish_step(0, wait=True, rounded=True)
    values = [value for p in named.values() for value in p.flatten().tolist()]
    return sum(part.numel() for part in held.parts().values()), given, values


def test_ranks_without_elements_gather_when_others_do() -> None:
    """In the same order on the data axis and on others, whatever a rank has to update."""
    elements, given, values = zip(*run_ranks_fresh(step_of_few, 3), strict=True)
    assert elements == (11, 0, 0)
    assert given == ([True, True],) * 3
    assert values[0] == values[1] == values[2]
    assert max(values[0]) < 0.95


class Clamping(Recorder):
    """Its optimizer has a hook that changes masters after each step, which the model must see."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        def clamp(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            with torch.no_grad():
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.clamp_(-0.03, 0.03)

        super().on_train_start(trainer, module)
        trainer.optimizers[0].register_step_post_hook(clamp)


def train_clamping(rank: int, world_size: int, run: Run, with_pass: bool) -> dict[str, Any]:
    if with_pass:
        use_pass()
    layout_runs.Recorder = Clamping
    return train(rank, world_size, run)


@pytest.mark.parametrize("layout", [{}, ZERO], ids=["masters", "zero"])
def test_hooks_after_the_step_have_the_last_word(layout: dict[str, Any]) -> None:
    run = Run(layout=layout, trainer=BF16, steps=3, keep_gradients=())
    wanted = run_ranks_fresh(train_clamping, 1, run, False)
    found = run_ranks_fresh(train_clamping, 1, run, True)
    assert_same_training(found, wanted[0], torch.bfloat16)
    weights = _whole([found[0]["final"]])
    assert max(float(entry[-1].abs().max()) for entry in weights.values()) < 0.0301
