"""One layer's forward and backward as two graphs over memory that stays where it is.

As in `torch.cuda.make_graphed_callables`, but recorded in the course of training, forward and
backward each at its first use. Gradients are added to the main gradients within the graph; what
Python notes about them is noted again at each replay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from megatron_lightning.layers.rotary import RotaryTables, tensor_version
from megatron_lightning.parallel.flat import Slot
from megatron_lightning.runtime.graph_recorder import Recorder, Replay
from megatron_lightning.runtime.graph_region import State

Signature = tuple[Any, ...]


def signature_of(args: Sequence[Any]) -> Signature | None:
    """What graphs are made for: shapes and dtypes of a layer's arguments; None where there is an
    argument whose content graphs would keep (packed documents).
    """
    found: list[Any] = []
    for arg in args:
        if isinstance(arg, Tensor):
            found.append((arg.shape, arg.stride(), arg.dtype, arg.requires_grad))
        elif isinstance(arg, RotaryTables):
            found.append((arg.cos.shape, arg.sin.shape, arg.cos.dtype, arg.interleaved))
        elif arg is None:
            found.append(None)
        else:
            return None
    return tuple(found)


@dataclass(eq=False)
class Shared:
    """Memory that holds an argument of several layers, such as rotary tables."""

    source: Tensor
    version: object
    static: Tensor
    micro_batch: int

    def holds(self, tensor: Tensor) -> bool:
        """Whether its content is that of `tensor`."""
        return tensor is self.source and tensor_version(tensor) == self.version

    def take(self, tensor: Tensor, micro_batch: int) -> None:
        """Copy `tensor` unless it is there."""
        if not self.holds(tensor):
            self.static.data.copy_(tensor)
            self.source, self.version = tensor, tensor_version(tensor)
        self.micro_batch = micro_batch


@dataclass(eq=False)
class GraphSet:
    """The graphs of a micro-batch of one kind, and what its layers share."""

    first: bool
    """Whether gradients overwrite the main gradients, being a window's first."""
    seen: int = 0
    """Micro-batches of the kind that ran without graphs."""
    layers: dict[Any, GraphedLayer] = field(default_factory=dict)
    """The graphs of each layer."""
    shared: list[Shared] = field(default_factory=list)
    static: dict[int, Tensor] = field(default_factory=dict)
    """Address -> outputs of graphs, which others may read in place."""

    def own(self, tensor: Tensor) -> Tensor:
        """`tensor` itself where a graph writes it each time, else memory for copies of it."""
        known = self.static.get(tensor.data_ptr())
        same = known is not None and known.shape == tensor.shape
        if same and known is not None and known.stride() == tensor.stride():
            return known
        return tensor.detach().clone()

    def share(self, tensor: Tensor, micro_batch: int) -> Shared:
        """Memory for an argument."""
        for one in self.shared:
            if one.holds(tensor):
                return one
        made = Shared(tensor, tensor_version(tensor), tensor.detach().clone(), micro_batch)
        self.shared.append(made)
        return made


class StandsFor:
    """Puts other parameters over the same memory into a module while it runs.

    A parameter's node in autograd belongs to the stream on which it was first used, and a recording
    would have to wait for that one.
    """

    def __init__(self, module: nn.Module, parameters: Sequence[Parameter]) -> None:
        self.parameters = [Parameter(parameter.detach()) for parameter in parameters]
        for parameter, stand in zip(parameters, self.parameters, strict=True):
            stand.grad_dtype = parameter.grad_dtype  # else autograd rounds what is more exact
        pairs = zip(parameters, self.parameters, strict=True)
        stands = {id(parameter): (parameter, stand) for parameter, stand in pairs}
        self._places = [
            (part._parameters, name, *stands[id(parameter)])
            for part in module.modules()
            for name, parameter in part._parameters.items()
            if id(parameter) in stands
        ]

    def __enter__(self) -> None:
        for place, name, _, stand in self._places:
            place[name] = stand

    def __exit__(self, *error: object) -> None:
        for place, name, parameter, _ in self._places:
            place[name] = parameter


