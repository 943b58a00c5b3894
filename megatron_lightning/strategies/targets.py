"""Which part of a LightningModule is cut, by which plan, and which strategy has cut it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch import LightningModule

from megatron_lightning.config.plan import ParallelPlan
from megatron_lightning.runtime.parallelize import Target

if TYPE_CHECKING:
    from megatron_lightning.strategies.mesh_strategy import MeshStrategy

_OWNER = "_megatron_strategy"
"""Attribute of a LightningModule: the strategy that cut it in this process."""


def find_target(module: LightningModule, plan: ParallelPlan | None) -> Target | None:
    """The network that is cut, with its plan; None when the whole module is merely replicated.

    A module of this package has `parallel_plan()` and `network_attribute`. For a user's module
    with a plan it is the attribute named by `network_attribute`, else the only child that has
    parameters.
    """
    own = getattr(module, "parallel_plan", None)
    if plan is None and own is not None:
        plan = own()
    if plan is None:
        return None
    named = getattr(module, "network_attribute", None)
    if named is not None:
        return Target(plan=plan, attribute=named)
    children = [
        name for name, child in module.named_children() if any(True for _ in child.parameters())
    ]
    if len(children) != 1:
        raise ValueError(
            f"{type(module).__name__}: which of {children} does the plan describe? Set the class "
            f"attribute"
            " network_attribute = '<name>'"
        )
    return Target(plan=plan, attribute=children[0])


def has_experts(module: LightningModule, plan: ParallelPlan | None) -> bool:
    """Whether the module's plan, or the given one in its place, has rows of experts."""
    own = getattr(module, "parallel_plan", None)
    if plan is None and own is not None:
        plan = own()
    return plan is not None and plan.has_experts


def claim(module: LightningModule, strategy: MeshStrategy) -> None:
    """Note that `strategy` cuts `module`; ValueError when another strategy has cut it into parts
    before.
    """
    owner: MeshStrategy | None = vars(module).get(_OWNER)
    is_cut = owner is not None and (
        owner.config.model_parallel_size * owner.config.pipeline.virtual_pipeline_size > 1
        or owner.config.expert_parallel_size > 1
        or owner.config.data_parallel.sharding == "fsdp"
    )
    if owner is not None and owner is not strategy and is_cut:
        raise ValueError(
            f"{type(module).__name__} was cut for {owner.mesh.describe()} by another strategy of "
            f"this process; make a new"
            " module and load the checkpoint into it"
        )
    object.__setattr__(module, _OWNER, strategy)
