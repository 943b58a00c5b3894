"""What a plan table says about a network, checked before any process exists.

All violations are found at once; each text names the parameter, the value and a remedy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import cast

from torch import nn

from megatron_lightning.config.plan import Gradient, ParallelPlan, Role, Split
from megatron_lightning.parallel.plain_layers import is_plain, plain_problem
from megatron_lightning.utils.wording import merge_alike


@dataclass(frozen=True)
class NamedParameter:
    """One parameter and every place where it stands (several when it is tied)."""

    value: nn.Parameter
    uses: tuple[tuple[str, nn.Module, str], ...]
    """(name in the network, module, attribute), in the order of `named_parameters`."""

    @property
    def name(self) -> str:
        """First name."""
        return self.uses[0][0]

    @property
    def names(self) -> tuple[str, ...]:
        """All names."""
        return tuple(name for name, _, _ in self.uses)


def distinct_parameters(network: nn.Module) -> Iterator[NamedParameter]:
    """Every parameter object of the network once, in the order of `named_parameters`."""
    uses: dict[int, list[tuple[str, nn.Module, str]]] = {}
    values: dict[int, nn.Parameter] = {}
    for path, module in network.named_modules():
        for attribute, value in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{path}.{attribute}" if path else attribute
            uses.setdefault(id(value), []).append((name, module, attribute))
            values[id(value)] = value
    for key, value in values.items():
        yield NamedParameter(value, tuple(uses[key]))


def is_lookup(module: nn.Module) -> bool:
    """True for embedding tables: torch's own, and those that say so by `looks_up_ids`."""
    return isinstance(module, nn.Embedding) or hasattr(module, "looks_up_ids")


def padding_multiple(parameter: NamedParameter, split: Split, plan: ParallelPlan) -> int | None:
    """What the rows held by one rank are a multiple of; None for what isn't a vocabulary's.

    It is the `pad_multiple` of the modules that hold the parameter, and 1 for torch's own.
    """
    if split.role not in (Role.VOCABULARY, Role.FOLLOWS):
        return None
    multiples = [
        cast(int, module.pad_multiple) if hasattr(module, "pad_multiple") else 1
        for name, module, _ in parameter.uses
        if Role.VOCABULARY in module_splits(name.rpartition(".")[0], module, plan).roles
    ]
    return math.lcm(*multiples) if multiples else None


@dataclass(frozen=True)
class ModuleSplits:
    """The rows of the parameters that a module itself owns, by attribute."""

    path: str
    by_attribute: dict[str, Split]

    @property
    def roles(self) -> set[Role]:
        """Roles that occur."""
        return {split.role for split in self.by_attribute.values()}

    def name(self, attribute: str) -> str:
        """Name of a parameter in the network."""
        return f"{self.path}.{attribute}" if self.path else attribute


def module_splits(path: str, module: nn.Module, plan: ParallelPlan) -> ModuleSplits:
    """Look up the rows of a module's own parameters; ValueError as `plan.split_of`."""
    names = [name for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)]
    rows = {name: plan.split_of(f"{path}.{name}" if path else name) for name in names}
    return ModuleSplits(path, rows)


def check_tensor_plan(
    network: nn.Module,
    plan: ParallelPlan,
    tensor_size: int,
    *,
    sequence_parallel: bool = False,
    expert_size: int = 1,
    expert_tensor_size: int = 1,
    allows: Callable[[int], bool] = lambda size: True,
) -> list[str]:
    """Explain everything that keeps `plan` from splitting `network` over `tensor_size` ranks, and
    its experts over `expert_size` x `expert_tensor_size`.

    The network may be on the meta device and must be unsplit; no process group is needed. `allows`:
    whether other rules allow a tensor size, asked of those that are proposed. What holds for many
    layers is said once.
    """
    parameters = list(distinct_parameters(network))
    named = [name for parameter in parameters for name in parameter.names]
    problems = [problem for name in named if (problem := _row_problem(name, plan))]
    if problems:  # nothing further can be said while rows are missing
        return merge_alike(problems + _tie_problems(parameters, plan))
    for parameter in parameters:
        rows = [plan.split_of(name) for name in parameter.names]
        if any(row != rows[0] for row in rows):
            problems.append(
                f"plan.splits: {' and '.join(parameter.names)} are one parameter but their rows"
                " differ; give both the same split"
            )
        else:
            problems += _parameter_problems(parameter, rows[0], tensor_size, plan)
    problems += _size_problems(parameters, plan, tensor_size, allows)
    problems += check_expert_rows(parameters, plan, expert_size, expert_tensor_size)
    if sequence_parallel and tensor_size > 1:
        problems += _sequence_problems(network, plan)
    return merge_alike(problems + _tie_problems(parameters, plan))


def _row_problem(name: str, plan: ParallelPlan) -> str | None:
    try:
        plan.split_of(name)
    except ValueError as error:
        return str(error)
    return None


def _parameter_problems(
    parameter: NamedParameter, split: Split, tensor_size: int, plan: ParallelPlan
) -> list[str]:
    if split.dim is None or tensor_size == 1 or split.role is Role.EXPERT:
        return []
    shape, name = tuple(parameter.value.shape), parameter.name
    if not -len(shape) <= split.dim < len(shape):
        return [f"plan.splits: {name} of shape {shape} has no dim {split.dim}"]
    return [
        problem
        for _, module, attribute in parameter.uses
        if (problem := _module_problem(name, module, attribute, split, len(shape), tensor_size))
    ]


