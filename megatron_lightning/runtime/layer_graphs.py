"""Which layers of a cut network run as CUDA graphs, and when these are made, used and dropped.

A micro-batch of a new kind (shapes; whether it is a window's first) runs twice as ever, then once
to record, and by replays from there on. What a replay would leave out makes a layer run as ever,
with one warning.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from megatron_lightning.layers.dropout import Dropout, Jitter
from megatron_lightning.parallel.data import GradientBuckets
from megatron_lightning.parallel.flat import Slot
from megatron_lightning.parallel.recompute import add_region
from megatron_lightning.parallel.streams import Streams
from megatron_lightning.runtime.graph_recorder import Recorder
from megatron_lightning.runtime.graphed_layer import GraphedLayer, GraphSet, signature_of
from megatron_lightning.utils.logging import warn_once

WARM_MICRO_BATCHES = 2
"""Micro-batches of a kind before it is recorded: kernels are compiled and chosen in them."""
MAX_SETS = 8
"""Kinds that are recorded; each holds memory for inputs and outputs of all layers."""
_MAX_RESTARTS = 3


class LayerGraphs:
    """The graphs of one rank."""

    def __init__(self, make_recorder: Callable[[], Recorder], streams: Streams | None) -> None:
        """`streams`: where layers draw dropout masks from."""
        self._make_recorder = make_recorder
        self._streams = streams
        self._buckets: GradientBuckets | None = None
        self._recorder: Recorder | None = None
        self._regions: list[GraphRegion] = []
        self._sets: dict[Any, GraphSet] = {}
        self._slots: Mapping[int, Slot] = {}
        self._mark: tuple[tuple[int, bool], ...] = ()
        self._restarts = 0
        self._begun = self._chosen = False
        self._first = False
        self._current: GraphSet | None = None
        self._recording = False
        self._position = -1
        self.inner_modules: list[nn.Module] = []
        """Those that are only a part of a layer: compiled layers break around them."""
        self.micro_batch = 0
        """Counts training forwards."""
        self.num_replays = 0
        """Counts layers that ran as graphs."""

    def add(self, module: nn.Module, name: str) -> None:
        """Let `module` run as graphs where it can."""
        region = GraphRegion(self, module, name, self._streams)
        self._regions.append(region)
        add_region(module, region)

    def set_buckets(self, buckets: object) -> None:
        """Say where gradients are summed from now on; earlier graphs are dropped."""
        self._buckets = buckets if isinstance(buckets, GradientBuckets) else None
        self._drop()
        self._mark = ()
        self._restarts = 0
        self._slots = {}
        if self._buckets is not None:
            self._slots = {id(slot.parameter): slot for slot in self._buckets.slots.values()}

    def begin_forward(self) -> None:
        """Before each training forward of a micro-batch."""
        self.micro_batch += 1
        self._begun, self._current, self._position = True, None, -1
        self._chosen = False
        self._first = not any(slot.filled for slot in self._slots.values())
        if self._buckets is None:
            return
        tensors = [*self._buckets.buffers]
        for region in self._regions:
            tensors += region.parameters
        mark = tuple((tensor.data_ptr(), tensor.requires_grad) for tensor in tensors)
        if mark != self._mark:
            self._restarts += bool(self._sets)
            self._drop()
            self._mark = mark
            self._slots = {id(slot.parameter): slot for slot in self._buckets.slots.values()}
            if self._restarts > _MAX_RESTARTS:
                warn_once(
                    "runtime.cuda_graphs='layers': weights or their gradients have got other memory"
                    f" more than {_MAX_RESTARTS} times, which makes graphs useless: layers run as"
                    " ever from now on"
                )

    def end_forward(self) -> None:
        """No layer is graphed outside of training forwards."""
        self._begun = False

    def run(
        self, region: GraphRegion, function: Callable[..., Tensor], args: tuple[Any, ...]
    ) -> Any:
        """A layer's forward, by its graph if there is one."""
        ready = self._begun and self._buckets is not None and self._restarts <= _MAX_RESTARTS
        if not ready or not torch.is_grad_enabled() or not region.module.training:
            return function(*args)
        signature = signature_of(args)
        reason = region.reason(args) if signature is not None else "it was given packed documents"
        if reason is not None or signature is None:
            warn_once(f"runtime.cuda_graphs='layers': {region.name} runs without graphs: {reason}")
            return function(*args)
        if not self._chosen:
            self._choose(signature)
        graphs = self._current
        if graphs is None:
            return function(*args)
        layer = graphs.layers.get(region)
        if layer is None and self._recording:
            layer = self._record(graphs, region, function, args, signature)
        if layer is None or layer.order <= self._position:
            return function(*args)
        if not layer.fits(args, signature, self.micro_batch):
            return function(*args)
        self._position = layer.order
        self.num_replays += 1
        return layer(args, self.micro_batch)

    def _choose(self, signature: Any) -> None:
        """The set of this micro-batch: by its first layer's arguments."""
        self._chosen = True
        key = (self._first, signature)
        graphs = self._sets.get(key)
        if graphs is None:
            if len(self._sets) >= MAX_SETS:
                warn_once(
                    f"runtime.cuda_graphs='layers': {MAX_SETS} kinds of micro-batches have graphs;"
                    " further ones run without. Pad batches to few shapes"
                )
                return
            graphs = self._sets[key] = GraphSet(self._first)
        unfinished = [r for r, layer in graphs.layers.items() if not layer.is_complete]
        if unfinished:  # a forward without its backward: begin again
            graphs.layers.clear()
            graphs.shared.clear()
            graphs.static.clear()
        if graphs.seen < WARM_MICRO_BATCHES:
            graphs.seen += 1
            return
        self._current, self._recording = graphs, not graphs.layers

    def _record(
        self,
        graphs: GraphSet,
        region: GraphRegion,
        function: Callable[..., Tensor],
        args: tuple[Any, ...],
        signature: Any,
    ) -> GraphedLayer | None:
        if self._recorder is None:
            self._recorder = self._make_recorder()
        trained = [p for p in region.parameters if p.requires_grad]
        differentiable = args[0].requires_grad or bool(trained)
        if not differentiable or any(id(p) not in self._slots for p in trained):
            return None
        slots = [self._slots[id(p)] for p in trained]
        layer = GraphedLayer(
            graphs,
            self._recorder,
            region.module,
            trained,
            slots,
            region.generators,
            len(graphs.layers),
        )
        try:
            layer.record(function, args, signature, self.micro_batch)
        except RuntimeError as error:
            raise RuntimeError(
                f"runtime.cuda_graphs='layers': {region.name} can't be recorded: {error}. Set"
                " cuda_graphs='none'"
            ) from error
        graphs.layers[region] = layer
        return layer

    def _drop(self) -> None:
        self._sets = {}
        self._current = None
        self._recorder = None

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerGraphs:
        """Itself: a copy of a network runs as ever, since its parameters are not those of here."""
        return self


