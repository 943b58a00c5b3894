"""All-to-all context attention on one GPU, whose only rank exchanges heads with itself: numbers
against one call of torch's attention, no copy on the way, in compiled layers too.

pytest -m gpu tests/gpu/test_context_exchange_cuda.py -rP
"""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megatron_lightning.parallel.axes import MeshAxis, urgent_options
from megatron_lightning.parallel.context.exchange import announced, exchanged_attention
from tests.harness import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LENGTH, HEADS, GROUPS, SIZE = 4096, 8, 4, 64


def alone() -> MeshAxis:
    """An axis of this process, with an NCCL group as attention's axes have it."""
    torch.cuda.set_device(0)
    timeout = timedelta(seconds=60)
    group: Any = dist.new_group([0], timeout=timeout, pg_options=urgent_options(timeout))
    assert group._get_backend(torch.device("cuda")).options.is_high_priority_stream
    return MeshAxis(name="cp", group=group)


def tensors(batch: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(HEADS, SIZE), (GROUPS, SIZE), (GROUPS, SIZE)]
    made = [torch.randn(LENGTH, batch, *shape, device="cuda").bfloat16() for shape in shapes]
    return [x.requires_grad_() for x in made]


def errors(rank: int, world_size: int, groups: int, batch: int, compiled: bool) -> Any:
    """Relative errors of output and gradients, and the copies of more than a kernel's numbers."""
    ranks = announced(alone())
    own, grad = tensors(batch), torch.randn(LENGTH, batch, HEADS * SIZE, device="cuda").bfloat16()
    whole = [x.detach().clone().requires_grad_() for x in own]
    query, key, value = (x.permute(1, 2, 0, 3) for x in whole)
    want = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    want.permute(2, 0, 1, 3).flatten(2).backward(grad)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return exchanged_attention(query, key, value, ranks, groups, SIZE**-0.5, 0)

    run = torch.compile(attention, fullgraph=True) if compiled else attention
    for _ in range(2):
        for x in own:
            x.grad = None
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            output = run(*own)
            output.backward(grad)
            torch.cuda.synchronize()
    kernels = [event.name for event in profiler.events() or () if "CUDA" in str(event.device_type)]
    pairs: list[Any] = [(output, want.permute(2, 0, 1, 3).flatten(2))]
    pairs += [(x.grad, y.grad) for x, y in zip(own, whole, strict=True)]
    found = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs]
    return found, kernels


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("groups", "batch"), [(1, 1), (2, 1), (4, 2)])
def test_as_one_call_of_attention(groups: int, batch: int, compiled: bool) -> None:
    [(found, kernels)] = run_ranks(errors, 1, groups, batch, compiled, backend="nccl", timeout=200)
    print(groups, batch, compiled, found)
    print(*sorted({f"{kernels.count(name)} x {name[:110]}" for name in kernels}), sep="\n")
    assert max(found) < 1e-2