def _size_problems(
    parameters: list[NamedParameter],
    plan: ParallelPlan,
    tensor_size: int,
    allows: Callable[[int], bool],
) -> list[str]:
    """Dims that the size doesn't divide, with the sizes that divide all that are split."""
    split_dims: list[tuple[NamedParameter, int, int]] = []
    problems: list[str] = []
    for parameter in parameters:
        split, dims = plan.split_of(parameter.name), parameter.value.dim()
        if split.dim is None or split.role is Role.EXPERT or not -dims <= split.dim < dims:
            continue
        extent = parameter.value.shape[split.dim]
        if split.parts and extent % split.parts:
            problems.append(
                f"plan.splits: {parameter.name} of shape {tuple(parameter.value.shape)} can't have"
                f" parts={split.parts} along dim {split.dim}, which they don't divide"
            )
        elif padding_multiple(parameter, split, plan) is None:
            split_dims.append((parameter, split.dim, split.parts or extent))
    common = math.gcd(*(count for _, _, count in split_dims))
    uneven = [row for row in split_dims if row[2] % tensor_size]
    if not uneven:
        return problems
    fitting = [str(n) for n in range(1, min(common, 64) + 1) if common % n == 0 and allows(n)]
    return problems + [
        f"tensor_parallel_size={tensor_size}: {parameter.name} of shape"
        f" {tuple(parameter.value.shape)} is split along dim {dim}"
        f"{'' if count == parameter.value.shape[dim] else f' between {count} parts'}, and"
        f" {count} isn't a multiple of it; sizes that fit: {', '.join(fitting)}"
        for parameter, dim, count in uneven
    ]


def _module_problem(
    name: str, module: nn.Module, attribute: str, split: Split, dims: int, tensor_size: int
) -> str | None:
    """Why this module can't hold a part of that parameter, or None."""
    kind = type(module).__name__
    if split.role is Role.FOLLOWS:
        return None
    if is_lookup(module):
        if split.role is not Role.VOCABULARY:
            return f"plan.splits: {name} is an embedding's, split it by vocabulary()"
        problem = plain_problem(module, tensor_size)
        return f"plan.splits: {name}: {problem}" if problem else None
    border = "after" if split.role is Role.ROW else "before"
    if not is_plain(module) and not hasattr(module, border):
        return (
            f"plan.splits: {name} belongs to a {kind}, which has no `{border}` border; use"
            " megatron_lightning.layers.Linear or nn.Linear, give the module that attribute,"
            " or make the row replicated() or follows()"
        )
    last = split.dim in (dims - 1, -1)
    linear = is_plain(module) or hasattr(module, "sums_output")
    if linear and attribute == "weight" and last != (split.role is Role.ROW):
        return (
            f"plan.splits: {name} has {dims} dims and is split as {split.role.value} along dim"
            f" {split.dim}; input features, the last dim, are row(), all others column()"
        )
    return None


def _sequence_problems(network: nn.Module, plan: ParallelPlan) -> list[str]:
    """Whole parameters that see a part of the sequence and whose row doesn't say so."""
    problems = []
    for path, module in network.named_modules():
        splits = module_splits(path, module, plan)
        if Role.ROW not in splits.roles:
            continue
        problems += [
            f"plan.splits: {splits.name(attribute)} is added to a part of the sequence, so each"
            " rank's gradient is a part; make its row replicated(Gradient.SEQUENCE)"
            for attribute, split in splits.by_attribute.items()
            if split.role is Role.REPLICATED and split.gradient is Gradient.WHOLE
        ]
    return problems


def check_expert_rows(
    parameters: Iterable[NamedParameter], plan: ParallelPlan, expert_size: int, tensor_size: int
) -> list[str]:
    """Sizes that don't divide the experts or their columns, each once, with the first parameter
    that has it.
    """
    found: dict[tuple[str, int], str] = {}
    rows = [(parameter, plan.split_of(parameter.name)) for parameter in parameters]
    held = [(parameter, split) for parameter, split in rows if split.role is Role.EXPERT]
    if expert_size > 1 and not plan.has_experts:
        return [
            f"expert_parallel_size={expert_size}: the network has no experts (no row of its plan is"
            " experts()); set it to 1"
        ]
    for parameter, split in held:
        shape = tuple(parameter.value.shape)
        if split.dim is not None and not 0 < split.dim < len(shape):
            return [f"plan.splits: {parameter.name} of shape {shape} has no dim {split.dim}"]
        for field, dim, size, what in (
            ("expert_parallel_size", 0, expert_size, "experts"),
            ("expert_tensor_parallel_size", split.dim, tensor_size, "columns of an expert"),
        ):
            if dim is not None and shape[dim] % size:
                fits = [n for n in range(1, shape[dim] + 1) if shape[dim] % n == 0 and n <= 64]
                found.setdefault(
                    (field, shape[dim]),
                    f"{field}={size} does not divide the {shape[dim]} {what} of {parameter.name}"
                    f" (dim {dim} of {shape}); use one of {fits}",
                )
    return list(found.values())


def _tie_problems(parameters: list[NamedParameter], plan: ParallelPlan) -> list[str]:
    index = {name: i for i, parameter in enumerate(parameters) for name in parameter.names}
    return [
        f"plan.tied: {owner} and {user} should be one parameter but the network holds two; assign"
        " the same nn.Parameter to both modules"
        for owner, user in plan.tied
        if owner in index and user in index and index[owner] != index[user]
    ]
