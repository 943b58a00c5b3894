"""The low-precision layers of one rank's model while it runs: when weights are rounded anew, and
what is done for all layers at once.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.quantized.products import (
    QuantizedProducts,
    WeightClock,
    largest_over,
)
from megatron_lightning.parallel.quantized.region import announce
from megatron_lightning.precision.delayed import DelayedScaling
from megatron_lightning.precision.weight_casts import WeightCasts, fit


class Quantization:
    """What the runtime does for the low-precision layers of one rank's model."""

    def __init__(
        self, mesh: ParallelMesh, delayed: DelayedScaling | None, *, whole: bool = False
    ) -> None:
        """`whole`: when a batch begins every weight is there, and none is still being gathered."""
        self._whole = whole
        self._casts: WeightCasts | None = None
        self.clock = WeightClock()
        self.delayed = delayed
        self._over_ranks = partial(largest_over, axes=[mesh.dp_cp, mesh.tp])
        self._window_is_new = True
        self.gathered: frozenset[str] = frozenset()
        """Weights that the sharded optimizer gathers in eight bits."""
        self._in_regions: list[tuple[QuantizedProducts, nn.Module]] = []
        self._by_weight: dict[int, list[QuantizedProducts]] = {}

    def add(self, products: QuantizedProducts, module: nn.Module) -> None:
        """A layer whose products may be operations of a compiled region. Those that share a weight
        stay outside of it: by the weight's address one would find what another holds.
        """
        if not products.in_regions:
            return
        weight = module.weight
        sharing = self._by_weight.setdefault(id(weight), [])
        sharing.append(products)
        if len(sharing) == 1:
            self._in_regions.append((products, module))
            return
        for one in sharing:
            one.in_regions = False
        self._in_regions = [each for each in self._in_regions if each[1].weight is not weight]

    def begin_run(self, *, training: bool) -> None:
        """Before the passes of a batch: weights are rounded anew where they may have changed.

        Between evaluations that may be by a checkpoint read straight into their memory, or by
        `.data` (weight averaging), of which neither version nor address tells.
        """
        old = self._window_is_new or not training
        if old:
            self.clock.tick()
        self._window_is_new = not training
        for products, module in self._in_regions:
            assert isinstance(module.weight, Tensor)
            announce(products, module.weight)
        if old and self._whole:
            self._round_together()
        if self.delayed is not None:
            self.delayed.recording = training

    def _round_together(self) -> None:
        """Round all weights that have scales of their own at once, where kernels can."""
        members = [
            (products, module.weight.detach().flatten(0, -2))
            for products, module in self._in_regions
            if products.rounds_apart and isinstance(module.weight, Tensor)
        ]
        weights = [weight for _, weight in members]
        if not fit(weights):
            self._casts = None
            return
        if self._casts is None or not self._casts.follow(weights):
            self._casts = WeightCasts(weights)
        for (products, weight), pair in zip(members, self._casts.cast(), strict=True):
            products.hold(weight, pair)

    def finish_window(self) -> None:
        """After a window's last backward pass. All ranks of the mesh must call it."""
        self._window_is_new = True
        if self.delayed is not None:
            self.delayed.finish_window(self._over_ranks)
