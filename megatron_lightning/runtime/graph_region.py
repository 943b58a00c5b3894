"""What a graphed module runs its forward through, and what a replay of it would leave out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules import module as global_hooks

from megatron_lightning.layers.dropout import Dropout, Jitter
from megatron_lightning.layers.moe.layer import MoELayer
from megatron_lightning.layers.moe.remote import AllToAllDispatcher
from megatron_lightning.layers.moe.router import Router
from megatron_lightning.parallel.quantized.products import QuantizedProducts
from megatron_lightning.parallel.streams import Streams

State = tuple[object, ...]


class Runs(Protocol):
    """Decides how a region's module runs: `LayerGraphs`."""

    def run(
        self, region: GraphRegion, function: Callable[..., Tensor], args: tuple[Any, ...]
    ) -> Any:
        """Its forward."""
        ...


class GraphRegion:
    """One module and all that its graphs depend on."""

    def __init__(self, graphs: Runs, module: nn.Module, name: str, streams: Streams | None) -> None:
        self._graphs = graphs
        self.module = module
        self.name = name
        self.parameters: list[Parameter] = list(module.parameters())
        self._modules = list(module.modules())
        self._inside = [(path, m) for path, m in module.named_modules() if path]
        self._hooks = [
            hooks
            for _, m in self._inside
            for hooks in (
                m._forward_hooks,
                m._forward_pre_hooks,
                m._backward_hooks,
                m._backward_pre_hooks,
            )
        ]
        self._buffers = [(m._buffers, name) for m in self._modules for name in m._buffers]
        self._routers = [m for m in self._modules if isinstance(m, Router)]
        moved = [m.dispatcher for m in self._modules if isinstance(m, MoELayer)]
        self._clocks = [d.ranks.clock for d in moved if isinstance(d, AllToAllDispatcher)]
        self._rounded: list[tuple[QuantizedProducts, Any]] = []
        draws = any(isinstance(m, (Dropout, Jitter)) and m.draws for m in self._modules)
        self.generators: Sequence[torch.Generator] = (
            streams.generators() if draws and streams is not None else ()
        )

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `function(*args)`."""
        if kwargs or not isinstance(function, functools.partial):
            return function(*args, **kwargs)
        return _eagerly(self._graphs, self, function, args)

    def hold_rounded_weights(self) -> None:
        """Let weights in low precision be rounded in place from now on."""
        held = [(getattr(m, "quantized", None), m) for m in self._modules]
        self._rounded = [(p, m) for p, m in held if isinstance(p, QuantizedProducts)]
        for products, _ in self._rounded:
            products.weight_stays = True

    def round_weights(self) -> None:
        """Round weights that have changed since they were, which no graph does."""
        for products, module in self._rounded:
            products.refresh(module.weight)

    def tensors(self) -> list[Tensor]:
        """What graphs read and write besides gradients, where it lies now."""
        buffers = [tensor for place, name in self._buffers if (tensor := place[name]) is not None]
        return [*self.parameters, *buffers, *(r.statistics.tokens for r in self._routers)]

    @property
    def is_timed(self) -> bool:
        """Whether somebody wants to know how long rows travel, which a graph doesn't tell."""
        return any(clock.watching for clock in self._clocks)

    @property
    def is_settled(self) -> bool:
        """False while low precision works in another way than it will later on."""
        return all(products.recipe.is_settled for products, _ in self._rounded)

    def state(self) -> State:
        """What a recording takes as given: which modules train, which weights, and where rounded
        ones lie.
        """
        modes = [m.training for m in self._modules]
        trained = [parameter.requires_grad for parameter in self.parameters]
        return (*modes, *trained, *[products.weight_addresses for products, _ in self._rounded])

    def reason(self, args: Sequence[Any]) -> str | None:
        """Why a replay would not be what the layer does; None: it would."""
        if any(self._hooks):
            names = [
                path
                for path, m in self._inside
                if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks
            ]
            return f"hooks of {names or 'its modules'} would not be called by a graph"
        if any(_GLOBAL_HOOKS):
            return "hooks for all modules (register_module_*_hook) would not be called by a graph"
        if any(parameter._backward_hooks for parameter in self.parameters):
            return "a hook on a parameter's gradient would not be called by a graph"
        x = args[0]
        if not isinstance(x, Tensor):
            return f"its first argument is {type(x).__name__}, not a tensor"
        if torch.is_autocast_enabled(x.device.type):
            return "autocast keeps weights in memory of its own"
        if torch._C._len_torch_dispatch_stack():
            return "a TorchDispatchMode would not see the operations of a graph"
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """Nothing: a copied network runs as ever."""
        return _plainly


_GLOBAL_HOOKS = (
    global_hooks._global_forward_hooks,
    global_hooks._global_forward_pre_hooks,
    global_hooks._global_backward_hooks,
    global_hooks._global_backward_pre_hooks,
)


def _plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _run(
    graphs: Runs, region: GraphRegion, function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    return graphs.run(region, function, args)


# Where a region lies in a compiled layer, that is cut around it.
_eagerly: Any = torch.compiler.disable(_run)
