"""Gradients of sixteen-bit runs against float32's on a GPU, where kernels are others than on the
CPU; see `tests/distributed/test_gradient_precision.py`. Kernels round to the nearest number (the
interpreter of Triton, in which they are tested elsewhere, truncates to bfloat16).
"""

import pytest
import torch
from torch import Tensor

from tests.distributed.test_gradient_precision import assert_noise, errors, gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize(("precision", "bits"), [("bf16-mixed", 8), ("16-mixed", 11)])
def test_sixteen_bits_err_to_both_sides(precision: str, bits: int) -> None:
    wanted = gradients("32-true", accelerator="gpu")
    found = gradients(precision, accelerator="gpu")
    for name, (length, along) in errors(found, wanted).items():
        print(f"{precision} {name:<60} {length:.1e} {along:+.1e}")
    assert_noise(found, wanted, bits)


def assert_nearest(found: Tensor, exact: Tensor) -> None:
    """All but the few whose exact value lies in the middle are the nearest number."""
    other = (found != exact.to(found.dtype)).double().mean()
    assert other < 0.01, float(other)
    error, exact = (found.double() - exact).flatten(), exact.flatten()
    assert abs(float(error.dot(exact) / exact.dot(exact))) < 2**-11


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_round_to_the_nearest(dtype: torch.dtype) -> None:
    from megatron_lightning.layers.kernels import cross_entropy, gated_silu

    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    inner, grad = normal(256, 2, 300).to(dtype), normal(256, 300).to(dtype)
    (gate, up), along = inner.double().unbind(1), grad.double()
    sigmoid = torch.sigmoid(gate)
    assert_nearest(gated_silu.forward(inner), gate * sigmoid * up)
    gate_grad, up_grad = gated_silu.backward(grad, inner).unbind(1)
    assert_nearest(gate_grad, along * up * sigmoid * (1 + gate * (1 - sigmoid)))
    assert_nearest(up_grad, along * gate * sigmoid)

    logits = (3 * normal(512, 256)).to(dtype)
    targets = torch.arange(512, device="cuda") % 256
    exact = torch.softmax(logits.double(), -1)
    exact[torch.arange(512, device="cuda"), targets] -= 1.0
    log_totals = torch.logsumexp(logits.float(), -1)
    ones = torch.ones(512, device="cuda")
    found = cross_entropy.row_gradients(
        logits, log_totals, targets, ones, ones, valid=256, spread=0.0
    )
    assert_nearest(found, exact)


def test_adam_rounds_copies_to_the_nearest() -> None:
    from megatron_lightning.optim.adam_pass import AdamPass

    master = torch.nn.Parameter(torch.randn(100_000, device="cuda"))
    copy = torch.empty_like(master, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW([master], lr=1e-3)
    made = AdamPass(optimizer, lambda: {master: copy})
    one = torch.ones((), device="cuda")
    master.grad = torch.randn_like(master)
    assert made.take(one, one, keep=False)
    optimizer.step()
    assert torch.equal(copy, master.detach().bfloat16())
