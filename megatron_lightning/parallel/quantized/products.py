"""Linear layers whose three products take factors of eight or four bits.

What a recipe rounds and how is in `precision/simulated.py` and `precision/fp8.py`; here stand the
layer's borders and what is kept. Of the input the rounded transpose is kept for the backward pass,
in place of the input; with sequence parallelism the own part of it. Weights are rounded once in a
window. Rows of a matrix have the same scales in every layout: largest values are taken over the
ranks that hold other rows, which is one small reduction each, but for delayed scaling. So are those
over ranks that hold other features, unless the recipe `splits_scales`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.collectives import all_gather_single, all_reduce_
from megatron_lightning.parallel.column import ColumnInput
from megatron_lightning.parallel.main_gradient import main_gradient_of
from megatron_lightning.parallel.overlap.layers import Overlap
from megatron_lightning.parallel.peers.exchange import Exchange
from megatron_lightning.parallel.quantized.borders import joins_parts
from megatron_lightning.parallel.quantized.linear import QuantizedLinear
from megatron_lightning.parallel.quantized.region import Borders, RegionLinear
from megatron_lightning.parallel.quantized.tensor_split import TensorSplit
from megatron_lightning.parallel.row import RowOutput
from megatron_lightning.precision.accumulate import add_to_sum_
from megatron_lightning.precision.fp8 import FP8TensorRecipe
from megatron_lightning.precision.fp8_casts import Cast
from megatron_lightning.precision.kept_operands import addresses, overwrite
from megatron_lightning.precision.operands import (
    BOTH,
    Noise,
    Operand,
    Pair,
    Recipe,
    Wanted,
    identity,
)

NoiseSource = Callable[[torch.Size, torch.Size, torch.device], Noise]
"""(shape of the layer's input, shape of the gradient's matrix, device) -> its noise."""


@dataclass
class WeightClock:
    """When rounded weights are old. One for each rank's model."""

    time: int = 0

    def tick(self) -> None:
        """Weights may have changed."""
        self.time += 1

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightClock:
        """Itself: copies of a network are no other model."""
        return self


