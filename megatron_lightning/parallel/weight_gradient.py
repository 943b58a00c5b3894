"""Weight gradients computed apart from the backward pass: what makes a backward splittable.

While a pass is collected (the schedule's I), the linear layers of a network keep the two factors of
their weight's gradient instead of multiplying them; the schedule's W multiplies them later (Qi et
al., arXiv 2401.10241). Nothing is taken out of autograd's graph: a layer merely says that its
weight has no gradient in this pass. All other parameters (norms, biases, embeddings) get theirs
during I, as usual.

The sum goes straight into the main gradient of the gradient buckets. Hooks that a user puts on such
a weight's gradient do not see it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.collectives import Finish, begin_all_gather
from megatron_lightning.parallel.column import ColumnInput
from megatron_lightning.parallel.plain_layers import adopt
from megatron_lightning.parallel.row import RowOutput

Key = tuple[int, int]
"""(micro_batch, chunk)"""


class MainGradients(Protocol):
    """Where weight gradients are summed: `parallel.data.GradientBuckets`."""

    def add_product(self, name: str, grad: Tensor, x: Tensor) -> None:
        """Add grad^T x to the gradient of a weight: (..., out), (..., in) -> (out, in)."""
        ...

    def add(self, name: str, grad: Tensor) -> None:
        """Add to the gradient of a parameter, in any shape of as many elements."""
        ...

    def arrived(self, name: str) -> None:
        """Called when the gradient of `name` is in its view."""
        ...


@dataclass(frozen=True)
class _Product:
    """grad^T x: (..., out)^T (..., in) -> (out, in)."""

    name: str
    grad: Tensor
    x: Tensor
    axis: MeshAxis
    dim: int | None
    """Dim along which `x` is only this rank's part, as sequence parallelism keeps it, or None."""

    def begin_input(self) -> Finish:
        """Start to make the whole input."""
        if self.dim is None:
            return lambda: self.x
        return begin_all_gather(self.x, self.axis, self.dim)

    def add_to(self, target: MainGradients, x: Tensor) -> None:
        """Multiply with the whole input and add."""
        target.add_product(self.name, self.grad, x)


@dataclass(frozen=True)
class _Call:
    """Any other gradient: what computes it in the weight's shape, or one of as many elements."""

    name: str
    multiply: Callable[[], Tensor]

    def begin_input(self) -> Finish:
        """There is nothing to gather."""
        return lambda: torch.empty(0)

    def add_to(self, target: MainGradients, x: Tensor) -> None:
        """Compute and add."""
        target.add(self.name, self.multiply())


class WeightGradients:
    """The products that wait, by micro-batch and chunk. One for each rank's model."""

    def __init__(self) -> None:
        self.target: MainGradients | None = None
        """Set while there are gradient buckets."""
        self._waiting: dict[Key, list[_Product | _Call]] = {}
        self._key: Key | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightGradients:
        """Itself: copies of a network (weight averaging) run no backward."""
        return self

    @property
    def is_empty(self) -> bool:
        """True when nothing waits."""
        return not self._waiting

    @contextmanager
    def collect(self, key: Key) -> Iterator[None]:
        """Put off the weight gradients of the backward pass inside."""
        assert key not in self._waiting, f"weight gradients of {key} wait already"
        self._waiting[key] = []
        self._key = key
        try:
            yield
        finally:
            self._key = None

    def defer(self, product: _Product | _Call) -> bool:
        """Take a product if a pass is being collected."""
        if self._key is None:
            return False
        self._waiting[self._key].append(product)
        return True

    def names(self, key: Key) -> frozenset[str]:
        """Parameters whose gradients `compute` will bring."""
        return frozenset(product.name for product in self._waiting[key])

    @torch.no_grad()
    def compute(self, key: Key) -> None:
        """Multiply what waits, add it to the main gradients, and tell of each that arrived.

        With sequence parallelism inputs are gathered again, each during the product before it.
        """
        products = self._waiting.pop(key)
        left = Counter(product.name for product in products)
        upcoming = products[0].begin_input() if products else None
        while products:
            product = products.pop(0)
            assert upcoming is not None
            x = upcoming()
            upcoming = products[0].begin_input() if products else None
            self._add(product, x)
            left[product.name] -= 1
            if left[product.name] == 0 and self.target is not None:
                self.target.arrived(product.name)

    def _add(self, product: _Product | _Call, x: Tensor) -> None:
        assert self.target is not None, "weight gradients without gradient buckets"
        product.add_to(self.target, x)

    def clear(self) -> None:
        """Forget everything, after a failed run."""
        self._waiting.clear()
        self._key = None


