"""Context-parallel cores on their own: outputs and gradients of every form against one rank."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lightning.config import ContextConfig
from megatron_lightning.config.context import ContextForm
from megatron_lightning.layers import Dropout, FusedAttention, ReferenceAttention
from megatron_lightning.parallel.context import exchange as context_exchange
from megatron_lightning.parallel.context.all_to_all import HeadExchange
from megatron_lightning.parallel.context.apply import apply_context_parallel
from megatron_lightning.parallel.context.slices import local_index
from megatron_lightning.parallel.core_attention import CoreAttention
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.sequence import SequenceInfo
from megatron_lightning.parallel.streams import DropoutStreams, Layout
from tests.harness import RankError, run_ranks

LENGTH, BATCH, HEADS, SCALE = 32, 2, 8, 0.25
PACKED = SequenceInfo(((8, 16, 8), (32,)))
CORES = {"fused": FusedAttention, "reference": ReferenceAttention}


def made(kind: str, window: int, dropout: float = 0.0, cap: float = 0.0) -> CoreAttention:
    return CORES[kind](
        scale=SCALE, window_size=window, dropout=Dropout(dropout, Layout.HEADS), score_cap=cap
    ).train()


def tensors(groups: int, v_dim: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(HEADS, 16), (groups, 16), (groups, v_dim), (HEADS * v_dim,)]
    return [torch.randn(LENGTH, BATCH, *s, generator=generator).to(dtype) for s in shapes]


def build(size: int, form: ContextForm, inner: int = 2) -> tuple[ParallelMesh, ContextConfig]:
    config = ContextConfig(form=form, inner_size=inner)
    mesh = ParallelMesh.build(
        device=torch.device("cpu"), context=size, context_inner=config.inner_of(size)
    )
    return mesh, config


def swapped(core: CoreAttention, mesh: ParallelMesh, config: ContextConfig) -> CoreAttention:
    holder = torch.nn.ModuleDict({"core_attention": core})
    apply_context_parallel(holder, mesh, config)
    context = holder["core_attention"]
    assert isinstance(context, CoreAttention)
    return context


def own_rows(
    size: int, rank: int, sequence: SequenceInfo | None, *, contiguous: bool = False
) -> Tensor:
    """(B, S / size) tokens of each sample that a rank holds."""
    lengths = ((LENGTH,),) * BATCH if sequence is None or contiguous else sequence.lengths
    return torch.stack([local_index(row, size, rank, contiguous=contiguous) for row in lengths])


def part(x: Tensor, rows: Tensor) -> Tensor:
    return torch.stack([x[row, sample] for sample, row in enumerate(rows)], dim=1)


def compare(
    rank: int,
    size: int,
    form: ContextForm,
    kind: str,
    groups: int,
    v_dim: int,
    window: int,
    sequence: SequenceInfo | None,
    dtype: torch.dtype,
    head_groups: int = 1,
) -> float:
    """Largest relative error of output and gradients on this rank."""
    query, key, value, grad = tensors(groups, v_dim, dtype)
    whole = [x.to(torch.float32, copy=True).requires_grad_() for x in (query, key, value)]
    expected = made("reference", window)(*whole, sequence)
    expected.backward(grad.float())
    mesh, config = build(size, form)
    config = dataclasses.replace(config, head_groups=head_groups)
    core = swapped(made(kind, window), mesh, config)
    rows = own_rows(size, rank, sequence, contiguous=config.contiguous)
    local = [part(x, rows).requires_grad_() for x in (query, key, value)]
    output = core(*local, sequence)
    output.backward(part(grad, rows))
    pairs = [(output, expected), *((x.grad, y.grad) for x, y in zip(local, whole, strict=True))]
    errors = []
    for got, want in pairs:
        want = part(want.detach(), rows)
        errors.append(float((got.detach().float() - want).norm() / want.norm()))
    return max(errors)


CASES = list(
    itertools.product(
        [(2, "ring"), (4, "ring"), (4, "all_gather"), (4, "all_to_all"), (4, "hierarchical")],
        [0, 11],
        [None, PACKED],
    )
)


@pytest.mark.parametrize(("layout", "window", "sequence"), CASES)
def test_forms(layout: tuple[int, Any], window: int, sequence: SequenceInfo | None) -> None:
    size, form = layout
    errors = run_ranks(compare, size, form, "fused", 4, 16, window, sequence, torch.float32)
    assert max(errors) < 5e-6


def compare_variants(
    rank: int, size: int, form: ContextForm, kind: str, cap: float, sequence: SequenceInfo | None
) -> tuple[float, Tensor, Tensor]:
    """Largest relative error on this rank with sinks, its part of their gradient, and the whole."""
    query, key, value, grad = tensors(4, 16, torch.float32)
    sinks = torch.linspace(-2, 2, HEADS)
    whole = [x.clone().requires_grad_() for x in (query, key, value, sinks)]
    expected = made("reference", 11, cap=cap)(*whole[:3], sequence, sinks=whole[3])
    expected.backward(grad)
    mesh, config = build(size, form)
    core = swapped(made(kind, 11, cap=cap), mesh, config)
    rows = own_rows(size, rank, sequence, contiguous=config.contiguous)
    local = [part(x, rows).requires_grad_() for x in (query, key, value)]
    own = sinks.clone().requires_grad_()
    output = core(*local, sequence, sinks=own)
    output.backward(part(grad, rows))
    pairs = [(output, expected), *((x.grad, y.grad) for x, y in zip(local, whole, strict=False))]
    errors = []
    for got, want in pairs:
        want = part(want.detach(), rows)
        errors.append(float((got.detach() - want).norm() / want.norm()))
    return max(errors), own.grad, whole[3].grad


@pytest.mark.parametrize("sequence", [None, PACKED], ids=["whole", "packed"])
@pytest.mark.parametrize(
    ("form", "kind", "cap"),
    [
        ("ring", "fused", 0.0),
        ("ring", "fused", 2.0),
        ("all_gather", "fused", 0.0),
        ("all_gather", "reference", 2.0),
        ("all_to_all", "fused", 2.0),
        ("hierarchical", "fused", 0.0),
    ],
)
def test_sinks_and_capped_scores(
    form: ContextForm, kind: str, cap: float, sequence: SequenceInfo | None
) -> None:
    """The ranks' gradients of the sinks add up to that of one rank."""
    found = run_ranks(compare_variants, 4, form, kind, cap, sequence)
    assert max(error for error, _, _ in found) < 5e-6
    total = torch.stack([own for _, own, _ in found]).sum(0)
    torch.testing.assert_close(total, found[0][2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["ring", "all_gather", "all_to_all", "hierarchical"])
@pytest.mark.parametrize("v_dim", [8, 24])
def test_value_heads_of_another_size(form: Any, v_dim: int) -> None:
    """As in multi-head latent attention."""
    errors = run_ranks(compare, 4, form, "fused", 4, v_dim, 0, None, torch.float32)
    assert max(errors) < 5e-6


@pytest.mark.parametrize("form", ["ring", "all_gather", "all_to_all", "hierarchical"])
def test_written_out_cores(form: Any) -> None:
    errors = run_ranks(compare, 4, form, "reference", 4, 16, 11, PACKED, torch.float32)
    assert max(errors) < 5e-6


@pytest.mark.parametrize("form", ["ring", "all_gather", "all_to_all", "hierarchical"])
def test_bfloat16(form: Any) -> None:
    errors = run_ranks(compare, 4, form, "fused", 4, 16, 0, None, torch.bfloat16)
    assert max(errors) < 2e-2


@pytest.mark.parametrize(
    ("size", "window", "sequence"), [(2, 0, None), (2, 11, PACKED), (4, 0, PACKED)]
)
@pytest.mark.parametrize(
    ("v_dim", "dtype", "groups"),
    [(16, torch.float32, 4), (6, torch.float32, 2), (16, torch.bfloat16, 4)],
)
def test_heads_in_groups(
    size: int,
    window: int,
    sequence: SequenceInfo | None,
    v_dim: int,
    dtype: torch.dtype,
    groups: int,
) -> None:
    """Up to four groups on two ranks, two on four."""
    options = window, sequence, dtype, groups
    errors = run_ranks(compare, size, "all_to_all", "fused", 8, v_dim, *options)
    assert max(errors) < (5e-6 if dtype is torch.float32 else 2e-2)


def test_number_of_groups() -> None:
    found = [context_exchange.groups_of(heads, 4) for heads in (1, 2, 3, 4, 5, 6, 8)]
    assert found == [1, 2, 3, 4, 1, 3, 4]


def test_one_group_over_four_ranks() -> None:
    for form in ("ring", "all_gather"):
        errors = run_ranks(compare, 4, form, "fused", 1, 16, 0, None, torch.float32)
        assert max(errors) < 5e-6
    with pytest.raises(RankError, match="can't share out 1 heads"):
        run_ranks(compare, 4, "all_to_all", "fused", 1, 16, 0, None, torch.float32)


def exchange_and_back(rank: int, size: int) -> None:
    mesh, _ = build(size, "all_to_all")
    x = torch.arange(LENGTH // size * 4 * 3.0).view(-1, 4, 3) + 1000 * rank
    exchange = HeadExchange((LENGTH,), size, range(size), mesh.cp)
    heads = exchange.to_heads(x)
    assert heads.shape == (LENGTH, 4 // size, 3)
    assert torch.equal(exchange.to_tokens(heads), x)


def test_exchange_of_heads_and_back() -> None:
    run_ranks(exchange_and_back, 4)


def dropped(rank: int, size: int, form: ContextForm) -> Tensor:
    """A core whose values are ones gives, in each row, the sum of the weights that are left."""
    mesh, config = build(size, form)
    core = made("fused", 0, 0.5)
    core.dropout.stream = DropoutStreams(mesh, seed=1, sequence_parallel=False)
    query, key, value, _ = tensors(4, 16, torch.float32)
    rows = own_rows(size, rank, None, contiguous=config.contiguous)
    local = [part(x, rows) for x in (query, key, torch.ones_like(value))]
    return swapped(core, mesh, config)(*local)


@pytest.mark.parametrize("form", ["all_gather", "all_to_all"])
def test_dropout_of_probabilities(form: Any) -> None:
    """Every rank drops, and not alike; what is left is scaled so that the mean stays 1."""
    first, second = run_ranks(dropped, 2, form)
    assert not torch.equal(first, second)
    for part_of in (first, second):
        assert part_of.std() > 0.1
        assert float(part_of.mean()) == pytest.approx(1.0, abs=0.2)


def groups_are_apart(rank: int, size: int) -> None:
    """Gradients may be reduced while attention communicates, also without a data axis."""
    mesh, _ = build(size, "hierarchical")
    assert mesh.cp.ranks == mesh.dp_cp.ranks == tuple(range(size))
    assert mesh.cp.group is not mesh.dp_cp.group
    assert mesh.axis("cp_inner").size * mesh.axis("cp_outer").size == mesh.cp.size


def test_attention_has_its_own_groups() -> None:
    run_ranks(groups_are_apart, 4)
