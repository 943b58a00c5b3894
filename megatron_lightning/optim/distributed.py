"""ZeRO-1: any element-wise torch optimizer, updating only this rank's part of every parameter.

The optimizer object, its groups and whatever schedulers hold of them stay; only the parameters
listed in the groups are exchanged for flat parts (`optim.shards`). Gradients come reduced-scattered
from the buckets, updated parameters are gathered while the next forward pass begins (ZeRO stage 1,
arXiv 1910.02054). Optimizers that need whole tensors are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from megatron_lightning.optim.local_parts import LocalParts
from megatron_lightning.optim.shards import ParameterShards
from megatron_lightning.precision.state import (
    check_elementwise,
    discard_state,
    narrow_state,
    optimizer_state_tensors,
    widen_state,
)

FUSED_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW)


class DistributedOptimizer:
    """The optimizers of a run over `shards`.

    A step is: `attach_gradients`, the optimizer's step, `finish_step`, `detach_gradients`. With
    `moments_dtype` optimizer state is kept in that dtype between steps and widened for each.

    ValueError for an optimizer that isn't known to be element-wise, or that holds parameters which
    are not the module's.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        shards: ParameterShards | LocalParts,
        named_parameters: Mapping[str, Parameter],
        *,
        moments_dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        self.shards = shards
        self._optimizers = list(optimizers)
        self._names = {parameter: name for name, parameter in named_parameters.items()}
        self._moments_dtype = moments_dtype
        self._seed = seed
        for optimizer in self._optimizers:
            check_elementwise(optimizer, shards.names)
        self.adopt()

    def adopt(self) -> None:
        """Exchange parameters that were added to the optimizers, or unfrozen, since the last
        call.
        """
        self.shards.extend()
        names, parts = self.shards.names, self.shards.parts()
        known = {id(part) for part in parts.values()}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                held: list[Parameter] = []
                given = list(group["params"])
                for parameter in given:
                    name = None if id(parameter) in known else self._name(parameter)
                    if name is None or name not in names:  # a part already, or frozen
                        held.append(parameter)
                        continue
                    self._move_state(optimizer, name, parameter, parts.get(name))
                    held += [parts[name]] if name in parts else []
                group["params"][:] = held
                _use_fused_kernel(optimizer, group, held or given)

    def _name(self, parameter: Parameter) -> str:
        if parameter not in self._names:
            raise ValueError(
                "configure_optimizers: an optimizer holds a parameter of shape"
                f" {tuple(parameter.shape)} that is not one of the module's; pass parameters of"
                " this module only"
            )
        return self._names[parameter]

    def _move_state(
        self, optimizer: Optimizer, name: str, parameter: Parameter, part: Parameter | None
    ) -> None:
        """Hand state that is there already to the part (Adagrad makes its own at once)."""
        state = optimizer.state.pop(parameter, {})
        if part is None or not state:
            return
        optimizer.state[part] = {
            key: self._cut(name, value, part)
            if isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape
            else value
            for key, value in state.items()
        }

    def _cut(self, name: str, value: Tensor, part: Parameter) -> Tensor:
        dtype = part.dtype if value.is_floating_point() else value.dtype
        return self.shards.cut(name, value).to(device=part.device, dtype=dtype, copy=True)

    # ------------------------------------------------------------------ one step

    def attach_gradients(self) -> None:
        """Put the reduced gradients of the parts where optimizers, clipping and hooks look."""
        self.shards.attach_gradients()
        if self._moments_dtype is not None:
            for optimizer in self._optimizers:
                widen_state(optimizer, self.shards.parts().values(), self._moments_dtype)

    def finish_step(self, step: int, *, wait: bool, rounded: bool = False) -> None:
        """Give what was updated to all ranks; `step` counts optimizer steps of the run.

        Without `wait` the gather goes on; see `ParameterShards.wait`. For `rounded` see its
        `begin_gather`.
        """
        self.shards.begin_gather(rounded=rounded)
        self._narrow(step)
        if wait:
            self.shards.wait()

    def detach_gradients(self) -> None:
        """Take the parts' gradients away."""
        for part in self.shards.parts().values():
            part.grad = None

    def _narrow(self, step: int) -> None:
        if self._moments_dtype is not None:
            for index, optimizer in enumerate(self._optimizers):
                seed = f"{self._seed}.{index}.{step}"
                narrow_state(optimizer, self.shards.parts(), self._moments_dtype, seed=seed)

    # ------------------------------------------------------------------ checkpoints

    def state_tensors(
        self, optimizer: Optimizer, *, materialise: bool
    ) -> dict[str, dict[str, Tensor]]:
        """Return {name: {state key: tensor of the part}}; see `optimizer_state_tensors`."""
        parts = self.shards.parts()
        found = optimizer_state_tensors(optimizer, parts, materialise=materialise)
        if materialise and self._moments_dtype is not None:
            narrow_state(optimizer, parts, self._moments_dtype, seed="")  # to be loaded over
            found = optimizer_state_tensors(optimizer, parts)
        return found

    def discard_state(self, optimizer: Optimizer, names: Iterable[str]) -> None:
        """Forget the state of the parts of parameters `names`."""
        parts = self.shards.parts()
        discard_state(optimizer, [parts[name] for name in names if name in parts])


def _use_fused_kernel(
    optimizer: Optimizer, group: dict[str, Any], judged: Sequence[Parameter]
) -> None:
    """Let Adam and AdamW use the fused kernel, unless a choice was made. `judged`: the parts here
    or, of a group of which this rank has none, what was cut: all ranks must choose alike, since a
    folded step begins collectives elsewhere than another.
    """
    if type(optimizer) not in FUSED_OPTIMIZERS or not judged:
        return
    free = group["foreach"] is None and group["fused"] is None
    free = free and not (group["capturable"] or group["differentiable"])
    if free and all(p.is_cuda and p.is_floating_point() for p in judged):
        group["fused"] = True
        for parameter in group["params"]:
            step = optimizer.state.get(parameter, {}).get("step")
            if step is not None:
                optimizer.state[parameter]["step"] = step.to(parameter.device)
