"""Adam's step in one pass against torch's optimizers: the kernel in triton's interpreter, or on a
GPU.
"""

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from megatron_lightning.optim import adam_pass
from megatron_lightning.optim.adam_pass import AdamPass, all_fit, can_pass
from tests.interpreter import run_interpreted

SHAPES = [(5000,), (3, 7), (64, 65), ()]


def check(device: str, kind: type[torch.optim.Adam], decay: float, *, rounds_alike: bool) -> None:
    """Four steps with a factor, a parameter without gradient, and a step that is called off."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    own, oracle = ([Parameter(v.to(device, copy=True)) for v in values] for _ in range(2))
    fused = device == "cuda"
    ours, theirs = (
        kind(
            [{"params": p[:2], "weight_decay": decay}, {"params": p[2:], "weight_decay": 0.0}],
            lr=1e-2,
            betas=(0.9, 0.999),
            fused=fused,
        )
        for p in (own, oracle)
    )
    copies = {p: torch.zeros_like(p, dtype=torch.bfloat16) for p in own[:3]}
    step = AdamPass(ours, lambda: copies)
    seen: list[bool] = []
    ours.register_step_post_hook(lambda *_: seen.append(own[0].grad is not None))
    for number in range(4):
        ours.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = 1e-2 / (number + 1)
        called_off = number == 2
        for p, q in zip(own, oracle, strict=True):
            grad = torch.randn(p.shape, generator=generator).to(device)
            p.grad, q.grad = grad, grad * 0.5
        own[1].grad = oracle[1].grad = None
        before = own[0].detach().clone()
        factor = torch.tensor(0.5, device=device)
        active = torch.tensor(0.0 if called_off else 1.0, device=device)
        assert step.take(factor, active, keep=number == 1)
        ours.step()
        assert torch.equal(before, own[0]) is called_off
        if not called_off:
            theirs.step()
        for p, q in zip(own, oracle, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
        for p, copy in copies.items():
            if p.grad is None and p is own[1]:
                assert not copy.any()
            elif rounds_alike:
                assert torch.equal(copy, p.bfloat16())
            else:  # the interpreter cuts off
                torch.testing.assert_close(copy.float(), p.detach(), rtol=8e-3, atol=0.0)
    assert seen == [False, True, False, False]
    for p, q in zip(own, oracle, strict=True):
        assert ours.state[p].keys() == theirs.state[q].keys()
        for key, value in ours.state[p].items():
            wanted = theirs.state[q][key]
            assert value.device == wanted.device
            torch.testing.assert_close(value, wanted, rtol=1e-6, atol=1e-7)
    step.remove()
    own[0].grad = torch.ones_like(own[0])
    before = own[0].detach().clone()
    ours.step()
    assert not torch.equal(before, own[0])


def check_stages(device: str) -> None:
    """Two groups in stages give what they give at once, and a stage's end finds its own done."""
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    grads = [torch.randn(shape, generator=generator) for shape in SHAPES]
    results = []
    for stages in ((), ((2,), (1, 3), (0,)), ((), (3,))):
        own = [Parameter(value.to(device, copy=True)) for value in values]
        copies = {p: torch.zeros_like(p, dtype=torch.bfloat16) for p in own}
        optimizer = torch.optim.AdamW(
            [{"params": own[:2]}, {"params": own[2:], "weight_decay": 0.0}],
            lr=1e-2,
            fused=device == "cuda",
        )
        done: list[list[int]] = []

        def stage(members: tuple[int, ...], state: Any = (own, copies, done)) -> adam_pass.Stage:
            own, copies, done = state
            return [own[i] for i in members], lambda: done.append(
                [i for i, parameter in enumerate(own) if bool(copies[parameter].any())]
            )

        step = AdamPass(optimizer, lambda c=copies: c, lambda s=stages, f=stage: [*map(f, s)])
        for _ in range(2):
            for parameter, grad in zip(own, grads, strict=True):
                parameter.grad = grad.to(device, copy=True)
            one = torch.ones((), device=device)
            assert step.is_last
            assert step.take(one, one, keep=False)
            optimizer.step()
        first = [sorted(sum(stages[: i + 1], ())) for i in range(len(stages))]
        assert done == first + [[0, 1, 2, 3]] * len(stages)
        results.append([*own, *copies.values()])
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


def test_stages_end_where_there_is_nothing_to_update() -> None:
    parameter = Parameter(torch.ones(4))  # without a gradient
    optimizer = torch.optim.AdamW([parameter])
    ended: list[int] = []
    stages = [([parameter], lambda: ended.append(0)), ([], lambda: ended.append(1))]
    step = AdamPass(optimizer, dict, lambda: stages)
    one = torch.ones(())
    assert step.take(one, one, keep=False)
    optimizer.step()
    assert ended == [0, 1]
    assert torch.equal(parameter, torch.ones(4))
    optimizer.step()  # torch's own
    assert ended == [0, 1]


@pytest.mark.gpu
@pytest.mark.skipif("not torch.cuda.is_available()", reason="needs a CUDA device")
def test_stages_on_cuda() -> None:
    check_stages("cuda")


@pytest.mark.gpu
@pytest.mark.skipif("not torch.cuda.is_available()", reason="needs a CUDA device")
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_step_on_cuda(kind: type[torch.optim.Adam]) -> None:
    check("cuda", kind, 0.1, rounds_alike=True)


INTERPRETED = """
import torch
from megatron_lightning.optim import adam_pass
from tests.unit.optim.test_adam_pass import check, check_stages

adam_pass.can_run = lambda tensor: True
check("cpu", torch.optim.AdamW, 0.1, rounds_alike=False)
check("cpu", torch.optim.Adam, 0.05, rounds_alike=False)
check_stages("cpu")
"""


def test_step_in_the_interpreter() -> None:
    run_interpreted(INTERPRETED)


def test_which_optimizers_the_pass_stands_in_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def parameters() -> list[Parameter]:
        return [Parameter(torch.ones(4))]

    assert can_pass(torch.optim.AdamW(parameters(), fused=True))
    assert can_pass(torch.optim.Adam(parameters(), fused=True))
    assert not can_pass(torch.optim.AdamW(parameters(), foreach=True))
    assert not can_pass(torch.optim.AdamW(parameters(), fused=True, amsgrad=True))
    assert not can_pass(torch.optim.AdamW(parameters(), fused=True, maximize=True))
    assert not can_pass(torch.optim.AdamW(parameters(), fused=True, lr=torch.tensor(0.1)))
    assert not can_pass(torch.optim.SGD(parameters()))

    class Own(torch.optim.AdamW):
        pass

    assert not can_pass(Own(parameters(), fused=True))
    optimizer = torch.optim.AdamW(parameters(), fused=True)
    assert not all_fit(optimizer, dict)  # there is no kernel here
    monkeypatch.setattr(adam_pass, "can_run", lambda tensor: True)
    assert all_fit(optimizer, dict)
    strided = torch.ones(8, dtype=torch.bfloat16)[::2]
    assert not all_fit(
        optimizer, lambda: dict.fromkeys(optimizer.param_groups[0]["params"], strided)
    )
    assert not all_fit(torch.optim.AdamW([Parameter(torch.ones(4).double())], fused=True), dict)
