"""Regions of a network whose activations are computed again in the backward pass.

A region is a callable `region(function, *args)` that a module runs its own forward through. The
recomputed one draws the same dropout masks as the first (`Streams.recompute_contexts`), so that
training is bitwise the same. Non-re-entrant checkpointing (torch.utils.checkpoint; the idea is that
of arXiv 1604.06174) is used throughout: it nests, lets gradient hooks fire once, and stops as soon
as the last tensor that is needed is there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_lightning.parallel.kept_buffers import compile_options
from megatron_lightning.parallel.streams import Streams

Region = Callable[..., Any]
"""`region(function, *args, **kwargs)` runs and returns `function(*args, **kwargs)`."""

_ATTRIBUTE = "_region"


class Recomputed:
    """Keeps the tensors among the arguments, and recomputes what the function saved."""

    def __init__(self, streams: Streams | None) -> None:
        """`streams`: source of the dropout masks inside; None when there is none but torch's own,
        which is restored anyway.
        """
        self.streams = streams

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `function`; without gradients, just that."""
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if self.streams is None:
            return checkpoint(function, *args, use_reentrant=False, **kwargs)
        return _eagerly(self.streams, function, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Recomputed:
        """Itself: a copied network (weight averaging makes some) draws from the same source."""
        return self


def _checkpoint_with_masks(
    streams: Streams, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    return checkpoint(
        function, *args, use_reentrant=False, context_fn=streams.recompute_contexts, **kwargs
    )


# A compiled function would run its own code forward and other code in the recomputation.
_eagerly: Callable[..., Any] = torch.compiler.disable(_checkpoint_with_masks)  # type: ignore[assignment]


def nested(outer: Region, inner: Region) -> Region:
    """Run through `outer` what runs through `inner`."""
    return functools.partial(outer, inner)


def add_region(module: nn.Module, region: Region) -> None:
    """Make `module` run its forward through `region`, around regions that it has already.

    In place: its class becomes a subclass, so that names, hooks and references stay, and a copy of
    the module keeps the region.
    """
    inner = vars(module).get(_ATTRIBUTE)
    object.__setattr__(module, _ATTRIBUTE, region if inner is None else nested(region, inner))
    if not isinstance(module, _HasRegion):
        module.__class__ = _with_region(type(module))


def clear_region(module: nn.Module) -> None:
    """Undo `add_region`; nothing happens to a module without a region."""
    if isinstance(module, _HasRegion):
        object.__delattr__(module, _ATTRIBUTE)
        cast(Any, module).__class__ = _class_without_region(module)


def compile_inside(module: nn.Module, *, keeps_buffers: bool = False) -> None:
    """`module.compile()`, or where the module has a region, compile what runs inside of it, so that
    the recomputation runs the same code. Modules of one class share it. `keeps_buffers`: see
    `parallel/kept_buffers.py`.
    """
    if isinstance(module, _HasRegion):
        kind, compiled = _class_without_region(module), "keeping" if keeps_buffers else "plainly"
        cast(Any, module).__class__ = _with_region(kind, compiled)
    else:
        module.compile(**compile_options(keeps_buffers=keeps_buffers))


class _HasRegion:
    """Marks the classes that `add_region` makes."""


def _class_without_region(module: nn.Module) -> type[nn.Module]:
    return cast(type[nn.Module], type(module).__bases__[1])


@functools.cache
def _with_region(
    kind: type[nn.Module], compiled: Literal["", "plainly", "keeping"] = ""
) -> type[nn.Module]:
    inner: Callable[..., Any] = kind.forward
    if compiled:
        options = compile_options(keeps_buffers=compiled == "keeping")
        inner = torch.compile(kind.forward, **options)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, _ATTRIBUTE)(functools.partial(inner, self), *args, **kwargs)

    members = {"forward": forward, "__module__": kind.__module__, "__doc__": kind.__doc__}
    return cast(type[nn.Module], type(kind.__name__, (_HasRegion, kind), members))
