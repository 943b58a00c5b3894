"""Products of many tensors with a factor in memory."""

import pytest
import torch

from megatron_lightning.utils.gradients import scale_tensors_

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_scale_tensors(device: str, dtype: torch.dtype) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in ((5,), (3, 4), (0,), (1000,))]
    values[0][1], values[0][2] = torch.inf, torch.nan
    values = [value.to(device, dtype) for value in values]
    factor = torch.tensor(0.3, device=device, dtype=torch.promote_types(dtype, torch.float32))
    wanted = [(value * factor).to(dtype) for value in values]
    scale_tensors_(values, factor)
    for got, want in zip(values, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    scale_tensors_([], factor)
