import math

import pytest
import torch
from torch import nn

from megatron_lightning.config.plan import ParameterInfo, replicated
from megatron_lightning.optim import clip_by_norm, clip_by_value, global_grad_norm
from megatron_lightning.optim.clip import tensor_norms
from megatron_lightning.parallel.mesh import ParallelMesh


def _grads(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (3, 4), "b": (5,), "c": (), "empty": (0, 3)}
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()}


def _table(grads: dict[str, torch.Tensor]) -> dict[str, ParameterInfo]:
    return {
        name: ParameterInfo(
            name=name,
            global_shape=tuple(g.shape),
            offsets=(0,) * g.dim(),
            sizes=tuple(g.shape),
            split=replicated(),
        )
        for name, g in grads.items()
    }


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, math.inf])
def test_norm_in_one_process_equals_torch(norm_type: float) -> None:
    grads = _grads()
    got = global_grad_norm(grads, _table(grads), ParallelMesh.single(), norm_type=norm_type)
    wanted = torch.nn.utils.get_total_norm(
        [g for g in grads.values() if g.numel()], norm_type=norm_type
    )
    assert got.shape == ()
    torch.testing.assert_close(got.float(), wanted)


def test_low_precision_gradients_are_summed_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    grads = {"a": torch.randn(64, 512, generator=generator).bfloat16()}
    got = global_grad_norm(grads, _table(grads), ParallelMesh.single())
    assert got.item() == pytest.approx(grads["a"].double().norm().item(), rel=1e-6)


def test_large_tensors_lose_no_digits_on_the_cpu() -> None:
    grads = {"a": torch.randn(3, 1_000_000, generator=torch.Generator().manual_seed(0)).t()}
    got = global_grad_norm(grads, _table(grads), ParallelMesh.single())
    assert got.item() == pytest.approx(grads["a"].double().norm().item(), rel=1e-7)


def check_known(device: str) -> None:
    """Norms taken a few tensors at a time are those of one pass, bit by bit."""
    generator = torch.Generator().manual_seed(3)
    sizes = [5, 70_000, 0, 1_000_003, 4096, 33]
    grads = {f"p{i}": torch.randn(n, generator=generator).to(device) for i, n in enumerate(sizes)}
    mesh = ParallelMesh.single(device)
    wanted = global_grad_norm(grads, _table(grads), mesh)
    known: dict[str, list[torch.Tensor]] = {}
    for names in (("p4", "p3"), ("p2", "p0"), ("p5",)):
        known |= zip(names, tensor_norms([grads[name] for name in names]), strict=True)
        assert torch.equal(global_grad_norm(grads, _table(grads), mesh, known=known), wanted)


def test_norms_taken_before() -> None:
    check_known("cpu")


@pytest.mark.gpu
@pytest.mark.skipif("not torch.cuda.is_available()", reason="needs a CUDA device")
def test_norms_taken_before_on_a_gpu() -> None:
    check_known("cuda")


@pytest.mark.gpu
def test_large_tensors_lose_no_digits_on_a_gpu() -> None:
    grads = {"a": torch.full((10_000_000,), 0.1, device="cuda")}
    got = global_grad_norm(grads, _table(grads), ParallelMesh.single("cuda"))
    assert got.item() == pytest.approx(grads["a"].double().norm().item(), rel=1e-6)
    clip_by_norm(grads.values(), got, 1.0)
    assert grads["a"].double().norm().item() == pytest.approx(1.0, rel=1e-5)


def test_no_gradients_have_norm_zero() -> None:
    assert global_grad_norm({}, {}, ParallelMesh.single()).item() == 0.0


def test_bad_norm_type() -> None:
    with pytest.raises(ValueError, match="norm_type=0"):
        global_grad_norm({}, {}, ParallelMesh.single(), norm_type=0)


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_clipping_by_norm_equals_torch(max_norm: float) -> None:
    grads, parameters = _grads(), []
    for grad in _grads().values():
        parameters.append(nn.Parameter(torch.zeros_like(grad)))
        parameters[-1].grad = grad
    norm = global_grad_norm(grads, _table(grads), ParallelMesh.single())
    clip_by_norm(grads.values(), norm, max_norm)
    torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    for ours, parameter in zip(grads.values(), parameters, strict=True):
        torch.testing.assert_close(ours, parameter.grad)


def test_clipping_bfloat16_uses_an_exact_scale() -> None:
    grad = torch.full((8,), 3.0, dtype=torch.bfloat16)
    clip_by_norm([grad], torch.tensor(9.0, dtype=torch.float64), 2.7)
    assert torch.equal(grad, torch.full((8,), 3.0 * 0.3).bfloat16())


def test_clipping_by_value() -> None:
    grads = [torch.tensor([-3.0, 0.2, 3.0]), torch.tensor([0.5])]
    clip_by_value(grads, 0.4)
    assert torch.equal(grads[0], torch.tensor([-0.4, 0.2, 0.4]))
    assert torch.equal(grads[1], torch.tensor([0.4]))
    clip_by_value([], 1.0)
    clip_by_norm([], torch.tensor(1.0), 1.0)
