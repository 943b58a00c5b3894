"""Which layers of a cut network run as CUDA graphs, and when these are made, used and dropped.

A micro-batch of a new kind (shapes; whether it is a window's first) runs twice as ever, then once
to record, and by replays from there on. What a replay would leave out makes a layer run as ever,
with one warning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lightning.parallel.data import GradientBuckets
from megatron_lightning.parallel.flat import Slot
from megatron_lightning.parallel.recompute import add_region
from megatron_lightning.parallel.streams import Streams
from megatron_lightning.runtime.graph_recorder import Recorder
from megatron_lightning.runtime.graph_region import GraphRegion
from megatron_lightning.runtime.graphed_layer import GraphedLayer, GraphSet, signature_of
from megatron_lightning.utils.logging import warn_once

WARM_MICRO_BATCHES = 2
"""Micro-batches of a kind before it is recorded: kernels are compiled and chosen in them."""
MAX_SETS = 8
"""Kinds that are recorded; each holds memory for inputs and outputs of all layers."""
_NO_SIGNATURE = "it was given packed documents, or something else that is no tensor"
_MAX_RESTARTS = 3
_LONG_MICRO_BATCHES = 100
"""Graphs that lived so long have paid: to make them anew is no loss."""


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
        self._mark: tuple[int, ...] = ()
        self._restarts = self._restarted = 0
        self._stale = False
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

    def hold_rounded_weights(self) -> None:
        """Once layers have their low precision: see `GraphRegion`."""
        for region in self._regions:
            region.hold_rounded_weights()

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
        # Then all run as ever.
        self._chosen = any(r.is_timed or not r.is_settled for r in self._regions)
        if self._buckets is None:
            return
        tensors = [*self._buckets.buffers]
        for region in self._regions:
            tensors += region.tensors()
        mark = tuple(tensor.data_ptr() for tensor in tensors)
        if mark != self._mark or self._stale:
            self._count_restart()
            self._drop()
            self._mark = mark
            self._slots = {id(slot.parameter): slot for slot in self._buckets.slots.values()}
            if self._restarts > _MAX_RESTARTS:
                warn_once(
                    "runtime.cuda_graphs='layers': weights or their gradients got other memory, or"
                    f" were frozen, or modules put in other modes, more than {_MAX_RESTARTS} times"
                    f" within {_LONG_MICRO_BATCHES} micro-batches each, which makes graphs useless:"
                    " layers run as ever from now on"
                )
        self._first = not any(slot.filled for slot in self._slots.values())

    def _count_restart(self) -> None:
        if not self._sets:
            return
        lived = self.micro_batch - self._restarted
        self._restarts = 1 if lived > _LONG_MICRO_BATCHES else self._restarts + 1
        self._restarted = self.micro_batch

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
        reason = region.reason(args) if signature is not None else _NO_SIGNATURE
        if reason is not None or signature is None:
            warn_once(f"runtime.cuda_graphs='layers': {region.name} runs without graphs: {reason}")
            return function(*args)
        if not self._chosen:
            self._choose(signature)
        graphs = self._current
        if graphs is None:
            return function(*args)
        region.round_weights()
        layer = graphs.layers.get(region)
        if layer is None and self._recording:
            layer = self._record(graphs, region, function, args, signature)
        if layer is None or layer.order <= self._position:
            return function(*args)
        if layer.state != region.state():
            self._stale = True  # all graphs are made anew before the next micro-batch
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
        if self._recording:
            if self._recorder is None:
                self._recorder = self._make_recorder()
            self._recorder.begin()

    def _record(
        self,
        graphs: GraphSet,
        region: GraphRegion,
        function: Callable[..., Tensor],
        args: tuple[Any, ...],
        signature: Any,
    ) -> GraphedLayer | None:
        assert self._recorder is not None
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
            region.state(),
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
        if self._recorder is not None:
            self._recorder.close()
        self._recorder = None
        self._stale = False

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerGraphs:
        """Itself: a copy of a network runs as ever, since its parameters are not those of here."""
        return self
