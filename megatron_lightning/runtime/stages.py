"""A network cut into pipeline stages, still callable like the whole network inside an ordinary
`training_step`.

`training_step` runs on every stage. The cut network's `forward` takes the received activation in
place of its input on later chunks, and on a chunk that isn't the last one it raises `StageDone`,
which unwinds the user's function: only the last chunk reaches the loss. `StageDone` is a
BaseException, so that no `except Exception` of the user catches it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

from torch import Tensor, nn

from megatron_lightning.config.plan import CHUNKS, ParallelPlan
from megatron_lightning.layers.staged import StagedNetwork
from megatron_lightning.parallel.pipeline import ChunkUnits, StageLayout

Carried = Tensor | tuple[Tensor, ...]
FIRST: Literal["first"] = "first"
LAST: Literal["last"] = "last"
Owner = Literal["first", "last"] | int
"""What holds a parameter: the modules of `plan.first` or `plan.last`, or a layer by its number."""


class StageDone(BaseException):
    """Carries a chunk's output out of the user's step function."""

    def __init__(self, carried: Carried) -> None:
        super().__init__()
        self.carried = carried


class Chunk:
    """The part of a network that one chunk holds, with global parameter names."""

    def __init__(self, network: nn.Module, content: ChunkUnits, plan: ParallelPlan) -> None:
        self.content = content
        self.network = network
        self._layers_path = plan.layers or ""
        self.entry: Callable[..., Any] = self.run
        """What a call goes through: `run`, or that within the hooks of a sharded network."""

    def __call__(
        self, received: Carried | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the chunk on its input or on what the chunk before sent."""
        return self.entry(received, args, kwargs)

    def run(self, received: Carried | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the parts of the network that are here."""
        network: Any = self.network
        if isinstance(network, nn.Sequential):
            return self._run_sequential(args[0] if self.content.has_embedding else received)
        carried: Any = received
        if self.content.has_embedding:
            carried = network.begin(*args, **kwargs)
        if isinstance(network, StagedNetwork):
            carried = network.run_layers(carried, *args, **kwargs)
        else:
            for name, layer in network.get_submodule(self._layers_path).named_children():
                carried = network.apply_layer(name, layer, carried, *args, **kwargs)
        return network.finish(carried, *args, **kwargs) if self.content.has_head else carried

    def _run_sequential(self, carried: Any) -> Any:
        for layer in self.network.children():
            carried = layer(carried)
        return carried


class PipelinedNetwork(nn.Module):
    """Stands where the whole network stood in the LightningModule and holds this rank's chunks of
    it. Parameters, buffers and modules have the names that they have in the whole network, and its
    plain attributes can be read.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        super().__init__()
        self.add_module(CHUNKS, nn.ModuleList(chunk.network for chunk in chunks))
        self.parts = list(chunks)
        self._active: tuple[int, Carried | None] | None = None
        self._calls = 0
        self.on_output: Callable[[Any], None] | None = None
        """Called with what the last chunk's call of the network returns."""

    @property
    def chunks(self) -> list[nn.Module]:
        """The network as this rank holds it: one for each of its chunks."""
        return list(cast(nn.ModuleList, self._modules[CHUNKS]))

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As for the whole network, less what other ranks hold."""
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        for chunk in self.chunks:
            yield from chunk.named_modules(memo, prefix, remove_duplicate)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or CHUNKS not in self.__dict__.get("_modules", ()):
                raise
        for chunk in self.chunks:
            value = getattr(chunk, name, None)
            if value is not None and not callable(value) and not isinstance(value, Tensor):
                return value
        raise AttributeError(
            f"{name!r} of a network that is cut into pipeline stages: only its plain attributes can"
            " be read, since modules and tensors lie on one stage; use what the call of the network"
            " returns"
        )

    def run_stage(
        self, chunk: int, received: Carried | None, step: Callable[[], Any]
    ) -> tuple[bool, Any]:
        """Call `step` (the user's function on one micro-batch) with `chunk` active.

        Returns (True, the step's result) on the last chunk and (False, the activation to send)
        elsewhere. Raises RuntimeError when the step doesn't call the network exactly once.
        """
        self._active, self._calls = (chunk, received), 0
        try:
            result = step()
        except StageDone as done:
            return False, done.carried
        finally:
            self._active = None
        if self._calls != 1:
            raise RuntimeError(_call_count_message(self._calls))
        return True, result

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the active chunk as the whole network would be run."""
        if self._active is None:
            raise RuntimeError(
                "the pipelined network was called outside of a training, validation, test or "
                "predict step; under"
                " pipeline_parallel_size > 1 only these may call it, since every stage has to "
                "take part"
            )
        self._calls += 1
        if self._calls > 1:
            raise RuntimeError(_call_count_message(self._calls))
        chunk, received = self._active
        part = self.parts[chunk]
        carried = part(received, args, kwargs)
        if part.content.has_head:
            if self.on_output is not None:
                self.on_output(carried)
            return carried
        raise StageDone(carried)


def _call_count_message(calls: int) -> str:
    return (
        f"the step called the network {calls} times; under pipeline_parallel_size > 1 a step "
        f"must call it exactly once"
        " per micro-batch (join the inputs along the batch dim, or use pipeline_parallel_size=1)"
    )


_STAGED = ("begin", "apply_layer", "finish")
"""What a network tells a pipeline."""


def _staged(network: nn.Module) -> str:
    """What else a network needs for stages, if it does."""
    if all(callable(getattr(network, name, None)) for name in _STAGED):
        return ""
    return (
        f"and make {type(network).__name__} a megatron_lightning.layers.StagedNetwork, which says"
        " what comes before and behind the layers; "
    )


def layer_names(network: nn.Module, plan: ParallelPlan) -> list[str]:
    """Names of the layers that the pipeline deals out, in order.

    Raises ValueError when the plan names none, or the network lacks the three parts that a stage
    needs.
    """
    if isinstance(network, nn.Sequential) and plan.layers is None:
        return [name for name, _ in network.named_children()]
    if plan.layers is None:
        raise ValueError(
            "plan.layers=None with pipeline_parallel_size > 1: name the ModuleList or ModuleDict "
            "of layers, e.g."
            " ParallelPlan(layers='decoder.layers', first=('embedding',), last=('head',)), "
            f"{_staged(network)}or use an nn.Sequential"
        )
    missing = [name for name in _STAGED if not callable(getattr(network, name, None))]
    if missing:
        raise ValueError(
            f"{type(network).__name__} lacks {missing}, which pipeline_parallel_size > 1 needs; "
            f"subclass"
            " megatron_lightning.layers.StagedNetwork"
        )
    return [name for name, _ in network.get_submodule(plan.layers).named_children()]


def cut_network(
    network: nn.Module, plan: ParallelPlan, contents: Sequence[ChunkUnits]
) -> PipelinedNetwork:
    """Cut `network` into the chunks of this rank. Parameters are shared with `network`, never
    copied. `cut_problems` has found nothing.
    """
    shared: dict[int, Any] = {id(p): p for p in network.parameters()} | {
        id(b): b for b in network.buffers()
    }
    names = layer_names(network, plan)
    chunks = []
    for content in contents:
        part = copy.deepcopy(network, dict(shared))
        kept = [names[i] for i in content.layers]
        if isinstance(part, nn.Sequential) and plan.layers is None:
            part = _keep_children(part, kept)
        else:
            _replace(
                part, plan.layers or "", _keep_as_dict(part.get_submodule(plan.layers or ""), kept)
            )
            removed = () if content.has_embedding else plan.first
            removed += () if content.has_head else plan.last
            kept_paths = (plan.first if content.has_embedding else ()) + (
                plan.last if content.has_head else ()
            )
            for path in removed:
                if path not in kept_paths:
                    _replace(part, path, None)
        chunks.append(Chunk(part, content, plan))
    return PipelinedNetwork(chunks)


def cut_problems(network: nn.Module, plan: ParallelPlan, layout: StageLayout) -> list[str]:
    """Explain what keeps the network from being cut by this layout; the same on every rank.

    Every parameter must lie in the layers or in a module that the plan names as first or last;
    what stages share must be in `plan.tied`; and every rank must hold some parameter.
    """
    owner_of = _owners(network, plan)
    stray = [name for name, owner in owner_of.items() if owner is None]
    if stray:
        return [
            f"plan: no pipeline stage owns {stray[:3]}{' ...' if len(stray) > 3 else ''}; name "
            f"the module in plan.first or plan.last"
        ]
    ties = [pair for pair in _ties(network, owner_of) if not _is_named(pair, plan)]
    problems = [
        f"{first} and {second} are one parameter, which would come apart on different pipeline"
        " stages; name the pair (owner in a plan.first module, user in a plan.last one) in"
        " plan.tied, or untie them"
        for first, second in ties
    ]
    problems += [
        f"plan.tied: {owner} must be in a plan.first module and {user} in a plan.last one"
        for owner, user in plan.tied
        if (owner_of.get(owner), owner_of.get(user)) != (FIRST, LAST)
    ]
    for rank in range(layout.pipeline_size):
        chunks = layout.chunks(rank)
        held: set[Owner] = {layer for chunk in chunks for layer in chunk.layers}
        held |= {FIRST for chunk in chunks if chunk.has_embedding}
        held |= {LAST for chunk in chunks if chunk.has_head}
        if not held.intersection(owner_of.values()):
            problems.append(
                f"pipeline_parallel_size={layout.pipeline_size}: rank {rank} of the pipeline would"
                f" hold no parameter (stages {layout.describe()}); use fewer stages, or a"
                " PipelineConfig(layout=...) that gives each of them some"
            )
    return problems


def _owners(network: nn.Module, plan: ParallelPlan) -> dict[str, Owner | None]:
    """What holds each parameter, by all its names: first, last, or the number of a layer."""
    prefix = "" if plan.layers is None else f"{plan.layers}."
    roots: dict[str, Owner] = {
        prefix + name: number for number, name in enumerate(layer_names(network, plan))
    }
    for path in plan.first:
        roots[path] = FIRST
    for path in plan.last:
        roots[path] = LAST

    def owner(name: str) -> Owner | None:
        parts = name.split(".")
        paths = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        return next((roots[path] for path in paths if path in roots), None)

    names = (name for name, _ in network.named_parameters(remove_duplicate=False))
    return {name: owner(name) for name in names}


def _ties(network: nn.Module, owner_of: Mapping[str, Owner | None]) -> Iterator[tuple[str, str]]:
    """Pairs of names of one parameter whose owners may come to lie on different stages."""
    first_name: dict[int, str] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        known = first_name.setdefault(id(parameter), name)
        if owner_of[known] != owner_of[name]:
            yield known, name


def _is_named(pair: tuple[str, str], plan: ParallelPlan) -> bool:
    return any(set(pair) == set(tied) for tied in plan.tied)


def _keep_children(sequential: nn.Sequential, kept: Sequence[str]) -> nn.Sequential:
    """An nn.Sequential of the kept children under their old names (deleting entries would renumber
    them).
    """
    part = nn.Sequential()
    for name in kept:
        part.add_module(name, sequential.get_submodule(name))
    return part


def _keep_as_dict(container: nn.Module, kept: Sequence[str]) -> nn.ModuleDict:
    return nn.ModuleDict({name: container.get_submodule(name) for name in kept})


def _replace(root: nn.Module, path: str, module: nn.Module | None) -> None:
    parent, _, name = path.rpartition(".")
    setattr(root.get_submodule(parent) if parent else root, name, module)