class GraphedLayer:
    """The two graphs of one layer for one `GraphSet`."""

    def __init__(
        self,
        graphs: GraphSet,
        recorder: Recorder,
        module: nn.Module,
        parameters: Sequence[Parameter],
        slots: Sequence[Slot],
        generators: Sequence[torch.Generator],
        order: int,
        state: State,
    ) -> None:
        """`parameters` that are trained, and `slots` where their gradients are summed."""
        self._graphs, self._recorder = graphs, recorder
        self._parameters, self._slots, self._generators = parameters, slots, generators
        self.order = order
        """Place among the layers of the set, in forward."""
        self.state = state
        """The region's when it was recorded."""
        self.signature: Signature = ()
        self._shared: list[tuple[int, str, Shared]] = []
        self._inputs: list[tuple[int, Tensor]] = []
        """Place among the arguments and memory of those that gradients may be wanted of."""
        self._output = self._made = torch.empty(0)
        self._stands = StandsFor(module, parameters)
        self._grad_output: Tensor | None = None
        self._grad_inputs: tuple[Tensor | None, ...] = ()
        self._added: list[Slot] = []
        self._filled: list[bool] = []
        """Which sums held something when backward was recorded."""
        self._replay_forward: Replay | None = None
        self._replay_backward: Replay | None = None

    @property
    def is_complete(self) -> bool:
        """Whether both graphs are there."""
        return self._replay_backward is not None

    def fits(self, args: Sequence[Any], signature: Signature, micro_batch: int) -> bool:
        """Whether the graphs can be replayed with these arguments."""
        return signature == self.signature and all(
            one.holds(_part(args[index], name)) or one.micro_batch != micro_batch
            for index, name, one in self._shared
        )

    def record(
        self,
        function: Callable[..., Tensor],
        args: Sequence[Any],
        signature: Signature,
        micro_batch: int,
    ) -> None:
        """Make the graph of `function(*args)`, which is not run by that."""
        self.signature = signature
        static = list(args)
        for index, arg in enumerate(args):
            if arg is None:
                continue
            if index == 0 or (isinstance(arg, Tensor) and arg.requires_grad):
                static[index] = self._graphs.own(arg).detach().requires_grad_(arg.requires_grad)
                self._inputs.append((index, static[index]))
                continue
            names = ("cos", "sin") if isinstance(arg, RotaryTables) else ("",)
            held = [self._graphs.share(_part(arg, name), micro_batch) for name in names]
            self._shared += [(index, n, one) for n, one in zip(names, held, strict=True)]
            if isinstance(arg, RotaryTables):
                static[index] = dataclasses.replace(arg, cos=held[0].static, sin=held[1].static)
            else:
                static[index] = held[0].static

        def forward() -> Tensor:
            with torch.enable_grad(), self._stands:
                self._made = function(*static)
            if not isinstance(self._made, Tensor):
                raise RuntimeError(f"it gives {type(self._made).__name__}, not one tensor")
            return self._made.detach()

        self._replay_forward, self._output = self._recorder.record(forward, self._generators)
        self._graphs.static[self._output.data_ptr()] = self._output

    def __call__(self, args: Sequence[Any], micro_batch: int) -> Tensor:
        """Replay the forward graph; autograd will replay the other."""
        for index, name, one in self._shared:
            one.take(_part(args[index], name), micro_batch)
        inputs = [args[index] for index, _ in self._inputs]
        return _Replayed.apply(self, len(inputs), *inputs, *self._parameters)

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Layer inputs -> output, in memory that the next micro-batch overwrites."""
        assert self._replay_forward is not None
        for given, (_, static) in zip(inputs, self._inputs, strict=True):
            if given.data_ptr() != static.data_ptr():
                static.data.copy_(given)  # past the versions that autograd checks
        self._replay_forward()
        return self._output.detach()

    def backward(self, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradient of the output -> of each input; those of parameters go to their sums."""
        for slot in self._slots:
            slot.check_open()
            if not self._graphs.first:
                slot.fill()
        kept: list[tuple[Slot, Tensor]] = []
        if self._replay_backward is None:
            self._record_backward(grad)
        else:
            kept = self._kept()
            assert self._grad_output is not None
            if grad.data_ptr() != self._grad_output.data_ptr():
                self._grad_output.data.copy_(grad)
        assert self._replay_backward is not None
        self._replay_backward()
        for slot, sum_before in kept:
            slot.main_grad.add_(sum_before)
        for slot in self._added:
            slot.filled = slot.summed = slot.received = True
        return tuple(None if found is None else found.detach() for found in self._grad_inputs)

    def _kept(self) -> list[tuple[Slot, Tensor]]:
        """Sums that the graph would overwrite though they hold something by now: it does what was
        right when it was recorded, and a step may call the layer more often than that one did.
        """
        kept = []
        for slot, was in zip(self._slots, self._filled, strict=True):
            if was:
                slot.fill()  # the graph adds
            elif slot.filled and any(slot is one for one in self._added):
                kept.append((slot, slot.main_grad.clone()))
        return kept

    def _record_backward(self, grad: Tensor) -> None:
        self._filled = [slot.filled for slot in self._slots]
        self._grad_output = static = self._graphs.own(grad)

        inputs = [static for _, static in self._inputs if static.requires_grad]

        def backward() -> list[Tensor | None]:
            found = torch.autograd.grad(
                self._made, [*inputs, *self._stands.parameters], static, allow_unused=True
            )
            for slot, grad in zip(self._slots, found[len(inputs) :], strict=True):
                if grad is not None:
                    slot.add(grad)
                    slot.summed = True
            return list(found[: len(inputs)])

        self._replay_backward, made = self._recorder.record(backward, self._generators)
        found = iter(made)
        self._grad_inputs = tuple(
            next(found) if static.requires_grad else None for _, static in self._inputs
        )
        self._made = self._output  # lets go of what was kept for backward
        self._added = [slot for slot in self._slots if slot.summed]
        for tensor in self._grad_inputs:
            if tensor is not None:
                self._graphs.static[tensor.data_ptr()] = tensor


class _Replayed(torch.autograd.Function):
    """Stands for the layer in autograd. Parameters are among the inputs so that their hooks are
    called when the layer's gradients are there.
    """

    @staticmethod
    def forward(ctx: Any, layer: GraphedLayer, num_inputs: int, *tensors: Tensor) -> Tensor:
        ctx.layer, ctx.num_parameters = layer, len(tensors) - num_inputs
        return layer.forward(tensors[:num_inputs])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.layer.backward(grad), *(None,) * ctx.num_parameters


def _part(arg: Any, name: str) -> Tensor:
    return getattr(arg, name) if name else arg
