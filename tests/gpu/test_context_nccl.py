"""Context parallelism on CUDA: the flash kernel against the oracle, and every form over NCCL
against one GPU, up to 65,536 tokens.
"""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.config import ContextConfig
from megatron_lightning.layers import Dropout, FusedAttention
from megatron_lightning.parallel.context.apply import apply_context_parallel
from megatron_lightning.parallel.context.cudnn_attention import CudnnKernel
from megatron_lightning.parallel.context.dense import MathKernel
from megatron_lightning.parallel.context.flash import FlashKernel
from megatron_lightning.parallel.context.kernels import choose_kernel
from megatron_lightning.parallel.context.plan import CAUSAL, FULL, Band, Span
from megatron_lightning.parallel.context.slices import local_index
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.peers.exchange import release_exchanges
from megatron_lightning.parallel.streams import Layout
from tests.harness import run_ranks, run_ranks_fresh
from tests.layout_runs import SEQUENCE, Run, assert_same_training, tiny_config, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two CUDA devices"),
]

DTYPES = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16}
FORMS: dict[str, ContextConfig] = {
    "ring": ContextConfig(form="ring"),
    "all_gather": ContextConfig(form="all_gather"),
    "all_to_all": ContextConfig(form="all_to_all"),
    "peer_memory": ContextConfig(form="all_to_all", peer_memory=True),
}
# GPUs wait for each other's signals there, and what else runs on them waits too.
NAMES = [
    pytest.param(form, marks=pytest.mark.alone) if form == "peer_memory" else form for form in FORMS
]
LONG = 65_536


@pytest.mark.parametrize("v_dim", [64, 32, 96])
@pytest.mark.parametrize("groups", [8, 2])
@pytest.mark.parametrize(
    ("lengths", "band"),
    [
        ([(256, 256)], CAUSAL),
        ([(128, 384), (256, 256), (40, 90)], CAUSAL),
        ([(256, 256), (256, 256)], CAUSAL),
        ([(128, 384), (128, 384)], FULL),
        ([(128, 384), (64, 10)], FULL),
        ([(128, 384), (64, 70)], Band(31, 0)),
        ([(128, 200)], Band(30, None)),
    ],
)
def test_fused_kernel(lengths: list[tuple[int, int]], band: Band, groups: int, v_dim: int) -> None:
    """Inside a rank, since a process that has touched CUDA can't be forked."""
    [errors] = run_ranks(_fused_errors, 1, lengths, band, groups, v_dim, backend="nccl")
    assert max(errors) < 1e-2


def _fused_errors(
    rank: int, size: int, lengths: list[tuple[int, int]], band: Band, groups: int, v_dim: int
) -> list[float]:
    queries, keys = _spans([q for q, _ in lengths]), _spans([k for _, k in lengths])
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        x = torch.randn(*shape, device="cuda", generator=generator)
        return x.to(torch.bfloat16)

    query, key = normal(queries[-1][1], 8, 64), normal(keys[-1][1], groups, 64)
    value, grad = normal(keys[-1][1], groups, v_dim), normal(queries[-1][1], 8, v_dim)
    kernel = choose_kernel(query, value)
    assert isinstance(kernel, CudnnKernel if v_dim == 64 else FlashKernel)
    options = dict(queries=queries, keys=keys, scale=0.125, band=band)
    wide = [x.float() for x in (query, key, value)]
    expected = MathKernel().forward(*wide, **options)
    gradients = MathKernel().backward(grad.float(), *wide, *expected, **options)
    output, log_sum = kernel.forward(query, key, value, **options)
    found = kernel.backward(grad, query, key, value, output, log_sum, **options)
    errors = []
    for got, want in zip((output, log_sum, *found), (*expected, *gradients), strict=True):
        assert got.shape == want.shape
        errors.append(float((got.float() - want).norm() / want.norm()))
    return errors


def _spans(lengths: list[int]) -> tuple[Span, ...]:
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return tuple((end - length, end) for end, length in zip(ends, lengths, strict=True))


def packed_batch(run: Run, index: int) -> dict[str, Tensor]:
    """Documents of many lengths, packed otherwise in every sample."""
    generator = torch.Generator().manual_seed(index)
    shape = (run.global_batch_size, SEQUENCE + 1)
    tokens = torch.randint(0, run.config.vocab_size, shape, generator=generator)
    ends = [[4, 12, 16, 16], [1, 2, 9, 16], [16, 16, 16, 16], [7, 8, 15, 16]]
    rows = [[0, *ends[(index + i) % 4]] for i in range(run.global_batch_size)]
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": torch.ones(run.global_batch_size, SEQUENCE),
        "cu_seqlens": torch.tensor(rows, dtype=torch.int32),
    }


