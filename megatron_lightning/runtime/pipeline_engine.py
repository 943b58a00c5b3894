"""Executes a pipeline schedule's action list on one rank.

The engine knows neither the model nor the schedule: a runner computes a chunk's forward, the list
says what happens when (``parallel/schedules/build.py``). It moves activations and gradients between
virtual stages, over messages or, between chunks of the same rank, by hand, and calls autograd once
for each backward. In a split one (I, W) that pass leaves weight gradients of linear layers aside,
which W computes (``parallel/weight_gradient.py``). A backward and a forward that the list pairs are
launched one right after the other into lanes of their own, on CUDA two streams
(``parallel/lanes.py``).

Memory. Of an output only its place in the graph (``GradientEdge``) is kept for the backward, so
its storage is freed when it has been sent, unless the graph itself saved it. (Megatron-Core gets
there by emptying ``output.data``, which is unsafe where an operation saved its result.) Of an input
the engine keeps only what will receive a gradient.
"""

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.lanes import Lanes
from megatron_lightning.parallel.schedules.actions import COMPUTE, Action, Kind, Placement, in_units
from megatron_lightning.parallel.weight_gradient import WeightGradients
from megatron_lightning.runtime.stage_messages import Arrival, StageMessages, TensorSpec
from megatron_lightning.runtime.stage_outputs import StageResult, activations, loss, take_grad
from megatron_lightning.runtime.timeline import Category, Timeline, span

Key = tuple[int, int]
"""(micro_batch, chunk)"""


class StageRunner(Protocol):
    """What the engine calls to compute."""

    def forward(
        self, micro_batch: int, chunk: int, received: tuple[Tensor, ...] | None
    ) -> StageResult:
        """Run one micro-batch through one of this rank's chunks.

        ``received`` holds the previous virtual stage's outputs, None on the first. Returned is what
        the next virtual stage gets: a tensor or a tuple of tensors on the engine's device, of any
        dtype and shape. On the last virtual stage: the scalar to differentiate, weighted as it is
        to count, or None if this micro-batch has none.
        """
        ...


@dataclass(slots=True)
class _Kept:
    """What one forward leaves for its backward."""

    inputs: tuple[Tensor, ...]
    """Received tensors that want a gradient."""
    edges: tuple[GradientEdge, ...]
    """Outputs that get a gradient, or the loss."""
    specs: tuple[TensorSpec, ...]
    """Of these outputs, hence also of their gradients."""


