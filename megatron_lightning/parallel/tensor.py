"""Tensor and sequence parallelism: cut parameters to this rank's boxes and set the borders.

Megatron's scheme (arXiv 1909.08053, and 2205.05198 for the sequence): a column-split layer takes
the whole input and gives its own features, a row-split one takes its own features and gives a
partial sum. With sequence parallelism, what lies between such pairs (norms, dropout, residuals)
holds a part of the sequence. A plan table says which parameter is split how; the layers only learn
what to do at their borders: `before(x)` and `after(y)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron_lightning.config.plan import Gradient, ParallelPlan, ParameterInfo, Role, Split
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.collectives import (
    gather_dim,
    own_part,
    reduce_from_axis,
    reduce_scatter_dim,
    scatter_dim,
)
from megatron_lightning.parallel.column import ColumnInput
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.overlap.layers import Overlap
from megatron_lightning.parallel.plain_layers import SplitLinear, adopt
from megatron_lightning.parallel.row import RowOutput
from megatron_lightning.parallel.tensor_checks import (
    ModuleSplits,
    NamedParameter,
    check_tensor_plan,
    distinct_parameters,
    is_lookup,
    module_splits,
    padding_multiple,
)


def apply_tensor_parallel(
    network: nn.Module,
    plan: ParallelPlan,
    axis: MeshAxis,
    *,
    sequence_parallel: bool = False,
    prefix: str = "",
    experts: ExpertAxes | None = None,
    overlap: Overlap | None = None,
) -> dict[str, ParameterInfo]:
    """Split `network` in place over the tensor axis and return the table of its parameters.

    Works on the meta device (shapes only) and on real tensors (their values are cut). `prefix`
    stands before every name, e.g. "network." when the network is that attribute of the
    LightningModule. The table's keys are prefix + name in `network`; a tied parameter stands there
    once, under the first of its names. Its `Split.gradient` is what holds in this run: WHOLE on one
    rank, and for SEQUENCE without sequence parallelism. On an axis of size 1 only the table is made
    and the vocabulary is padded. Rows of experts are split over the axes `experts` (None: over
    none), and their modules get no borders: `parallel.expert` moves tokens instead. With an
    `overlap` products and their collectives are one operation, in which products may hide those of
    a split sequence. ValueError lists everything that doesn't fit.
    """
    experts = experts or ExpertAxes()
    problems = check_tensor_plan(
        network,
        plan,
        axis.size,
        sequence_parallel=sequence_parallel,
        expert_size=experts.expert.size,
        expert_tensor_size=experts.tensor.size,
    )
    if problems:
        raise ValueError("tensor parallelism can't be applied:\n- " + "\n- ".join(problems))
    sequence_dim = plan.sequence_dim if sequence_parallel and axis.size > 1 else None
    table = {}
    owners = {user: owner for owner, user in plan.tied}
    parameters = list(distinct_parameters(network))
    names = {name for parameter in parameters for name in parameter.names}
    for parameter in parameters:
        split = plan.split_of(parameter.name)
        owner = next((owners[name] for name in parameter.names if name in owners), parameter.name)
        is_expert = split.role is Role.EXPERT
        box = (
            _expert_box(tuple(parameter.value.shape), split, experts)
            if is_expert
            else _box(parameter, split, axis, plan)
        )
        table[prefix + parameter.name] = ParameterInfo(
            name=prefix + owner,
            global_shape=true_shape(parameter, split, plan),
            offsets=box.offsets,
            sizes=box.sizes,
            split=replace(split, gradient=_gradient(split, axis, sequence_dim)),
            tied_copy=owner not in names,
            expert=is_expert,
        )
        _assign(parameter, box.cut(parameter.value))
    if axis.size > 1:
        _set_borders(network, plan, axis, sequence_dim, overlap)
    return table


@dataclass(frozen=True, kw_only=True)
class ExpertAxes:
    """The axes that stacked experts are split over."""

    expert: MeshAxis = MeshAxis(name="ep")
    """Dim 0, which counts experts."""
    tensor: MeshAxis = MeshAxis(name="etp")
    """The dim that a row names."""

    @classmethod
    def of(cls, mesh: ParallelMesh) -> ExpertAxes:
        """From the mesh."""
        return cls(expert=mesh.axis("ep"), tensor=mesh.axis("etp"))


@dataclass(frozen=True)
class _Box:
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_shape: tuple[int, ...]

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor, padded with zeros to the local shape."""
        if self.local_shape == tuple(whole.shape):
            return whole
        local = torch.zeros(self.local_shape, dtype=whole.dtype, device=whole.device)
        source, target = whole, local
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            source, target = source.narrow(dim, offset, size), target.narrow(dim, 0, size)
        target.copy_(source)
        return local