class GraphRegion:
    """What a graphed module runs its forward through."""

    def __init__(
        self, graphs: LayerGraphs, module: nn.Module, name: str, streams: Streams | None
    ) -> None:
        self._graphs = graphs
        self.module = module
        self.name = name
        self.parameters: list[Parameter] = list(module.parameters())
        inside = [(path, m) for path, m in module.named_modules() if path]
        self._inside = inside
        self._hooks = [
            hooks
            for _, m in inside
            for hooks in (
                m._forward_hooks,
                m._forward_pre_hooks,
                m._backward_hooks,
                m._backward_pre_hooks,
            )
        ]
        draws = any(isinstance(m, (Dropout, Jitter)) and m.draws for m in module.modules())
        self.generators: Sequence[torch.Generator] = (
            streams.generators() if draws and streams is not None else ()
        )

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `function(*args)`."""
        if kwargs or not isinstance(function, functools.partial):
            return function(*args, **kwargs)
        return _eagerly(self._graphs, self, function, args)

    def reason(self, args: Sequence[Any]) -> str | None:
        """Why a replay would not be what the layer does; None: it would."""
        if any(self._hooks):
            names = [
                path
                for path, m in self._inside
                if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks
            ]
            return f"hooks of {names or 'its modules'} would not be called by a graph"
        if any(parameter._backward_hooks for parameter in self.parameters):
            return "a hook on a parameter's gradient would not be called by a graph"
        x = args[0]
        if not isinstance(x, Tensor):
            return f"its first argument is {type(x).__name__}, not a tensor"
        if torch.is_autocast_enabled(x.device.type):
            return "autocast keeps weights in memory of its own"
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """Nothing: a copied network runs as ever."""
        return _plainly


def _plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _run(
    graphs: LayerGraphs, region: GraphRegion, function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    return graphs.run(region, function, args)


# Where a region lies in a compiled layer, that is cut around it.
_eagerly: Any = torch.compiler.disable(_run)
