"""Axes of the mesh as one rank sees them, and which of them share process groups.

Groups of equal rank lists are made once and shared, but for axes whose collectives may run at any
time of those of others: one group's collectives need one order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from megatron_lightning.parallel.lanes import Lanes

RankLists = list[tuple[int, ...]]
"""Ranks of each group that an axis has in the world."""

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

_Pool = dict[tuple[int, ...], Any]
"""Groups that axes share, by their ranks."""


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


class AxisMaker:
    """Makes the axes of a rank, group by group. All ranks make the same ones in the same order."""

    def __init__(
        self,
        lists: Mapping[str, RankLists],
        rank: int,
        timeout: Any,
        *,
        for_experts: bool,
        folded: bool,
        stage_ctas: int | None,
    ) -> None:
        """`lists`: of each axis. `folded`: expert axes have other ranks than dense ones.
        `stage_ctas`: thread blocks of a message between pipeline stages, at most (NCCL).
        """
        self._lists, self._rank, self._timeout = lists, rank, timeout
        shared = {tuple(range(dist.get_world_size())): dist.group.WORLD}
        in_layers: _Pool = {}
        pools: dict[str, _Pool] = dict.fromkeys(lists, shared)
        pools |= dict.fromkeys(_ATTENTION_AXES, in_layers)
        if for_experts:
            pools |= dict.fromkeys(_EXPERT_AXES, in_layers)
            pools |= dict.fromkeys(_EXPERT_GRADIENT_AXES, {} if folded else shared)
        urgent = partial(urgent_options, timeout)
        self._options: dict[str, Callable[[], Any]] = dict.fromkeys(_ATTENTION_AXES, urgent)
        if stage_ctas is not None:
            pools["pp"] = {}
            self._options["pp"] = partial(urgent, max_ctas=stage_ctas)
        self._pools = pools

    def axes(self) -> dict[str, MeshAxis]:
        """Every axis, each with one group."""
        return {
            name: self._axis(name, self._pools[name], self._options.get(name, _no_options))
            for name in self._lists
        }

    def with_lanes(self, axes: Mapping[str, MeshAxis], lanes: Lanes) -> dict[str, MeshAxis]:
        """The same, those of collectives inside layers with a second group."""
        seconds: dict[int, _Pool] = {}
        result = dict(axes)
        for name in _LANED_AXES:
            pool = seconds.setdefault(id(self._pools[name]), {})
            second = self._axis(name, pool, _no_options).group
            result[name] = LanedAxis(**vars(axes[name]), second=second, lanes=lanes)
        return result

    def _axis(self, name: str, made: _Pool, options: Callable[[], Any]) -> MeshAxis:
        own = MeshAxis(name=name, ranks=(self._rank,))
        for ranks in self._lists[name]:
            if len(ranks) > 1 and ranks not in made:
                made[ranks] = dist.new_group(ranks, timeout=self._timeout, pg_options=options())
            if self._rank in ranks:
                own = MeshAxis(
                    name=name,
                    rank=ranks.index(self._rank),
                    size=len(ranks),
                    ranks=ranks,
                    group=made[ranks] if len(ranks) > 1 else None,
                )
        return own


def _no_options() -> None:
    return None


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
