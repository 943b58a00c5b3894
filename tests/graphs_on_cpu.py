"""What stands for CUDA graphs on the CPU."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from megatron_lightning.runtime import chunks, graph_choice
from megatron_lightning.runtime.layer_graphs import LayerGraphs

Replay = Callable[[], None]


class StandIn:
    """Runs a function, and again at each replay but the first."""

    def begin(self) -> None:
        pass

    def close(self) -> None:
        pass

    def record(
        self, function: Callable[[], Any], generators: Sequence[torch.Generator]
    ) -> tuple[Replay, Any]:
        result = function()

        def replay() -> None:
            for kept, again in zip(_tensors(result), _tensors(function()), strict=True):
                kept.data.copy_(again)

        return after_first(replay), result


class Tape:
    """Keeps the operations of a function, and repeats just these on the same memory: what Python
    decides and computes is that of the recording, as in a CUDA graph. Whatever asks for a value is
    an error.
    """

    def begin(self) -> None:
        pass

    def close(self) -> None:
        pass

    def record(
        self, function: Callable[[], Any], generators: Sequence[torch.Generator]
    ) -> tuple[Replay, Any]:
        with _Taping() as taped:
            result = function()

        def replay() -> None:
            with torch.no_grad():
                for operation in taped.operations:
                    operation()

        return after_first(replay), result


def after_first(replay: Replay) -> Replay:
    """A recording on the CPU has run the function already."""
    done = [True]

    def later() -> None:
        if done:
            done.clear()
        else:
            replay()

    return later


_WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select")


class _Taping(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name in _WAITS:
            raise RuntimeError(f"{name} waits for the device")
        results = func(*args, **kwargs)
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        made = [t for t in _tensors(results) if t.untyped_storage().data_ptr() not in given]
        writes = any(
            a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments
        )
        if (made or writes) and not name.startswith(("aten::empty", "aten::new_empty")):
            self.operations.append(_again(func, args, kwargs, results, made))
        return results


def _again(func: Any, args: Any, kwargs: Any, results: Any, made: list[Tensor]) -> Replay:
    # Tensors of their own: a parameter's `.data` may be exchanged and versions are autograd's.
    args, kwargs = tree_map(_plain, (args, kwargs))
    places = [i for i, t in enumerate(_tensors(results)) if any(t is m for m in made)]

    def operation() -> None:
        again = _tensors(func(*args, **kwargs))
        for place, tensor in zip(places, made, strict=True):
            tensor.data.copy_(again[place])

    return operation


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def stand_in_for_graphs(make: Callable[[], Any], made: list[LayerGraphs]) -> None:
    """Let networks that are cut from now on be graphed on the CPU too; `made` gets what is made."""

    def graphed(network: Any, plan: Any, streams: Any, device: Any) -> LayerGraphs:
        made.append(LayerGraphs(make, streams))
        graph_choice.add_layers(made[-1], network, plan)
        return made[-1]

    chunks.graph_layers = graphed
