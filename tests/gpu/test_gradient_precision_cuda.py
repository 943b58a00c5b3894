"""Gradients of sixteen-bit runs against float32's on a GPU, where kernels are others than on the
CPU; see `tests/distributed/test_gradient_precision.py`.
"""

import pytest
import torch

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