def padded_size(size: int, multiple: int, tensor_size: int) -> int:
    """Rows of a vocabulary over all tensor ranks: 50257, 128, 2 -> 50432."""
    block = multiple * tensor_size
    return math.ceil(size / block) * block


def true_shape(parameter: NamedParameter, split: Split, plan: ParallelPlan) -> tuple[int, ...]:
    """Global shape without padding: a network that was padded before keeps its true vocabulary."""
    shape = list(parameter.value.shape)
    if split.dim is not None and padding_multiple(parameter, split, plan) is not None:
        sizes = [cast(int, m.vocab_size) for _, m, _ in parameter.uses if hasattr(m, "vocab_size")]
        shape[split.dim] = min([shape[split.dim], *sizes])
    return tuple(shape)


def _box(parameter: NamedParameter, split: Split, axis: MeshAxis, plan: ParallelPlan) -> _Box:
    shape = true_shape(parameter, split, plan)
    if split.dim is None:
        return _Box((0,) * len(shape), shape, shape)
    size = shape[split.dim]
    padded = padded_size(size, padding_multiple(parameter, split, plan) or 1, axis.size)
    local = padded // axis.size
    offset = min(axis.rank * local, size)

    def at_dim(values: tuple[int, ...], value: int) -> tuple[int, ...]:
        assert split.dim is not None
        dim = split.dim % len(shape)
        return (*values[:dim], value, *values[dim + 1 :])

    return _Box(
        offsets=at_dim((0,) * len(shape), offset),
        sizes=at_dim(shape, min(local, size - offset)),
        local_shape=at_dim(shape, local),
    )


def _expert_box(shape: tuple[int, ...], split: Split, axes: ExpertAxes) -> _Box:
    offsets, sizes = [0] * len(shape), list(shape)
    for dim, axis in ((0, axes.expert), (split.dim, axes.tensor)):
        if dim is not None:
            sizes[dim] //= axis.size
            offsets[dim] = axis.rank * sizes[dim]
    return _Box(tuple(offsets), tuple(sizes), tuple(sizes))


def _gradient(split: Split, axis: MeshAxis, sequence_dim: int | None) -> Gradient:
    if axis.size == 1 or (split.gradient is Gradient.SEQUENCE and sequence_dim is None):
        return Gradient.WHOLE
    return split.gradient


def _assign(parameter: NamedParameter, local: Tensor) -> None:
    if local is parameter.value:
        return
    held = nn.Parameter(local, requires_grad=parameter.value.requires_grad)
    for _, module, attribute in parameter.uses:
        setattr(module, attribute, held)


