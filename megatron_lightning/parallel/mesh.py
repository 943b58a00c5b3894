"""The one topology object: which ranks share what, as a frozen value that is handed down.

There is no module state: a mesh is a value that the strategy owns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron_lightning.parallel.axes import AxisMaker, LanedAxis, MeshAxis
from megatron_lightning.parallel.lanes import Lanes
from megatron_lightning.parallel.ranks import (
    DENSE_ORDER,
    EXPERT_ORDER,
    axis_rank_lists,
    context_rank_lists,
    mesh_sizes,
    shard_rank_lists,
)
from megatron_lightning.utils.wording import counted

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
        return f"{' '.join(shown) or 'one process'} ({counted(self.world_size, 'rank')})"

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
        lists = axis_rank_lists(sizes, order, expert_order)
        lists |= shard_rank_lists(sizes, order, expert_order, data_replicas)
        lists |= context_rank_lists(sizes, order, context_inner)
        maker = AxisMaker(
            lists,
            rank,
            timeout,
            for_experts=for_experts,
            folded=sizes["ep"] > 1 or sizes["etp"] != sizes["tp"],
            stage_ctas=stage_ctas if device.type == "cuda" else None,
        )
        axes, lanes = maker.axes(), Lanes(device) if side_by_side else None
        if lanes is not None:
            axes = maker.with_lanes(axes, lanes)
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
