"""The one topology object: which ranks share what, as a frozen value that is handed down.

Rank arithmetic is pure (`rank_lists`) and needs no process group. Two views cover the same ranks
(parallel folding, Megatron-Core MoE, arXiv 2504.14960): the dense view (pp, dp, cp, tp) and the
expert view (pp, edp, ep, etp). Groups of equal rank lists are made once and shared. There is no
module state: a mesh is a value that the strategy owns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_lightning.parallel.lanes import Lanes

DENSE_ORDER = ("pp", "dp", "cp", "tp")
EXPERT_ORDER = ("pp", "edp", "ep", "etp")


def rank_lists(
    sizes: Mapping[str, int], order: Sequence[str], axes: Sequence[str]
) -> list[tuple[int, ...]]:
    """Rank lists of the groups that span `axes` jointly.

    `order` names the axes from slowest to fastest varying, so the last one holds neighbouring
    ranks. Ranks of a list run in `order`'s order, whatever the order of `axes`. Raises ValueError
    for an unknown or repeated axis.
    """
    if len(set(axes)) != len(axes) or not set(axes) <= set(order):
        raise ValueError(f"axes={tuple(axes)}: each must be one of {tuple(order)}, named once")
    inside = [name for name in order if name in axes]
    outside = [name for name in order if name not in axes]
    steps = _offsets(sizes, order, inside)
    return [tuple(base + step for step in steps) for base in _offsets(sizes, order, outside)]


def _offsets(sizes: Mapping[str, int], order: Sequence[str], names: Sequence[str]) -> list[int]:
    """Ranks at all positions on the axes `names`, the first of them slowest, and 0 on others."""
    stride = {
        name: math.prod(sizes[later] for later in order[i + 1 :]) for i, name in enumerate(order)
    }
    found = [0]
    for name in names:
        found = [base + i * stride[name] for base in found for i in range(sizes[name])]
    return found


def expert_rank_lists(
    sizes: Mapping[str, int], order: Sequence[str], expert_order: Sequence[str], axes: Sequence[str]
) -> list[tuple[int, ...]]:
    """Rank lists of the groups that span `axes` of the expert view jointly.

    Within a pipeline stage of the dense view `order`, ranks are counted with tp fastest, then cp,
    then dp; `expert_order` deals these out. So the stages are the same whatever `order` is, and
    expert tensor ranks are tensor ranks where both axes are equally long.
    """
    within = _offsets(sizes, order, ["dp", "cp", "tp"])
    inner = [name for name in expert_order if name != "pp"]
    groups = rank_lists(sizes, inner, axes)
    return [
        tuple(stage + within[i] for i in group)
        for stage in _offsets(sizes, order, ["pp"])
        for group in groups
    ]


@dataclass(frozen=True, kw_only=True)
class MeshAxis:
    """One axis (or several joined ones) as seen from one rank. What layers and collectives
    receive.
    """

    name: str
    rank: int = 0
    """Position of this process on the axis."""
    size: int = 1
    ranks: tuple[int, ...] = (0,)
    """Global ranks on the axis, in axis order."""
    group: Any = None
    """torch.distributed.ProcessGroup; None when size is 1."""

    def __deepcopy__(self, memo: dict[int, Any]) -> MeshAxis:
        """Itself: a process group is shared, also by copies of a network (weight averaging)."""
        return self

    @property
    def is_first(self) -> bool:
        """True at position 0."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """True at the last position."""
        return self.rank == self.size - 1


@dataclass(frozen=True, kw_only=True)
class LanedAxis(MeshAxis):
    """An axis with a group for each lane; `group` is that of the lane that is launched into."""

    second: Any
    """Group of lane 1."""
    lanes: Lanes

    def _own(self) -> Any:
        return self.second if self.lanes.number else self.__dict__["group"]

    def _set(self, value: Any) -> None:
        self.__dict__["group"] = value

    group = property(_own, _set)  # type: ignore[assignment]


SINGLE_AXIS_NAMES = (
    "pp",
    "dp",
    "cp",
    "tp",
    "edp",
    "ep",
    "etp",
    "ep_etp",
    "dp_cp",
    "tp_cp",
    "dp_cp_tp",
    "pp_tp",
    "pp_dp_cp",
    "world",
    "edges",
    "dp_shard",
    "dp_replica",
    "edp_shard",
    "edp_replica",
    "cp_inner",
    "cp_outer",
)

_ATTENTION_AXES = ("cp", "cp_inner", "cp_outer")
_EXPERT_AXES = ("ep", "etp", "ep_etp", "tp_cp", "dp_cp_tp")
"""Axes of collectives inside the layers, all and those with experts. They share no group with
others of equal ranks: gradients may be reduced at any time of a backward pass, and one group's
collectives need one order."""
_LANED_AXES = ("tp", "ep", "etp", "ep_etp", "tp_cp")
"""Axes of collectives inside forwards and backwards, which get a second group where two of these
run side by side (context parallelism doesn't)."""
_EXPERT_GRADIENT_AXES = ("edp", "edp_shard", "edp_replica")
"""Axes over which gradients of experts are reduced. With folding their ranks may be those of the
tensor axis, whose collectives are inside the layers; so they share no group with it either."""


@dataclass(frozen=True, kw_only=True)
class ParallelMesh:
    """Sizes, this process' rank, and every axis that the runtime uses.

    Axes: pp, dp, cp, tp; edp, ep, etp; the joined dp_cp (gradients of dense parameters), pp_tp
    (the ranks that hold one copy of the model), pp_dp_cp (losses and logged numbers) and world;
    ep_etp (the ranks that hold one copy of a layer's experts), tp_cp (the ranks that hold the
    tokens of one micro-batch) and dp_cp_tp (all that hold tokens), for collectives in layers;
    and edges, the first and last pipeline stage (tied embeddings; size 1 elsewhere). dp_cp =
    dp_replica x dp_shard, and edp likewise: ranks over which one copy of sharded optimizer state
    (or of parameters) is spread, and ranks that hold equal parts of it. cp = cp_outer x cp_inner.
    """

    device: torch.device
    rank: int = 0
    world_size: int = 1
    sizes: Mapping[str, int] = field(default_factory=dict)
    axes: Mapping[str, MeshAxis] = field(default_factory=dict)
    control_group: Any = None
    """gloo group over all ranks for objects and signals; None in one process."""
    for_experts: bool = True
    """Whether layers with experts may use it: else their axes have no groups of their own."""
    lanes: Lanes | None = None
    """Where a forward and a backward may run side by side; None: they don't."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelMesh:
        """Itself, as its axes."""
        return self

    def axis(self, name: str) -> MeshAxis:
        """Return the axis `name`; ValueError naming the known ones otherwise."""
        if name not in self.axes:
            raise ValueError(f"axis={name!r}: this mesh has {sorted(self.axes)}")
        return self.axes[name]

    @property
    def groups(self) -> list[Any]:
        """Every process group of the axes, once."""
        axes = self.axes.values()
        found = [axis.group for axis in axes]
        found += [axis.second for axis in axes if isinstance(axis, LanedAxis)]
        return list({id(group): group for group in found if group is not None}.values())

    @property
    def tp(self) -> MeshAxis:
        """Tensor axis."""
        return self.axes["tp"]

    @property
    def pp(self) -> MeshAxis:
        """Pipeline axis."""
        return self.axes["pp"]

    @property
    def dp(self) -> MeshAxis:
        """Data axis."""
        return self.axes["dp"]

    @property
    def cp(self) -> MeshAxis:
        """Context axis."""
        return self.axes["cp"]

    @property
    def dp_cp(self) -> MeshAxis:
        """Data and context axis joined: the replicas of a dense parameter."""
        return self.axes["dp_cp"]

    def describe(self) -> str:
        """One line for logs, e.g. `tp=2 pp=2 dp=1 (4 ranks)`; etp where it isn't tp."""
        shown = [
            f"{name}={self.sizes[name]}"
            for name in ("tp", "pp", "cp", "dp", "ep")
            if self.sizes[name] > 1
        ]
        if self.sizes["etp"] != self.sizes["tp"]:
            shown.append(f"etp={self.sizes['etp']}")
        return f"{' '.join(shown) or 'one process'} ({self.world_size} ranks)"

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> ParallelMesh:
        """A mesh of one process, in which every collective is skipped."""
        sizes = dict.fromkeys({*DENSE_ORDER, *EXPERT_ORDER}, 1)
        axes = {name: MeshAxis(name=name) for name in SINGLE_AXIS_NAMES}
        return cls(device=torch.device(device), sizes=sizes, axes=axes)

    @classmethod
    def build(
        cls,
        *,
        device: torch.device,
        tensor: int = 1,
        pipeline: int = 1,
        context: int = 1,
        expert: int = 1,
        expert_tensor: int = 1,
        data_replicas: int = 1,
        context_inner: int = 1,
        order: Sequence[str] = DENSE_ORDER,
        expert_order: Sequence[str] = EXPERT_ORDER,
        timeout: Any = None,
        for_experts: bool = True,
        side_by_side: bool = False,
        stage_ctas: int | None = None,
    ) -> ParallelMesh:
        """Make the mesh of the running default process group. Every rank must call it with equal
        arguments. `side_by_side`: a forward and a backward may run at once. `stage_ctas`: thread
        blocks of a message between pipeline stages, at most (NCCL).

        Raises ValueError when the sizes don't divide the world (the checks of `config.validate`
        say it earlier, and with a remedy).
        """
        if not dist.is_initialized():
            return cls.single(device)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        sizes = mesh_sizes(
            world_size,
            tensor=tensor,
            pipeline=pipeline,
            context=context,
            expert=expert,
            expert_tensor=expert_tensor,
        )
        made: dict[tuple[int, ...], Any] = {tuple(range(world_size)): dist.group.WORLD}
        lists = _axis_rank_lists(sizes, order, expert_order) | shard_rank_lists(
            sizes, order, expert_order, data_replicas
        )
        lists |= _context_rank_lists(sizes, order, context_inner)
        in_layers: dict[tuple[int, ...], Any] = {}
        pools: dict[str, dict[tuple[int, ...], Any]] = dict.fromkeys(_ATTENTION_AXES, in_layers)
        if for_experts:
            folded = sizes["ep"] > 1 or sizes["etp"] != sizes["tp"]
            pools |= dict.fromkeys(_EXPERT_AXES, in_layers)
            pools |= dict.fromkeys(_EXPERT_GRADIENT_AXES, {} if folded else made)
        urgent = partial(urgent_options, timeout)
        options: dict[str, Callable[[], Any]] = dict.fromkeys(_ATTENTION_AXES, urgent)
        if stage_ctas is not None and device.type == "cuda":
            pools["pp"] = {}
            options["pp"] = partial(urgent, max_ctas=stage_ctas)
        axes = {
            name: _make_axis(
                name, groups, rank, pools.get(name, made), timeout, options.get(name, _no_options)
            )
            for name, groups in lists.items()
        }
        lanes = Lanes(device) if side_by_side else None
        if lanes is not None:
            seconds: dict[int, dict[tuple[int, ...], Any]] = {}
            for name in _LANED_AXES:
                pool = seconds.setdefault(id(pools.get(name, made)), {})
                second = _make_axis(name, lists[name], rank, pool, timeout)
                axes[name] = LanedAxis(**vars(axes[name]), second=second.group, lanes=lanes)
        control = (
            dist.group.WORLD
            if device.type == "cpu"
            else dist.new_group(backend="gloo", timeout=timeout)
        )
        return cls(
            device=device,
            rank=rank,
            world_size=world_size,
            sizes=sizes,
            axes=axes,
            control_group=control,
            for_experts=for_experts,
            lanes=lanes,
        )


def mesh_sizes(
    world_size: int,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    context: int = 1,
    expert: int = 1,
    expert_tensor: int = 1,
) -> dict[str, int]:
    """Sizes of all seven axes: world = tp x pp x cp x dp = etp x ep x edp x pp. ValueError where
    that can't hold.
    """
    dense, experts = tensor * pipeline * context, expert * expert_tensor * pipeline
    for label, product in (
        ("tensor x pipeline x context", dense),
        ("expert x expert_tensor x pipeline", experts),
    ):
        if world_size % product:
            raise ValueError(f"{label} = {product} does not divide the world of {world_size} ranks")
    return {
        "pp": pipeline,
        "dp": world_size // dense,
        "cp": context,
        "tp": tensor,
        "edp": world_size // experts,
        "ep": expert,
        "etp": expert_tensor,
    }


def _axis_rank_lists(
    sizes: Mapping[str, int], order: Sequence[str], expert_order: Sequence[str]
) -> dict[str, list[tuple[int, ...]]]:
    pipelines = rank_lists(sizes, order, ["pp"])
    lists = {name: rank_lists(sizes, order, [name]) for name in order}
    for names in (("edp",), ("ep",), ("etp",), ("ep", "etp")):
        lists["_".join(names)] = expert_rank_lists(sizes, order, expert_order, names)
    lists["tp_cp"] = rank_lists(sizes, order, ["cp", "tp"])
    lists["dp_cp_tp"] = rank_lists(sizes, order, ["dp", "cp", "tp"])
    lists["dp_cp"] = rank_lists(sizes, order, ["dp", "cp"])
    lists["pp_tp"] = rank_lists(sizes, order, ["pp", "tp"])
    lists["pp_dp_cp"] = rank_lists(sizes, order, ["pp", "dp", "cp"])
    lists["world"] = [tuple(range(math.prod(sizes[name] for name in order)))]
    lists["edges"] = [tuple(dict.fromkeys((ranks[0], ranks[-1]))) for ranks in pipelines]
    return lists


def shard_rank_lists(
    sizes: Mapping[str, int], order: Sequence[str], expert_order: Sequence[str], replicas: int
) -> dict[str, list[tuple[int, ...]]]:
    """Each data axis as replicas x shards; the ranks of a shard axis are neighbours on it."""
    dense, experts = (
        rank_lists(sizes, order, ["dp", "cp"]),
        expert_rank_lists(sizes, order, expert_order, ["edp"]),
    )
    if len(dense[0]) % replicas:
        raise ValueError(f"data_replicas={replicas} does not divide {len(dense[0])} data ranks")
    lists: dict[str, list[tuple[int, ...]]] = {}
    for name, axes in (("dp", dense), ("edp", experts)):
        size = len(axes[0])
        shards = size // math.gcd(size, replicas)  # experts may have too few ranks for all copies
        lists[f"{name}_shard"] = [r[i : i + shards] for r in axes for i in range(0, size, shards)]
        lists[f"{name}_replica"] = [r[i::shards] for r in axes for i in range(shards)]
    return lists


def _context_rank_lists(
    sizes: Mapping[str, int], order: Sequence[str], inner: int
) -> dict[str, list[tuple[int, ...]]]:
    """The context axis as a ring of groups of `inner` neighbours."""
    if sizes["cp"] % inner:
        raise ValueError(f"context_inner={inner} does not divide {sizes['cp']} context ranks")
    factors = {**sizes, "cp_outer": sizes["cp"] // inner, "cp_inner": inner}
    names = [n for axis in order for n in (("cp_outer", "cp_inner") if axis == "cp" else (axis,))]
    return {name: rank_lists(factors, names, [name]) for name in ("cp_inner", "cp_outer")}


def _no_options() -> None:
    return None


def _make_axis(
    name: str,
    groups: list[tuple[int, ...]],
    rank: int,
    made: dict[tuple[int, ...], Any],
    timeout: Any,
    options: Callable[[], Any] = _no_options,
) -> MeshAxis:
    """Make every group of an axis (all ranks must take part in making each) and return the one
    that holds `rank`. `options` makes those of a group, such as `urgent_options`.
    """
    own: MeshAxis = MeshAxis(name=name, ranks=(rank,))
    for ranks in groups:
        if len(ranks) > 1 and ranks not in made:
            made[ranks] = dist.new_group(ranks, timeout=timeout, pg_options=options())
        if rank in ranks:
            own = MeshAxis(
                name=name,
                rank=ranks.index(rank),
                size=len(ranks),
                ranks=ranks,
                group=made[ranks] if len(ranks) > 1 else None,
            )
    return own


def urgent_options(timeout: Any, *, max_ctas: int | None = None) -> Any:
    """For groups whose messages travel beside attention: NCCL's kernels get the next
    multiprocessors that are free. Else they would wait until all of attention's blocks have begun.
    With `max_ctas` they take no more of them. None where the backend isn't NCCL.
    """
    if dist.get_backend() != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if timeout is not None:
        options._timeout = timeout
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    return options