class PipelineEngine:
    """Runs action lists on one rank of a pipeline axis.

    Every rank of the axis runs its own list of the same schedule. With an axis of size 1 no process
    group is needed, whatever the number of chunks. Shapes may differ between micro-batches and
    between runs: they are sent ahead once for every signature (see ``run``). If a run raises, the
    other ranks' runs cannot go on; the process group should be given up.
    """

    def __init__(
        self,
        axis: MeshAxis,
        num_chunks: int,
        device: torch.device,
        *,
        v_shaped: bool = False,
        weight_gradients: WeightGradients | None = None,
        lanes: Lanes | None = None,
    ) -> None:
        self.lanes = lanes
        self.placement = Placement(axis.size, num_chunks, v_shaped)
        self.weight_gradients = weight_gradients
        self.rank = axis.rank
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.messages = StageMessages(axis, device)
        self.sent_specs: dict[Hashable, tuple[TensorSpec, ...]] = {}
        self.received_specs: dict[Hashable, tuple[TensorSpec, ...]] = {}

    def run(
        self,
        actions: Sequence[Action],
        runner: StageRunner,
        *,
        signatures: Sequence[Hashable],
        backward: bool,
        before_compute: Callable[[Action], None] | None = None,
        before_last_backward: Callable[[Action], None] | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        """Execute this rank's action list: one flush of the pipeline.

        ``signatures`` has one entry for each micro-batch, the same on all ranks: whatever
        determines the shapes that cross the cuts (as a rule the shapes of the inputs). With
        ``backward``, gradients accumulate in the parameters' ``grad``; without, the list holds
        forwards alone and no graph is built. ``before_compute`` is called before each forward and
        backward; ``before_last_backward`` with the last B or W of each chunk before it: what the
        chunk's parameters accumulate from then on is complete, and may be reduced. A ``timeline``
        gets the times of all that is done and waited for.

        Raises ``ValueError`` for a list or an output that cannot be executed, and passes on what
        the runner and the callbacks raise.
        """
        self._check(actions, signatures, backward)
        self.messages.connect()
        run = _Run(self, runner, signatures, backward=backward, timeline=timeline)
        last_backward = {a.chunk: a for a in actions if a.kind in (Kind.B, Kind.W)}
        try:
            for unit in in_units(actions):
                for action in unit:
                    if before_last_backward and last_backward.get(action.chunk) is action:
                        before_last_backward(action)
                    if before_compute and action.kind in COMPUTE:
                        before_compute(action)
                run.execute(unit)
            self.messages.drain()
        except BaseException:
            self.sent_specs.clear()  # the peers may not have got what was announced
            self.received_specs.clear()
            if self.weight_gradients is not None:
                self.weight_gradients.clear()
            raise
        run.check_empty()

    def _check(
        self, actions: Sequence[Action], signatures: Sequence[Hashable], backward: bool
    ) -> None:
        for action in actions:
            if action.kind in (Kind.I, Kind.W) and self.weight_gradients is None:
                raise ValueError(
                    f"action {action}: this engine runs full backwards (B) only; give it a "
                    "WeightGradients for split ones."
                )
            if action.micro_batch >= len(signatures):
                raise ValueError(
                    f"action {action}: there are signatures for {len(signatures)} micro-batches; "
                    "build the schedule for that number."
                )
            if action.beside_next and self.lanes is None:
                raise ValueError(
                    f"action {action}: an engine without lanes runs nothing side by side; give it"
                    " Lanes, or another schedule."
                )
        if backward != any(action.kind in (Kind.B, Kind.I) for action in actions):
            raise ValueError(
                f"backward={backward}, but the action list holds {'no ' * backward}backwards: "
                f"build the schedule with forward_only={not backward}."
            )


class _Run:
    """The state of one flush."""

    def __init__(
        self,
        engine: PipelineEngine,
        runner: StageRunner,
        signatures: Sequence[Hashable],
        *,
        backward: bool,
        timeline: Timeline | None,
    ) -> None:
        self.engine, self.messages, self.placement = engine, engine.messages, engine.placement
        self.timeline = timeline
        self.runner, self.signatures, self.backward = runner, signatures, backward
        self.inputs: dict[Key, Arrival] = {}
        self.outputs: dict[Key, tuple[Tensor, ...]] = {}
        self.kept: dict[Key, _Kept] = {}
        self.output_grads: dict[Key, Arrival] = {}
        self.input_grads: dict[Key, tuple[Tensor, ...]] = {}
        self.lanes = engine.lanes if backward else None
        self.lane_of: dict[Key, int] = {}

    def execute(self, unit: tuple[Action, ...]) -> None:
        """Do one action, or a backward and a forward side by side."""
        if self.lanes is None or unit[0].kind not in COMPUTE:
            for action in unit:
                self._do(action)
            return
        lanes = self._choose_lanes(unit)
        self.lanes.fork()
        for action, lane in zip(unit, lanes, strict=True):
            with self.lanes.lane(lane):
                self._do(action)
            if self.timeline is not None:  # which wants each one's own time
                self.lanes.join()
                self.lanes.fork()
        self.lanes.join()

    def _choose_lanes(self, unit: tuple[Action, ...]) -> list[int]:
        """A backward's is that of its forward; a forward takes the one that its partner leaves."""
        chosen: list[int] = []
        for action in unit:
            key = action.micro_batch, action.chunk
            if action.kind is Kind.F:
                self.lane_of[key] = 1 - chosen[0] if chosen else 0
                chosen.append(self.lane_of[key])
            else:
                chosen.append(self.lane_of.pop(key))
        return chosen

    def _do(self, action: Action) -> None:
        match action.kind:
            case Kind.F:
                self._forward(action)
            case Kind.B | Kind.I:
                self._backward(action)
            case Kind.W:
                self._weights(action)
            case _:
                with self._span(Category.MESSAGE, action):
                    self._message(action)

    def _message(self, action: Action) -> None:
        match action.kind:
            case Kind.SEND_F:
                self._send_output(action)
            case Kind.RECV_F:
                self._receive_input(action)
            case Kind.SEND_B:
                self._send_input_grads(action)
            case _:
                assert action.kind is Kind.RECV_B
                self._receive_output_grads(action)

    def _span(self, category: Category, action: Action) -> AbstractContextManager[None]:
        stage = self.placement.stage(self.engine.rank, action.chunk)
        return span(self.timeline, category, action, stage)

    def check_empty(self) -> None:
        """Everything received was used and everything made was handed on."""
        left = [self.inputs, self.outputs, self.kept, self.output_grads, self.input_grads]
        assert not any(left), f"the action list leaves work undone: {[sorted(d) for d in left]}"
        weights = self.engine.weight_gradients
        assert weights is None or weights.is_empty, "the action list leaves weight gradients undone"

    def _forward(self, action: Action) -> None:
        key = action.micro_batch, action.chunk
        stage = self.placement.stage(self.engine.rank, action.chunk)
        received = None if stage == 0 else self._take_input(action)
        with self._span(Category.COMPUTE, action), torch.set_grad_enabled(self.backward):
            result = self.runner.forward(*key, received)
        is_last = stage + 1 == self.placement.num_stages
        if is_last:
            outputs = loss(result, action.micro_batch, backward=self.backward)
        else:
            outputs = activations(result, action.chunk, self.engine.device)
        specs = tuple(TensorSpec.of(output, backward=self.backward) for output in outputs)
        if self.backward:
            pairs = zip(outputs, specs, strict=True)
            self.kept[key] = _Kept(
                inputs=tuple(t for t in received or () if t.requires_grad),
                edges=tuple(get_gradient_edge(t) for t, spec in pairs if spec.differentiable),
                specs=tuple(spec for spec in specs if spec.differentiable),
            )
        if not is_last:
            self._hand_on(outputs, specs, key, stage + 1)
        elif self.backward:
            ones = tuple(torch.ones_like(output) for output in outputs if output.requires_grad)
            self.output_grads[key] = Arrival(ones)

    def _backward(self, action: Action) -> None:
        key = action.micro_batch, action.chunk
        kept = self.kept.pop(key)
        grads = self._wait(self.output_grads.pop(key), action)
        with self._span(Category.COMPUTE, action), self._leaving_weights(action):
            if kept.edges:
                torch.autograd.backward(kept.edges, grads)
        stage = self.placement.stage(self.engine.rank, action.chunk)
        if stage > 0:
            self._hand_back(tuple(take_grad(t) for t in kept.inputs), key, stage - 1)

    def _leaving_weights(self, action: Action) -> AbstractContextManager[None]:
        if action.kind is not Kind.I:
            return nullcontext()
        assert self.engine.weight_gradients is not None
        return self.engine.weight_gradients.collect((action.micro_batch, action.chunk))

    def _weights(self, action: Action) -> None:
        assert self.engine.weight_gradients is not None
        with self._span(Category.COMPUTE, action):
            self.engine.weight_gradients.compute((action.micro_batch, action.chunk))

    def _wait(self, arrival: Arrival, action: Action) -> tuple[Tensor, ...]:
        if not arrival.works:
            tensors = arrival.take()
        else:
            with self._span(Category.WAIT, action):
                tensors = arrival.take()
        if self.lanes is not None:
            self.lanes.use(tensors)
        return tensors

    def _take_input(self, action: Action) -> tuple[Tensor, ...]:
        arrival = self.inputs.pop((action.micro_batch, action.chunk))
        tensors = self._wait(arrival, action)
        for tensor, spec in zip(tensors, arrival.specs, strict=True):
            tensor.requires_grad_(spec.differentiable)
        return tensors

    def _hand_on(
        self, outputs: tuple[Tensor, ...], specs: tuple[TensorSpec, ...], key: Key, to_stage: int
    ) -> None:
        """Put outputs where SEND_F finds them, or straight before the next chunk of this rank."""
        owner, chunk = self.placement.owner(to_stage)
        if owner == self.engine.rank:
            self.inputs[key[0], chunk] = Arrival(tuple(t.detach() for t in outputs), specs=specs)
        else:
            self.outputs[key] = outputs

    def _hand_back(self, grads: tuple[Tensor, ...], key: Key, to_stage: int) -> None:
        """Put gradients where SEND_B finds them, or straight before the previous chunk."""
        owner, chunk = self.placement.owner(to_stage)
        if owner == self.engine.rank:
            self.output_grads[key[0], chunk] = Arrival(grads)
        else:
            self.input_grads[key] = grads

    def _send_output(self, action: Action) -> None:
        outputs = self.outputs.pop((action.micro_batch, action.chunk))
        specs = tuple(TensorSpec.of(output, backward=self.backward) for output in outputs)
        kind = self._message_kind(action)
        known = self.engine.sent_specs.get(kind)
        if known is None:
            self.engine.sent_specs[kind] = specs
            self.messages.send_specs(specs, _peer(action))
        elif known != specs:
            raise ValueError(
                f"chunk {action.chunk} gave {specs} for micro-batch {action.micro_batch}, but "
                f"{known} for an earlier one of the same signature {kind[0]!r}: put what makes the "
                "difference into the signature."
            )
        self.messages.send(outputs, _peer(action))

    def _receive_input(self, action: Action) -> None:
        kind = self._message_kind(action)
        specs = self.engine.received_specs.get(kind)
        if specs is None:
            specs = self.engine.received_specs[kind] = self.messages.receive_specs(_peer(action))
        self.inputs[action.micro_batch, action.chunk] = self.messages.receive(specs, _peer(action))

    def _send_input_grads(self, action: Action) -> None:
        grads = self.input_grads.pop((action.micro_batch, action.chunk))
        self.messages.send(grads, _peer(action))

    def _receive_output_grads(self, action: Action) -> None:
        key = action.micro_batch, action.chunk
        self.output_grads[key] = self.messages.receive(self.kept[key].specs, _peer(action))

    def _message_kind(self, action: Action) -> tuple[Hashable, bool, int]:
        """What decides the specs of an activation; a run without backwards asks for no gradient."""
        return self.signatures[action.micro_batch], self.backward, action.chunk


def _peer(action: Action) -> int:
    assert action.peer is not None
    return action.peer
