"""What the optimizer updates of fully sharded parameters: each rank's local tensor, as it lies.

The parts share memory with the DTensors that torch's `fully_shard` made, so nothing is copied and
nothing has to be gathered after a step: the next forward pass does that. The optimizer sees plain
tensors, which its fused kernels and clipping take without DTensor's dispatch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from megatron_lightning.parallel.fsdp import shard_of
from megatron_lightning.precision.masters import Agree, Unrounded, still_initial


class LocalParts:
    """Parts of the sharded ones among `named_parameters`; stands where `ParameterShards` does.

    `rounded` is the dtype that the forward pass reads them in, where that is another. Unrounded
    they begin as `MasterParameters` do: while all parts of a parameter are its initial values, also
    where these came here rounded, as those of a network that had them before it was sharded.
    """

    def __init__(
        self,
        named_parameters: Mapping[str, Parameter],
        *,
        rounded: torch.dtype | None = None,
        initial: Unrounded | None = None,
        agree: Agree | None = None,
    ) -> None:
        self._parameters = dict(named_parameters)
        self._rounded = rounded
        self._initial: Unrounded = initial or {}
        self._agree = agree
        self.begins: dict[str, tuple[int, ...]] = {}
        """Index in each parameter at which the local tensor begins."""
        self._parts: dict[str, Parameter] = {}
        self.extend()

    @property
    def has_masters(self) -> bool:
        """True when the forward pass reads them rounded."""
        return self._rounded is not None

    @property
    def names(self) -> Collection[str]:
        """Parameters of which this or another rank updates parts."""
        return self.begins.keys()

    def parts(self) -> dict[str, Parameter]:
        """What this rank updates, by name, in the local shape. Empty parts are left out."""
        return dict(self._parts)

    def extend(self) -> None:
        """Take in parameters that were sharded since."""
        new = {
            name: parameter
            for name, parameter in self._parameters.items()
            if name not in self.begins and isinstance(parameter, DTensor)
        }
        for name, parameter in new.items():
            local, self.begins[name] = shard_of(parameter)
            if local.numel():
                self._parts[name] = Parameter(local)
        if self._rounded is not None:
            exact = still_initial(new.values(), self._initial, self._agree, restore=self._rounded)
            self.copy_from_model([n for n, parameter in new.items() if parameter not in exact])

    def cut(self, name: str, value: Tensor) -> Tensor:
        """Return the part of `value`, which is sharded as parameter `name`."""
        assert isinstance(value, DTensor), f"state of {name} is not sharded as its parameter"
        return value.to_local()

    def attach_gradients(self) -> None:
        """Give each part the local gradient of its parameter."""
        for name, part in self._parts.items():
            grad = self._parameters[name].grad
            part.grad = grad.to_local() if isinstance(grad, DTensor) else None

    def begin_gather(self, *, rounded: bool = False) -> None:
        """Nothing: a forward pass gathers what it needs."""

    def copies(self) -> dict[Parameter, Tensor]:
        """None: the forward pass rounds what it gathers."""
        return {}

    def wait(self, names: Iterable[str] | None = None) -> None:
        """Nothing to wait for."""

    @torch.no_grad()
    def copy_from_model(self, names: Collection[str] = ()) -> None:
        """Round those of `names` to what the forward pass reads: parts are the parameters."""
        for name in names:
            part = self._parts.get(name)
            if part is not None and self._rounded is not None and part.is_floating_point():
                part.copy_(part.to(self._rounded))

    def close(self, *, wait: bool = True) -> None:
        """Nothing to let go."""

    def release(self, *, wait: bool = True) -> None:
        """Forget the parts."""
        self._parts, self.begins = {}, {}

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Parts, for memory reports and tests."""
        return tuple(self._parts.values())
