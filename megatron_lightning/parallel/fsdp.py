"""Fully sharded data parallelism with torch's `fully_shard` (FSDP2): parameters, gradients and
optimizer state are spread over the data axis (ZeRO stages 2 and 3, arXiv 1910.02054).

It gets plain tensors, already cut by tensor and pipeline parallelism, and a device mesh of the data
axis alone. Every layer is a unit that is gathered for its forward and backward; what is outside of
the layers (embedding, final norm, head) is gathered for a whole pass. Experts are units of their
own within a layer, over the data axis of the expert view. Gradients: `sharded_gradients.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter

from megatron_lightning.config.plan import ParameterInfo
from megatron_lightning.parallel.mesh import ParallelMesh

MAX_PADDING = 1.1
"""Elements of the padded first dim for each real one, up to which it is sharded."""

Fill = Callable[[nn.Module, str], None]
"""Gives a module below the network, at a path, its values: `fill(module, path)`."""


def is_sharded_over(mesh: ParallelMesh) -> bool:
    """Return whether there is more than one rank to shard over; with one, nothing is sharded."""
    return mesh.axis("dp_shard").size > 1


def data_mesh(mesh: ParallelMesh, axis: Literal["dp", "edp"] = "dp") -> DeviceMesh:
    """Return the mesh that parameters (edp: of experts) are sharded over: its shard axis, or
    replicas x shards.
    """
    shard, replica = mesh.axis(f"{axis}_shard"), mesh.axis(f"{axis}_replica")
    kind = mesh.device.type
    group: Any = shard.group
    if group is None:  # experts of which no other rank has a copy are one shard
        group = dist.new_group([mesh.rank], use_local_synchronization=True)
    if replica.size == 1:
        return DeviceMesh.from_group(group, kind, mesh_dim_names=(shard.name,))
    ranks = mesh.dp_cp.ranks if axis == "dp" else mesh.axis("edp").ranks
    return DeviceMesh.from_group(
        [replica.group, group],
        kind,
        mesh=torch.tensor(ranks).view(replica.size, shard.size),
        mesh_dim_names=(replica.name, shard.name),
    )


@dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """How modules are sharded."""

    mesh: DeviceMesh
    expert_mesh: DeviceMesh | None = None
    """Of experts; None: there are none, or they lie as all other parameters do."""
    reshard_after_forward: bool = True
    """False: keep a layer gathered from its forward to its backward (ZeRO-2)."""
    compute_dtype: torch.dtype | None = None
    """Dtype in which parameters are gathered; None: their own."""
    storage_dtype: torch.dtype | None = None
    """Dtype of the shards, which the optimizer updates; None: as the parameters are."""

    def placement(self, parameter: Parameter) -> Shard | None:
        """Choose the dim to shard: the first, unless padding it would waste much and another one
        divides (a gated weight is [2, F, H]). None is torch's default, the first.
        """
        shards = self.mesh.size(self.mesh.ndim - 1)
        if parameter.dim() < 2 or -(-parameter.shape[0] // shards) * shards <= (
            MAX_PADDING * parameter.shape[0]
        ):
            return None
        even = [dim for dim, size in enumerate(parameter.shape) if size and size % shards == 0]
        return Shard(even[0]) if even else None

    def policy(self) -> MixedPrecisionPolicy:
        """Torch's form of the dtypes. Gradients are summed in float32, inputs are left alone."""
        low = (torch.bfloat16, torch.float16)
        reduces = torch.float32 if self.compute_dtype in low else None
        param = self.compute_dtype if self.compute_dtype is not self.storage_dtype else None
        return MixedPrecisionPolicy(
            param_dtype=param, reduce_dtype=reduces, cast_forward_inputs=False
        )


def shard_network(
    network: nn.Module,
    layers: Sequence[tuple[str, nn.Module]],
    options: ShardOptions,
    fill: Fill,
    experts: Sequence[str] = (),
) -> FSDPModule:
    """Fill and shard `layers` (path below the network, module) one by one, then the rest.

    No more than one layer is ever there as a whole. `experts` are paths of modules in the layers
    that are units over the mesh of experts. Returns the network, whose forward gathers what is
    outside of the layers.
    """
    for path, layer in layers:
        fill(layer, path)
        for unit in experts if options.expert_mesh is not None else ():
            if unit.startswith(f"{path}."):
                own = replace(options, mesh=options.expert_mesh)
                again = options.reshard_after_forward
                _shard(network.get_submodule(unit), own, reshard_after_forward=again)
        if any(True for _ in layer.parameters()):
            _shard(layer, options, reshard_after_forward=options.reshard_after_forward)
    fill(network, "")
    return _shard(network, options, reshard_after_forward=False)


