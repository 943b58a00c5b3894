"""Updated weights gathered in eight bits: the same training as when they are gathered whole."""

from typing import Any

import pytest
import torch

from megatron_lightning.config import DataParallelConfig, QuantizationConfig
from megatron_lightning.optim.gather_fp8 import FP8Gather
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.precision.formats import E4M3_MAX, power_of_two_scale, round_fp8
from tests.harness import run_ranks, run_ranks_fresh
from tests.layout_runs import Run, tiny_config, train


def gathered(rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """A bucket of 96 values of which ranks hold 48 each; 10 to 60 and 70 to 90 are weights."""
    mesh = ParallelMesh.build(device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(96, generator=generator).bfloat16()
    whole[70:90] *= 1e-6
    data = torch.full_like(whole, torch.nan)
    own = slice(rank * 48, rank * 48 + 48)
    data[own] = whole[own]
    gather = FP8Gather(data, mesh.dp, [(10, 60), (70, 90)])
    gather.begin().wait()
    gather.finish()
    for start, stop in ((0, 10), (10, 48), (48, 60), (60, 70), (70, 90), (90, 96)):
        assert torch.equal(gather.given(whole[start:stop], start), data[start:stop])
    return data, whole, gather.bytes


def test_weights_are_rounded_by_their_own_scale_and_others_are_not() -> None:
    for data, whole, sent in run_ranks(gathered, 2):
        want = whole.clone()
        for span in (slice(10, 60), slice(70, 90)):
            scale = power_of_two_scale(whole[span].abs().max(), E4M3_MAX)
            want[span] = (round_fp8(whole[span].float() * scale, "e4m3") / scale).bfloat16()
        assert torch.equal(data, want)
        assert sent < 96


def same(got: Any, want: Any) -> bool:
    if isinstance(want, torch.Tensor):
        return torch.equal(got, want)
    if isinstance(want, (list, tuple)):
        return len(got) == len(want) and all(map(same, got, want))
    return bool(got == want)


LAYOUTS: dict[str, dict[str, Any]] = {
    "overlapped": {},
    "tensor": {},
    "at_once": {"overlap_param_gather": False},
    "host": {"offload_optimizer": True},
}


@pytest.mark.parametrize(
    "layout",
    [
        "overlapped",
        pytest.param("tensor", marks=pytest.mark.slow),
        pytest.param("at_once", marks=pytest.mark.slow),
        pytest.param("host", marks=pytest.mark.slow),
    ],
)
def test_training_is_bitwise_the_same(layout: str) -> None:
    results = []
    size = 2 if layout == "tensor" else 1
    for eight in (True, False):
        run = Run(
            config=tiny_config(),
            layout={
                "quantization": QuantizationConfig(
                    recipe="fp8_tensorwise", simulate=True, fp8_gather=eight
                ),
                "tensor_parallel_size": size,
                "data_parallel": DataParallelConfig(sharding="optimizer", **LAYOUTS[layout]),
            },
            trainer=dict(precision="bf16-mixed"),
            steps=4,
        )
        results.append(run_ranks_fresh(train, 2 * size, run))
    for got, want in zip(*results, strict=True):
        assert got["losses"] == want["losses"]
        assert got["norms"] == want["norms"]
        changed = 0
        for name, parts in want["masters"][1].items():
            assert same(got["masters"][1][name], parts), name
        for name, parts in want["final"].items():
            changed += not same(got["final"][name], parts)
        assert changed, "no weight was gathered in eight bits"
