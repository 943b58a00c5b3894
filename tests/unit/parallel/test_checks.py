"""The hash that replicas are compared by."""

import pytest
import torch

from megatron_lightning.config.plan import ParameterInfo, column, replicated
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.checks import check_replicas, replicated_tensors, tensor_hash


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_hash_sees_every_element_and_its_place(dtype: torch.dtype) -> None:
    x = torch.arange(100).to(dtype)
    hashes = {tensor_hash(x).item()}
    for i in range(100):
        changed = x.clone()
        changed[i] += 1
        hashes.add(tensor_hash(changed).item())
    swapped = x.clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    hashes |= {tensor_hash(swapped).item(), tensor_hash(x[:-1]).item()}
    assert len(hashes) == 103


def test_hash_of_equal_values() -> None:
    x = torch.randn(6, 4)
    assert tensor_hash(x) == tensor_hash(x.t().contiguous().t())
    assert tensor_hash(torch.tensor(0.0)) != tensor_hash(torch.tensor(-0.0))
    assert tensor_hash(torch.tensor(torch.nan)) == tensor_hash(torch.tensor(torch.nan))
    assert tensor_hash(torch.empty(0)) == 0


def test_one_rank_has_no_replicas() -> None:
    check_replicas({"a": torch.ones(3)}, MeshAxis(name="tp"))


def test_only_replicated_parameters_are_compared_over_the_tensor_axis() -> None:
    def info(name: str, split) -> ParameterInfo:
        return ParameterInfo(name=name, global_shape=(4,), offsets=(0,), sizes=(2,), split=split)

    table = {"a": info("a", column()), "b": info("b", replicated())}
    tensors = {"a": torch.ones(2), "b": torch.ones(4)}
    assert list(replicated_tensors(tensors, table)) == ["b"]
