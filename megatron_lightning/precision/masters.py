"""Float32 masters of low-precision weights, put under any torch optimizer in place.

The optimizer's groups keep their identity, so schedulers that hold them keep working; only the
parameters listed in them are exchanged (mixed-precision training with master weights, arXiv
1710.03740). Masters are whole local tensors, not shards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer

from megatron_lightning.precision.changes import MasterCopy

Unrounded = Mapping[Parameter, Callable[[], Tensor]]
"""How to draw a parameter's initial values again, before they were rounded to its dtype."""


Agree = Callable[[Tensor], None]
"""Gives a tensor, in place, the least values that ranks have which hold parts of the same
parameters."""


@torch.no_grad()
def still_initial(
    parameters: Iterable[Parameter],
    initial: Unrounded,
    agree: Agree | None = None,
    *,
    restore: torch.dtype | None = None,
) -> Unrounded:
    """`initial` of those parameters whose values are the initial ones in all parts, also those of
    other ranks; left out are such as were loaded or changed. All ranks call it with corresponding
    parameters; `agree` is called once, or nowhere.

    With `restore`, a dtype that parameters of more digits are read in, values count as rounded to
    it, and local ones that are the initial ones then become those before rounding.
    """
    known = [parameter for parameter in dict.fromkeys(parameters) if parameter in initial]
    if not known:
        return {}
    verdicts = torch.stack([_equal(p, initial[p](), restore) for p in known]).int()
    if agree is not None:
        agree(verdicts)
    same = verdicts.tolist()
    return {p: initial[p] for p, verdict in zip(known, same, strict=True) if verdict}


def _equal(parameter: Parameter, value: Tensor, restore: torch.dtype | None) -> Tensor:
    """Whether the local values are `value`, rounded."""
    held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    read = held.dtype if restore is None else restore
    same = (value.to(read) == held.to(read)).all()
    if restore is not None:
        held.copy_(torch.where(same, value.to(held.dtype), held))
    return same


class MasterParameters:
    """Masters of all parameters of the given optimizers whose dtype isn't `dtype`.

    A step is: `attach_gradients`, the optimizer's step, `copy_to_model`, `detach_gradients`.
    Parameters that already have the dtype are left to the optimizer as they are. The masters take
    over optimizer state that is there. They begin as the model's weights, and while these are the
    initial ones, as those before rounding: a master that begins as the rounded value lies in the
    middle of what is rounded alike, so that the first small steps would move no weight at all. A
    weight of which any value, on any rank, is changed before the first batch is the master as it
    is, all of it (`changes.WeightChanges`). Of what is changed later masters take the elements that
    are others (`master_copies`).
    """

    def __init__(
        self,
        optimizers: Optimizer | Sequence[Optimizer],
        named_parameters: Mapping[str, Parameter],
        *,
        dtype: torch.dtype = torch.float32,
        initial: Unrounded | None = None,
        agree: Agree | None = None,
    ) -> None:
        self._initial: Unrounded = initial or {}
        self._agree = agree
        self._optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        self._names = {parameter: name for name, parameter in named_parameters.items()}
        self._dtype = dtype
        self._master_of: dict[Parameter, Parameter] = {}
        self.weights: dict[str, Parameter] = {}
        """The model's, by name, of which there are masters."""
        self.adopt()

    def adopt(self) -> None:
        """Make masters for parameters that were added to the optimizers since; no effect when there
        are none.
        """
        masters = set(self._master_of.values())
        found = [
            (optimizer, group["params"], i, parameter)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for i, parameter in enumerate(group["params"])
            if parameter not in masters and self._needs_master(parameter)
        ]
        exact = still_initial((parameter for *_, parameter in found), self._initial, self._agree)
        for optimizer, members, i, parameter in found:
            members[i] = self._adopt(optimizer, parameter, exact)

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Round the masters to the model's weights."""
        if self._master_of:
            torch._foreach_copy_(list(self._master_of), list(self._master_of.values()))

    @torch.no_grad()
    def copy_from_model(self, names: Collection[str] | None = None) -> None:
        """Take the model's weights for the masters (after weights were loaded without masters), or
        those of `names`.
        """
        wanted = {
            parameter: master
            for parameter, master in self._master_of.items()
            if names is None or self._names[parameter] in names
        }
        if wanted:
            torch._foreach_copy_(list(wanted.values()), list(wanted))

    def master_copies(self, names: Iterable[str]) -> dict[str, MasterCopy]:
        """The masters of the model's weights `names`, to be compared with these."""
        wanted = {name: self.weights[name] for name in names}
        return {name: MasterCopy(self._master_of[w], w.detach()) for name, w in wanted.items()}

    def attach_gradients(self) -> None:
        """Give each master its weight's gradient: the same tensor where that has the masters'
        dtype.
        """
        for parameter, master in self._master_of.items():
            master.grad = None if parameter.grad is None else parameter.grad.to(self._dtype)

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Add the weights' gradients to those of the masters, and take them from the weights."""
        for parameter, master in self._master_of.items():
            if parameter.grad is not None:
                grad = parameter.grad.to(self._dtype)
                master.grad = grad if master.grad is None else master.grad.add_(grad)
                parameter.grad = None

    def detach_gradients(self) -> None:
        """Take the masters' gradients away."""
        for master in self._master_of.values():
            master.grad = None

    def named_masters(self) -> dict[str, Parameter]:
        """Return what the optimizers update, by canonical name: the master, or the weight where
        there is none.
        """
        return {
            name: self._master_of.get(parameter, parameter)
            for parameter, name in self._names.items()
        }

    def copies(self) -> dict[Parameter, Parameter]:
        """Return the model's weight, which is a rounded copy, of each master."""
        return {master: parameter for parameter, master in self._master_of.items()}

    def master_of(self, parameter: Parameter) -> Parameter:
        """Return what the optimizer updates for a weight: its master, or itself."""
        return self._master_of.get(parameter, parameter)

    def _needs_master(self, parameter: Parameter) -> bool:
        return parameter.is_floating_point() and parameter.dtype is not self._dtype

    def _adopt(self, optimizer: Optimizer, parameter: Parameter, exact: Unrounded) -> Parameter:
        if parameter not in self._names:
            raise ValueError(
                "configure_optimizers: an optimizer holds a parameter of shape"
                f" {tuple(parameter.shape)} that is not one of the module's; pass parameters of"
                " this module only"
            )
        master = self._master_of.get(parameter)
        if master is None:
            values = exact[parameter]() if parameter in exact else parameter.detach()
            master = Parameter(values.to(self._dtype), requires_grad=parameter.requires_grad)
            self._master_of[parameter] = master
            self.weights[self._names[parameter]] = parameter
        if parameter in optimizer.state:
            optimizer.state[master] = {
                key: self._convert(value, parameter)
                for key, value in optimizer.state.pop(parameter).items()
            }
        return master

    def _convert(self, value: object, parameter: Parameter) -> object:
        elementwise = (
            isinstance(value, Tensor)
            and value.shape == parameter.shape
            and value.is_floating_point()
        )
        return value.to(self._dtype) if elementwise and isinstance(value, Tensor) else value
