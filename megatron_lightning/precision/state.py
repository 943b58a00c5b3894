"""Optimizer state as named tensors, and which optimizers may work on parts of a parameter.

An element-wise optimizer treats every entry of a tensor alone, so it may be given a shard; its
state has the shape of the parameter, or is a 0-dim count. Others (LBFGS, Adafactor, Muon) need
whole tensors.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

ELEMENTWISE_OPTIMIZERS: tuple[type[Optimizer], ...] = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
ELEMENTWISE_ATTRIBUTE = "elementwise"
"""An optimizer of another class with this attribute set to True is taken to be element-wise."""


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether an optimizer treats every entry of a tensor alone.

    Exactly torch's own classes are known; a subclass may do anything, so it has to say so:
    `elementwise = True`.
    """
    return (
        type(optimizer) in ELEMENTWISE_OPTIMIZERS
        or getattr(optimizer, ELEMENTWISE_ATTRIBUTE, False) is True
    )


def check_elementwise(optimizer: Optimizer, split_names: Iterable[str]) -> None:
    """Refuse an optimizer that needs whole tensors when it would be given parts of some
    (`split_names`).
    """
    names = sorted(split_names)
    if names and not is_elementwise(optimizer):
        raise ValueError(
            f"optimizer={type(optimizer).__qualname__}: it is not known to treat every entry of a"
            f" tensor alone, but {len(names)} parameters are split over ranks (first:"
            f" {names[0]!r}). Use one of {[known.__name__ for known in ELEMENTWISE_OPTIMIZERS]}, no"
            " splitting, or set `elementwise = True` on its class if it is"
        )


def optimizer_state_tensors(
    optimizer: Optimizer, named_parameters: Mapping[str, Parameter], *, materialise: bool = False
) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of the optimizer's state: {parameter name: {state key: tensor}}, none
    copied.

    `named_parameters` are what the optimizer updates (`MasterParameters.named_masters`). A
    parameter that was never stepped has no state and isn't listed, unless `materialise` makes one
    first, to be loaded into in place; `discard_state` undoes that for names that turn out to have
    nothing to load.
    """
    if materialise:
        materialise_state(optimizer)
    return {
        name: {
            key: value
            for key, value in optimizer.state[parameter].items()
            if isinstance(value, Tensor)
        }
        for name, parameter in named_parameters.items()
        if parameter in optimizer.state
    }


def materialise_state(optimizer: Optimizer) -> list[Parameter]:
    """Give every trainable parameter without state the state that a first step would make; return
    those parameters.

    The step is taken on stand-ins (zeros, with zero gradients) by a copy of the optimizer, one
    parameter at a time: the parameters, hooks and step counts of the real one are not touched. The
    values mean nothing until they are loaded over. ValueError for optimizers that aren't
    element-wise, whose state has no such form.
    """
    fresh = [
        (group, parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad and not optimizer.state.get(parameter)
    ]
    if fresh:
        check_elementwise(optimizer, [f"parameter of shape {tuple(fresh[0][1].shape)}"])
    shadow = _copy_without_hooks(optimizer)
    for group, parameter in fresh:
        stand_in = Parameter(torch.zeros_like(parameter))
        stand_in.grad = torch.zeros_like(stand_in)
        shadow.state.clear()
        shadow.param_groups = [{**group, "params": [stand_in]}]
        shadow.step()
        if shadow.state.get(stand_in):
            optimizer.state[parameter] = shadow.state[stand_in]
    return [parameter for _, parameter in fresh]


def discard_state(optimizer: Optimizer, parameters: Iterable[Parameter]) -> None:
    """Forget the state of `parameters`: their next step is a first one."""
    for parameter in parameters:
        optimizer.state.pop(parameter, None)


@torch.no_grad()
def widen_state(
    optimizer: Optimizer, parameters: Iterable[Parameter], from_dtype: torch.dtype
) -> None:
    """Bring state that is kept in `from_dtype` to the dtype of its parameter, for a step."""
    for parameter in parameters:
        for key, value in optimizer.state.get(parameter, {}).items():
            if _is_elementwise(value, parameter) and value.dtype is from_dtype:
                optimizer.state[parameter][key] = value.to(parameter.dtype)


@torch.no_grad()
def narrow_state(
    optimizer: Optimizer,
    named_parameters: Mapping[str, Parameter],
    dtype: torch.dtype,
    *,
    seed: str,
) -> None:
    """Keep element-wise state in `dtype`, rounded stochastically.

    A second moment with decay 0.999 changes by less than half a unit of bfloat16 a step, so that
    rounding to the nearest would leave it where it is. The draw depends on `seed` and the names
    only: ranks that hold equal parts round alike, and a resumed run as an uninterrupted one.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for name, parameter in named_parameters.items():
        state = optimizer.state.get(parameter, {})
        for key in sorted(key for key, v in state.items() if _is_elementwise(v, parameter)):
            value = state[key]
            if value.dtype is dtype:
                continue
            if value.device not in generators:
                generators[value.device] = torch.Generator(value.device)
            digest = hashlib.blake2b(f"{seed}\0{key}\0{name}".encode(), digest_size=7).digest()
            generator = generators[value.device].manual_seed(int.from_bytes(digest, "big"))
            state[key] = round_stochastically(value, dtype, generator)


def round_stochastically(x: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Round float32 `x` to bfloat16, up or down with the probability that keeps the mean.

    Other pairs of dtypes are rounded to the nearest. Infinities and NaNs stay.
    """
    if x.dtype is not torch.float32 or dtype is not torch.bfloat16:
        return x.to(dtype)
    # bfloat16 is the upper half of a float32: noise in the lower half carries over into it.
    noise = torch.randint(
        0, 1 << 16, x.shape, generator=generator, dtype=torch.int32, device=x.device
    )
    bits = noise.add_(x.view(torch.int32)).bitwise_and_(-(1 << 16))
    return torch.where(torch.isfinite(x), bits.view(torch.float32), x).to(dtype)


def _is_elementwise(value: object, parameter: Tensor) -> TypeGuard[Tensor]:
    return (
        isinstance(value, Tensor)
        and value.shape == parameter.shape
        and value.dim() > 0
        and value.is_floating_point()
    )


def _copy_without_hooks(optimizer: Optimizer) -> Optimizer:
    """A copy that shares hyper-parameters but neither state, hooks nor a `step` wrapped by a
    scheduler.
    """
    shadow = copy.copy(
        optimizer
    )  # goes through the pickling protocol of Optimizer, which leaves hooks out
    own: dict[str, Any] = vars(shadow)
    own.update(
        {key: value for key, value in vars(optimizer).items() if key not in own and key != "step"}
    )
    shadow.state = copy.copy(optimizer.state)
    return shadow