def on_gpu(layout: dict[str, Any], precision: str, **changes: Any) -> Run:
    config = tiny_config(qk_layernorm=True, window_size=5, window_pattern="SF")
    trainer = dict(accelerator="gpu", precision=precision)
    return Run(config=config, layout=layout, trainer=trainer, **changes)


@functools.cache
def single(precision: str, packed: bool) -> dict[str, Any]:
    changes = dict(make_batch=packed_batch) if packed else {}
    return run_ranks_fresh(train, 1, on_gpu({}, precision, **changes))[0]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("form", NAMES)
def test_training_equals_one_gpu(form: str, precision: str, packed: bool) -> None:
    changes = dict(make_batch=packed_batch) if packed else {}
    layout = dict(context_parallel_size=2, context=FORMS[form])
    ranks = run_ranks_fresh(train, 2, on_gpu(layout, precision, **changes), timeout=200)
    assert_same_training(ranks, single(precision, packed), DTYPES[precision])


def long_attention(rank: int, world_size: int, form: str) -> dict[str, float]:
    """Errors of a core's output and gradients over 65,536 tokens against one GPU, and the time of
    a pass.
    """
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    mesh = ParallelMesh.build(device=device, context=world_size)
    generator = torch.Generator().manual_seed(5)
    query, key, value, grad = (
        torch.randn(LONG, 1, heads, 128, generator=generator, dtype=torch.bfloat16).to(device)
        for heads in (8, 2, 2, 8)
    )
    whole = [x.clone().requires_grad_() for x in (query, key, value)]
    expected = F.scaled_dot_product_attention(
        *(x.permute(1, 2, 0, 3) for x in whole), is_causal=True, enable_gqa=True
    ).permute(2, 0, 1, 3)
    expected.backward(grad)
    core = FusedAttention(scale=128**-0.5, dropout=Dropout(0.0, Layout.HEADS))
    holder = torch.nn.ModuleDict({"core_attention": core})
    apply_context_parallel(holder, mesh, FORMS[form])
    contiguous = FORMS[form].contiguous
    rows = local_index((LONG,), world_size, rank, contiguous=contiguous).to(device)
    local = [x[rows].requires_grad_() for x in (query, key, value)]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):  # the second pass is measured
        for x in local:
            x.grad = None
        torch.distributed.barrier()
        start.record()
        output = holder["core_attention"](*local)
        output.backward(grad[rows].flatten(2))
        end.record()
    torch.cuda.synchronize()
    errors = {"milliseconds": start.elapsed_time(end)}
    pairs = [("output", output, expected.flatten(2))]
    pairs += [
        (name, x.grad, y.grad)
        for name, x, y in zip(("query", "key", "value"), local, whole, strict=True)
    ]
    for name, got, want in pairs:
        want = want.detach()[rows].float()
        errors[name] = float((got.detach().float() - want).norm() / want.norm())
    release_exchanges()  # the process goes on
    return errors


@pytest.mark.parametrize("form", NAMES)
def test_attention_over_65536_tokens(form: str) -> None:
    for rank, errors in enumerate(run_ranks(long_attention, 2, form, backend="nccl", timeout=200)):
        print(f"{form}, rank {rank}: {errors}")
        errors.pop("milliseconds")
        assert max(errors.values()) < 1e-2


def long_batch(run: Run, index: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(0, run.config.vocab_size, (1, LONG + 1), generator=generator)
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": torch.ones(1, LONG),
    }


@pytest.mark.parametrize("form", NAMES)
def test_training_on_65536_tokens(form: str) -> None:
    run = long_run(dict(context_parallel_size=2, context=FORMS[form]))
    ranks = run_ranks_fresh(train, 2, run, timeout=200)
    assert_same_training(ranks, long_single(), torch.bfloat16)


def long_run(layout: dict[str, Any]) -> Run:
    config = tiny_config(
        num_layers=2, hidden_size=512, ffn_hidden_size=1024, num_attention_heads=4, vocab_size=1024
    )
    return Run(
        config=config,
        layout=layout,
        trainer=dict(accelerator="gpu", precision="bf16-mixed"),
        make_batch=long_batch,
        global_batch_size=1,
        steps=2,
        keep_gradients=(0, 1),
    )


@functools.cache
def long_single() -> dict[str, Any]:
    return run_ranks_fresh(train, 1, long_run({}), timeout=200)[0]
