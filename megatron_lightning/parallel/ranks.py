"""Which ranks share an axis of the mesh: pure arithmetic, which needs no process group.

Two views cover the same ranks (parallel folding, Megatron-Core MoE, arXiv 2504.14960): the dense
view (pp, dp, cp, tp) and the expert view (pp, edp, ep, etp).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

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


def axis_rank_lists(
    sizes: Mapping[str, int], order: Sequence[str], expert_order: Sequence[str]
) -> dict[str, list[tuple[int, ...]]]:
    """Of the axes of both views, and of joined ones; not of parts of an axis."""
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


def context_rank_lists(
    sizes: Mapping[str, int], order: Sequence[str], inner: int
) -> dict[str, list[tuple[int, ...]]]:
    """The context axis as a ring of groups of `inner` neighbours."""
    if sizes["cp"] % inner:
        raise ValueError(f"context_inner={inner} does not divide {sizes['cp']} context ranks")
    factors = {**sizes, "cp_outer": sizes["cp"] // inner, "cp_inner": inner}
    names = [n for axis in order for n in (("cp_outer", "cp_inner") if axis == "cp" else (axis,))]
    return {name: rank_lists(factors, names, [name]) for name in ("cp_inner", "cp_outer")}