def _call(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return forward(x)


# The factors of a gradient that is put off outlive the backward pass, while a compiled pass
# overwrites its buffers as soon as it is done with them. Where it is not told to keep them
# (`parallel/kept_buffers.py`), or the operations have no main gradient to ask whether it is put
# off, the layers stay outside of compiled regions, at the price of graph breaks.
_not_compiled: Any = torch.compiler.disable(_call)


@dataclass(frozen=True, eq=False)
class WeightSink:
    """What a linear layer holds to put off its weight's gradient: the queue and its own name."""

    gradients: WeightGradients
    name: str
    """Canonical name of the weight."""
    in_regions: bool = False
    """True: in a compiled layer the region's operations put the gradient off."""

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightSink:
        """Itself, as the queue."""
        return self

    def run(self, forward: Callable[[Tensor], Tensor], x: Tensor, *, sums: bool) -> Tensor:
        """See `DefersWeightGradient.run`."""
        if self.in_regions and (sums or not torch.is_grad_enabled()):
            return forward(x)
        return _not_compiled(forward, x)

    @property
    def is_asked(self) -> bool:
        """See `DefersWeightGradient.is_asked`."""
        return not (self.in_regions and torch.compiler.is_compiling())

    def defer(self, grad: Tensor, x: Tensor, axis: MeshAxis, dim: int | None) -> bool:
        """Keep (..., out) and (..., in) for later; False if the gradient is wanted now."""
        return self.gradients.defer(_Product(self.name, grad, x, axis, dim))

    def defer_call(self, multiply: Callable[[], Tensor]) -> bool:
        """Keep what computes the gradient for later; False if it is wanted now."""
        return self.gradients.defer(_Call(self.name, multiply))


def apply_weight_sinks(
    network: nn.Module,
    gradients: WeightGradients,
    names: Mapping[int, str],
    at_once: Collection[str] = (),
    *,
    compiled: str | None = None,
) -> None:
    """Let the linear layers of `network` put off their weights' gradients.

    `names` gives the canonical name of each weight by its id. Layers know how if they have a
    `weight_sink`; torch's own `nn.Linear` is changed into one that has. What lies in the modules
    whose paths are in `at_once` is left alone. `compiled`: path of the container of layers whose
    compiled code keeps buffers (`parallel/kept_buffers.py`), if any.
    """
    for path, module in network.named_modules():
        if any(path == part or path.startswith(f"{part}.") for part in at_once):
            continue
        if type(module) is nn.Linear:
            adopt(module)
        if hasattr(module, "weight_sink"):
            owner: Any = module
            inside = compiled is not None and path.startswith(f"{compiled}.")
            inside = inside and _sums_itself(owner)
            owner.weight_sink = WeightSink(gradients, names[id(owner.weight)], inside)
            if inside:
                owner.before, owner.after = _plain(owner.before), _plain(owner.after)


def _sums_itself(layer: Any) -> bool:
    """Whether its weight's gradient may go to the main gradient, by operations that ask."""
    return hasattr(layer, "sums_weight_gradient") and layer.quantized is None


def _plain(border: Any) -> Any:
    """A border that knows collectives alone."""
    if isinstance(border, (ColumnInput, RowOutput)) and border.overlap is not None:
        return replace(border, overlap=border.overlap.plain())
    return border