def expert_units(network: nn.Module, experts: Collection[str], path: str = "") -> list[str]:
    """Paths of the outermost modules that have a forward and hold nothing but parameters of the
    names `experts`.
    """
    names = {f"{path}.{name}" if path else name for name, _ in network.named_parameters()}
    if names and names <= set(experts) and _has_forward(network):
        return [path]
    found: list[str] = []
    for name, child in network.named_children():
        found += expert_units(child, experts, f"{path}.{name}" if path else name)
    return found


def _shard(module: nn.Module, options: ShardOptions, *, reshard_after_forward: bool) -> FSDPModule:
    if options.storage_dtype is not None:
        for parameter in module.parameters():
            if parameter.is_floating_point() and not isinstance(parameter, DTensor):
                parameter.data = parameter.data.to(options.storage_dtype)
    fully_shard(
        module,
        mesh=options.mesh,
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=options.placement,
        mp_policy=options.policy(),
    )
    assert isinstance(module, FSDPModule)
    module.register_forward_pre_hook(_refuse_inference_mode, prepend=True)
    module.set_gradient_divide_factor(1.0)  # sums
    module.set_force_sum_reduction_for_comms(True)  # by a plain sum, which every backend has
    return module


def _refuse_inference_mode(module: nn.Module, _: object) -> None:
    """The buffers that parameters are gathered into are kept from the first forward pass on; made
    under `inference_mode` no later backward pass could use them.
    """
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{type(module).__name__}: fully sharded parameters can't be gathered under"
            " torch.inference_mode(), a later training step could not use them; call the model"
            " under torch.no_grad()"
        )


def unit_problems(module: nn.Module) -> list[str]:
    """What keeps a user's module without a plan from being sharded by `shard_children`."""
    label, remedy = type(module).__name__, "or set sharding='optimizer'"
    problems: list[str] = []
    own = [name for name, _ in module.named_parameters(recurse=False)]
    if own:
        problems.append(
            f"data_parallel.sharding='fsdp': {label} holds parameters itself ({own[:3]}), which no"
            f" submodule's forward would gather; move them into a submodule, {remedy}"
        )
    for name, child in module.named_children():
        if _outside_of_forwards(child):
            problems.append(
                f"data_parallel.sharding='fsdp': {label}.{name} ({type(child).__name__}) has"
                f" parameters but no forward that would gather them; use them in a module's"
                f" forward, {remedy}"
            )
    return problems


def _outside_of_forwards(module: nn.Module) -> bool:
    """Whether parameters at or below `module` lie in no module with a forward."""
    if _has_forward(module):
        return False
    own = any(True for _ in module.parameters(recurse=False))
    return own or any(_outside_of_forwards(child) for child in module.children())


def shard_children(module: nn.Module, options: ShardOptions) -> list[FSDPModule]:
    """Shard a user's module that has no plan: entries of its module lists, then each child.

    Returns the outermost modules that were sharded. ValueError for what `unit_problems` finds.
    """
    problems = unit_problems(module)
    if problems:
        raise ValueError("; ".join(problems))
    roots: list[FSDPModule] = []
    for child in module.children():
        for unit in _list_entries(child):
            if unit is not child and any(True for _ in unit.parameters()):
                sharded = _shard(unit, options, reshard_after_forward=options.reshard_after_forward)
                roots += [] if _has_forward(child) else [sharded]
        if _has_forward(child) and any(True for _ in child.parameters()):
            roots.append(_shard(child, options, reshard_after_forward=False))
    return roots


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _list_entries(module: nn.Module) -> list[nn.Module]:
    """Entries of the outermost module lists at or below `module` (its layers), through lists of
    lists.
    """
    found: list[nn.Module] = []
    for child in module.children():
        in_list = isinstance(module, (nn.ModuleList, nn.ModuleDict)) and _has_forward(child)
        found += [child] if in_list else _list_entries(child)
    return found


def reshard(root: FSDPModule) -> None:
    """Free what `root` and the modules in it have gathered."""
    for module in root.modules():  # type: ignore[attr-defined]
        if isinstance(module, FSDPModule):
            module.reshard()


def shard_of(tensor: DTensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return this rank's part of a sharded tensor: (local tensor, where it begins in the whole)."""
    local = tensor.to_local().detach()
    chunks = tensor.__create_chunk_list__() if local.numel() else []  # type: ignore[attr-defined]
    offsets = tuple(map(int, chunks[0].offsets)) if chunks else (0,) * local.dim()
    return local, offsets


def shard_info(info: ParameterInfo, begins: Sequence[int], shape: Sequence[int]) -> ParameterInfo:
    """The row of a shard that begins at index `begins` of the local tensor of row `info`."""
    offsets = tuple(a + b for a, b in zip(info.offsets, begins, strict=True))
    room = (size - begin for size, begin in zip(info.sizes, begins, strict=True))
    sizes = tuple(max(0, min(pair)) for pair in zip(shape, room, strict=True))
    return replace(info, offsets=offsets, sizes=sizes)