def _set_borders(
    network: nn.Module,
    plan: ParallelPlan,
    axis: MeshAxis,
    sequence_dim: int | None,
    overlap: Overlap | None,
) -> None:
    """Tell each module that owns parameters what to do at its borders, and the loss its axis."""
    split_logits = False
    for path, module in network.named_modules():
        splits = module_splits(path, module, plan)
        roles = splits.roles
        if not roles and hasattr(module, "enters_heads"):
            cast(Any, module).before = ColumnInput(axis, sequence_dim)
        if not roles or Role.EXPERT in roles:
            continue
        if roles == {Role.REPLICATED}:
            _set_replicated(module, splits, axis, sequence_dim)
            continue
        adopt(module)
        if is_lookup(module):
            _set_lookup(module, axis, sequence_dim)
            continue
        if roles & {Role.COLUMN, Role.VOCABULARY}:
            _set_column(module, splits, axis, sequence_dim, overlap)
            split_logits |= Role.VOCABULARY in roles
        if Role.ROW in roles:
            _set_row(module, roles, axis, sequence_dim, overlap)
        if Role.FOLLOWS in roles and hasattr(module, "axis"):
            cast(Any, module).axis = axis
    for module in network.modules():
        if split_logits and _takes_logits(module):
            cast(Any, module).axis = axis


def _takes_logits(module: nn.Module) -> bool:
    """A loss: holds no parameter, has an `axis`, and knows the true vocabulary."""
    return (
        next(module.parameters(), None) is None
        and hasattr(module, "axis")
        and hasattr(module, "vocab_size")
    )


def _set_replicated(
    module: Any, splits: ModuleSplits, axis: MeshAxis, sequence_dim: int | None
) -> None:
    """A whole table looked up by a split sequence: take the own part of the ids' last dim."""
    sequence = any(split.gradient is Gradient.SEQUENCE for split in splits.by_attribute.values())
    if sequence_dim is not None and sequence and is_lookup(module):
        adopt(module)
        module.before = partial(own_part, axis=axis, dim=-1)


def _set_lookup(module: Any, axis: MeshAxis, sequence_dim: int | None) -> None:
    rows = module.weight.shape[0]  # of every rank, padding included
    module.vocabulary_offset = axis.rank * rows
    module.after = _sum_border(axis, sequence_dim)


def _set_column(
    module: Any,
    splits: ModuleSplits,
    axis: MeshAxis,
    sequence_dim: int | None,
    overlap: Overlap | None,
) -> None:
    module.before = ColumnInput(axis, sequence_dim, overlap)
    gather = partial(gather_dim, axis=axis, dim=-1, backward="split")
    if any(split.gather_output for split in splits.by_attribute.values()):
        module.after = gather
    if hasattr(module, "collect"):
        module.collect = gather
    if isinstance(module, nn.Linear):
        module.out_features = module.weight.shape[0]
    if isinstance(module, SplitLinear):
        module.takes_whole = (splits.path, axis.size)


def _set_row(
    module: Any,
    roles: set[Role],
    axis: MeshAxis,
    sequence_dim: int | None,
    overlap: Overlap | None,
) -> None:
    module.after = _sum_border(axis, sequence_dim)
    if overlap is not None:
        module.after = RowOutput(axis, sequence_dim, overlap)
    if hasattr(module, "sums_output"):
        module.sums_output = True
        if Role.COLUMN not in roles:
            local = module.weight.shape[-1]
            module.before = partial(
                split_features, axis=axis, local_size=local, sequence_dim=sequence_dim
            )
    if isinstance(module, nn.Linear):
        module.in_features = module.weight.shape[1]


def _sum_border(axis: MeshAxis, sequence_dim: int | None) -> partial[Tensor]:
    if sequence_dim is None:
        return partial(reduce_from_axis, axis=axis)
    return partial(reduce_scatter_dim, axis=axis, dim=sequence_dim)


def split_features(
    x: Tensor, *, axis: MeshAxis, local_size: int, sequence_dim: int | None
) -> Tensor:
    """Input of a row-split layer: as it is when its last dim is split already, else the own part.

    A whole input is equal on all ranks, or with sequence parallelism a part of the sequence.
    """
    if x.shape[-1] == local_size:
        return x
    if sequence_dim is None:
        return scatter_dim(x, axis, -1)
    return own_part(gather_dim(x, axis, sequence_dim), axis, -1)