@dataclass(eq=False, kw_only=True)
class QuantizedProducts:
    """What a linear layer holds to run in low precision."""

    recipe: Recipe
    split: TensorSplit
    tensor_axis: MeshAxis
    context_axis: MeshAxis
    splits_sequence: bool
    """True where the layer's rows are a part of the sequence over the tensor axis."""
    clock: WeightClock
    keeps_weights: bool = True
    """False: round weights at each use (fully sharded ones come and go)."""
    noise: NoiseSource | None = None
    overlap: Overlap | None = None
    """How parts of a sequence are moved under products; None: by collectives."""
    in_regions: bool = False
    """True: in a compiled layer products are operations of its region; `announce` goes before."""
    weight_stays: bool = False
    """True: operands of the weight stay where they are when it is rounded anew, for CUDA graphs."""
    weight_held: Tensor | None = field(default=None, repr=False)
    """What was announced; views of it that a region makes have versions of their own."""
    _weight: Pair | None = field(default=None, repr=False)
    _weight_key: tuple[int, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedProducts:
        """The same without rounded weights, for a copy of the layer."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name[0] != "_"}
        given = {"in_regions": False, "weight_stays": False, "weight_held": None}
        return QuantizedProducts(**{**fields, **given})

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        before: Callable[[Tensor], Tensor] | None,
        *,
        sums: bool,
        after: Callable[[Tensor], Tensor] | None = None,
        foreign: tuple[bool, bool] = (False, False),
    ) -> Tensor:
        """`after(F.linear(before(x), weight, bias))` by the recipe: (..., in), (out, in) -> (...,
        out). `foreign`: whether a region doesn't write the input, and the output's gradient.
        """
        axis, dim = _WHOLE, None
        if isinstance(before, ColumnInput):
            axis, dim = before.axis, before.sequence_dim
        elif before is not None:
            x = before(x)
        # Within the function gradients are off, and `needs_input_grad` knows nothing of `no_grad`.
        keeps = weight.requires_grad and torch.is_grad_enabled()
        if self._in_region():
            finds = self._finds(foreign)
            return self._region_linear(
                x, weight, bias, axis, dim, after, sums=sums, keeps=keeps, finds=finds
            )
        scatters = self._scatters(x, after) if bias is None else 1
        after = after if scatters == 1 else None
        y = QuantizedLinear.apply(x, weight, bias, self, axis, dim, sums, keeps, scatters)
        return y if after is None else after(y)

    def _scatters(self, x: Tensor, after: Callable[[Tensor], Tensor] | None) -> int:
        """Ranks over which the sum behind the layer can be one operation with it; 1: none."""
        if self.overlap is None or not isinstance(after, RowOutput):
            return 1
        return after.axis.size if self.overlap.scatters(x, after.sequence_dim) else 1

    def _region_linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        axis: MeshAxis,
        dim: int | None,
        after: Callable[[Tensor], Tensor] | None,
        *,
        sums: bool,
        keeps: bool,
        finds: tuple[bool, bool],
    ) -> Tensor:
        """The same as one operation, with the collectives at the layer's borders."""
        assert dim in (None, 0), "see `one_operation`"
        recipe, scatters = self.recipe, 1
        reduces = "gradient" if dim is None and axis.size > 1 else ""
        if isinstance(after, RowOutput) and not reduces:
            if after.sequence_dim is None:
                reduces, after = "output", None
            elif after.overlap.scatters(x, after.sequence_dim):
                scatters, after = after.axis.size, None
        borders: Borders = (
            1 if dim is None else axis.size,
            joins_parts(x, recipe, axis.size, dim),
            scatters,
            reduces,
        )
        y = RegionLinear.apply(x, weight, bias, sums, keeps, recipe.layout, finds, borders)
        return y if after is None else after(y)

    def _finds(self, foreign: tuple[bool, bool]) -> tuple[bool, bool]:
        """Whether a region finds the largest values of an input, and of an output's gradient: of
        what it doesn't write it would need a pass of its own, which the operation's search beats.
        """
        takes, (of_input, of_gradient) = self.recipe.takes_parts, foreign
        return takes and not of_input, takes and not of_gradient

    def run(self, forward: Callable[[Tensor], Tensor], x: Tensor, *, sums: bool) -> Tensor:
        """`forward(x)` of the layer, if need be outside of compiled regions."""
        return forward(x) if self._in_region() else _outside_of_regions(forward, x)

    def _in_region(self) -> bool:
        return self.in_regions and torch.compiler.is_compiling()

    def exchange(self, part_elements: int, dtype: torch.dtype) -> Exchange | None:
        """What moves parts of this size under products; None: collectives do."""
        return None if self.overlap is None else self.overlap.moving(part_elements, dtype)

    # ------------------------------------------------------------------ operands

    def input(self, x: Tensor, *, part: bool, wanted: Wanted, parts: Tensor | None = None) -> Pair:
        """Operands of the input (T, K); `part`: of this tensor rank's part of the sequence.
        `parts`: largest values of its parts, where the recipe `takes_parts`.
        """
        axes = self._row_axes(part)
        if parts is not None and part and not self.recipe.lends_scales:
            axes, parts = self._row_axes(False), self._largest_of_ranks(parts)
        return self.recipe.pair(
            x,
            "input",
            over_rows=self._over(axes),
            over_columns=self._over_features("rows"),
            wanted=wanted,
            **_given(parts),
        )

    def gradient(
        self,
        grad: Tensor,
        wanted: Wanted,
        noise: Noise | None,
        parts: Tensor | None = None,
        cast: Cast | None = None,
    ) -> Pair:
        """Operands of the output's gradient (T, N); `parts` as of an input. `cast`: what makes
        them, where `grad` has its shape alone.
        """
        self._check_context_blocks(len(grad))
        if wanted[1]:
            self._check_tensor_blocks(len(grad))
        return self.recipe.pair(
            grad,
            "gradient",
            over_rows=self._over(self._row_axes(self.splits_sequence)),
            over_columns=self._over_features("columns"),
            noise=noise,
            wanted=wanted,
            **_given(parts, cast),
        )

    def weight(self, weight: Tensor, wanted: Wanted) -> Pair:
        """Operands of the weight (N, K), from before if it hasn't changed since. Where they are
        kept, both are made at once.
        """
        key = self._key_of(weight)
        if self._weight is not None and self._weight_key == key:
            return self._weight
        if not self.keeps_weights:
            return self._rounded(weight, wanted)
        if self.weight_stays:  # also what an evaluation makes is overwritten in training
            with torch.inference_mode(False), torch.no_grad():
                pair = self._rounded(weight.detach(), BOTH)
                if self._weight is not None:
                    lends = self.recipe.lends_scales
                    pair = overwrite(self._weight, pair, lends_scales=lends)
        else:
            pair = self._rounded(weight, BOTH)
        self._weight, self._weight_key = pair, key
        return pair

    def _rounded(self, weight: Tensor, wanted: Wanted) -> Pair:
        return self.recipe.pair(
            weight,
            "weight",
            over_rows=self._over_features("columns"),
            over_columns=self._over_features("rows"),
            wanted=wanted,
        )

    def refresh(self, weight: Tensor) -> None:
        """Round the weight now, in the layer's shape, if it has changed since it was."""
        if self._weight is None or self._weight_key != self._key_of(weight):
            self.weight(weight.detach().flatten(0, -2), BOTH)

    @property
    def weight_addresses(self) -> tuple[int, ...]:
        """Where the operands of the weight lie; they move where they aren't held in place."""
        return addresses(self._weight)

    @property
    def rounds_apart(self) -> bool:
        """True where operands of a weight are a cast with one scale, of its own largest value."""
        known = type(self.recipe) is FP8TensorRecipe and not self.recipe.lends_scales
        return known and self.keeps_weights

    def hold(self, weight: Tensor, pair: Pair) -> None:
        """Take operands of the weight as it is now, from who has made them."""
        self._weight, self._weight_key = pair, self._key_of(weight)

    def _key_of(self, weight: Tensor) -> tuple[int, ...]:
        held = weight if self.weight_held is None else self.weight_held
        return self.clock.time, held._version, weight.data_ptr()

    def weight_gradient(
        self, weight: Tensor, grad: Operand, x: Operand, *, sums: bool
    ) -> Tensor | None:
        """The gradient for autograd, or None once it is in its sum."""
        product = self.recipe.product
        if not sums:
            return product(grad, x, weight.dtype, forward=False)

        def write(total: Tensor, add: bool) -> None:
            total = total.view(weight.shape)
            if not add:
                product(grad, x, total.dtype, forward=False, out=total)
            elif not self.recipe.add_product_(total, grad, x):
                # Half the traffic of float32, and a rounding far below that of the factors;
                # float16 could overflow.
                exact = weight.dtype is torch.float16
                dtype = torch.float32 if exact else weight.dtype
                add_to_sum_(total, product(grad, x, dtype, forward=False))

        main_gradient_of(weight).add_written(write)
        return None

    def _row_axes(self, part: bool) -> list[MeshAxis]:
        return [self.context_axis, self.tensor_axis] if part else [self.context_axis]

    def _largest_of_ranks(self, parts: Tensor) -> Tensor:
        """Those of all tensor ranks: to join them gives the scale too, which a reduction of the
        joined ones would leave to one more kernel.
        """
        axis = self.tensor_axis
        if axis.size == 1:
            return parts
        joined = parts.new_empty(axis.size * parts.numel())
        all_gather_single(joined, parts.flatten(), group=axis.group)
        return joined

    def _over_features(self, split: TensorSplit) -> Callable[[Tensor], Tensor]:
        """Over the ranks that hold other features of a matrix which a layer split so splits."""
        agrees = self.split == split and not self.recipe.splits_scales
        return self._over([self.tensor_axis] if agrees else [])

    def _over(self, axes: list[MeshAxis]) -> Callable[[Tensor], Tensor]:
        split = [axis for axis in axes if axis.size > 1]
        return partial(largest_over, axes=split) if split else identity

    def _check_context_blocks(self, rows: int) -> None:
        """Blocks of tokens must not reach over the slices of a context rank (two, zig-zag)."""
        slices = 2 * self.recipe.block
        if self.context_axis.size > 1 and self.recipe.block > 1 and rows % slices:
            raise ValueError(
                f"quantization: {rows} tokens of a micro-batch on a context rank are two slices"
                f" that blocks of {self.recipe.block} tokens do not divide; make seq_length x"
                f" micro_batch_size / context_parallel_size a multiple of {slices}, or use a recipe"
                " without blocks"
            )

    def _check_tensor_blocks(self, rows: int) -> None:
        """Blocks of tokens must not reach over tensor ranks that hold parts of the sequence."""
        block = self.recipe.block
        if self.splits_sequence and self.tensor_axis.size > 1 and rows % block:
            raise ValueError(
                f"quantization: {rows} tokens of a micro-batch on a tensor rank"
                f" (tensor_parallel_size={self.tensor_axis.size}, sequence_parallel=True), which"
                f" blocks of {block} tokens do not divide: blocks would reach over ranks; make"
                " seq_length x micro_batch_size / (context_parallel_size x tensor_parallel_size) a"
                f" multiple of {block}, exclude layers whose weight is not split by name, or use a"
                " recipe without blocks"
            )


def _given(parts: Tensor | None, cast: Cast | None = None) -> dict[str, Any]:
    given = {"parts": parts, "cast": cast}
    return {name: value for name, value in given.items() if value is not None}


def largest_over(amax: Tensor, *, axes: list[MeshAxis]) -> Tensor:
    """Largest values over all ranks of `axes`, one after the other; in place."""
    for axis in axes:
        if axis.size > 1:
            amax = all_reduce_(amax.contiguous(), axis, "max")
    return amax


def _call(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return forward(x)


# Rounded weights, largest values and main gradients are kept from call to call, which a compiled
# region can't know of; so these layers lie between regions, as kernels of their own.
_outside_of_regions: Any = torch.compiler.disable(_call)

_WHOLE = MeshAxis(name="whole")
