"""Which matrix products of a network run in eight or four bits, and how. Pure data."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from megatron_lightning.config.field_types import type_problems
from megatron_lightning.config.names import NamesFields

RecipeName = Literal[
    "fp8_tensorwise", "fp8_delayed", "fp8_rowwise", "fp8_blockwise", "mxfp8", "nvfp4"
]
GradientFormat = Literal["e5m2", "e4m3"]
ProductKernels = Literal["torch", "transformer_engine"]

REAL_RECIPES = ("fp8_tensorwise", "fp8_delayed", "fp8_rowwise", "fp8_blockwise")
"""Recipes that run on the GPU's FP8 units; the others are simulated."""
ROW_EXPERTS = ("fp8_tensorwise", "fp8_delayed", "fp8_rowwise")
"""Recipes that give experts a scale for each row, whatever they give linear layers."""
ENGINE_RECIPES = ("fp8_tensorwise", "fp8_delayed", "fp8_blockwise")
"""Those that run by Transformer Engine."""
_LARGEST_MARGIN = 17
"""Powers of two from the smallest value of E4M3, 2^-9, to that of its largest, 2^8."""


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig(NamesFields):
    """Low precision of the linear layers within a plan's layers; see docs/precision.md.

    Embedding, head, norms, attention and routers keep the precision of the run.
    """

    recipe: RecipeName = "fp8_tensorwise"
    """Number format and what shares a scale: a tensor (fp8_tensorwise; fp8_delayed by the largest
    values of past steps), a row (fp8_rowwise), blocks of 128 and 128x128 (fp8_blockwise), of 32
    (mxfp8), of 16 and 16x16 (nvfp4)."""
    simulate: bool = False
    """Round to the format and multiply in the run's precision: the numbers of the recipe on any
    device, without its speed."""
    kernels: ProductKernels = "torch"
    """Who casts and multiplies: torch with kernels of this package, or Transformer Engine."""
    keep_first: int = 1
    """Layers at the beginning of the network that stay in the run's precision."""
    keep_last: int = 1
    """Layers at its end that stay so."""
    experts: bool = False
    """Experts of a mixture too. With fp8_tensorwise, fp8_delayed and fp8_rowwise they are in E4M3
    with a scale for each row, on compute capability 9.0 all experts in one product. With other
    recipes one expert comes after the other and the host waits for their counts, which on a GPU is
    slow."""
    exclude: Sequence[str] = ()
    """Globs over names of linear layers that stay so too, e.g. "*.linear_proj"."""
    gradient_format: GradientFormat | None = None
    """FP8 format of output gradients: e5m2 (wide range) or e4m3. None: e5m2, but e4m3 for
    fp8_blockwise, mxfp8 and experts with a scale for each row. Without meaning for nvfp4."""
    amax_history_length: int = 1024
    """fp8_delayed: steps whose largest values a scale covers."""
    margin: int = 0
    """fp8_delayed: powers of two between the largest value seen and that of the format; 0 to 17."""
    stochastic_rounding: bool = True
    """nvfp4: round gradients up or down with the probability that keeps their mean."""
    hadamard: bool = True
    """nvfp4: spread outliers of the weight gradient's two factors by a random Hadamard transform
    over 16 tokens."""

    fp8_gather: bool = False
    """fp8_tensorwise with sharding="optimizer" and masters: what the optimizer has updated is
    gathered in eight bits for these layers, half the bytes. Training is the same, but whoever else
    reads the weights (exports, averages) sees them rounded; masters and checkpoints are not."""

    @property
    def scales_rows_of_experts(self) -> bool:
        """Whether experts have a scale for each row and are multiplied all at once."""
        return self.experts and self.recipe in ROW_EXPERTS

    @property
    def gradient(self) -> GradientFormat:
        """`gradient_format`, or what stands for None."""
        if self.gradient_format is not None:
            return self.gradient_format
        return "e4m3" if self.recipe in ("fp8_blockwise", "mxfp8") else "e5m2"

    def check(self) -> list[str]:
        """Return every violation as one explained sentence; an empty list when there is none."""
        if wrong := type_problems(self, "quantization."):
            return wrong
        problems = []
        if self.recipe not in get_args(RecipeName):
            problems.append(
                f"quantization.recipe={self.recipe!r}: choose one of {get_args(RecipeName)}"
            )
        elif not self.simulate and self.recipe not in REAL_RECIPES:
            problems.append(
                f"quantization.recipe={self.recipe!r} with simulate=False: its products need"
                f" hardware that this package has no kernels for; use one of {REAL_RECIPES}, or"
                " simulate=True for the recipe's numbers without its speed"
            )
        elif not self.simulate and self.recipe == "fp8_blockwise" and self.gradient == "e5m2":
            problems.append(
                "quantization.gradient_format='e5m2' with recipe='fp8_blockwise': products of"
                " blocks take e4m3; leave it at None, or use simulate=True"
            )
        if self.fp8_gather and (
            self.recipe != "fp8_tensorwise" or self.experts or self.kernels != "torch"
        ):
            problems.append(
                f"quantization.fp8_gather=True with recipe={self.recipe!r}, experts={self.experts},"
                f" kernels={self.kernels!r}: it knows the scales of recipe='fp8_tensorwise',"
                " experts=False, kernels='torch' only; use these, or fp8_gather=False"
            )
        if self.scales_rows_of_experts and self.gradient_format == "e5m2":
            problems.append(
                f"quantization.gradient_format='e5m2' with recipe={self.recipe!r}, experts=True:"
                " products of experts take e4m3; leave it at None (experts e4m3, linear layers"
                " e5m2), or set experts=False"
            )
        problems += self._kernel_problems()
        if self.gradient_format not in (None, *get_args(GradientFormat)):
            problems.append(
                f"quantization.gradient_format={self.gradient_format!r}: choose one of"
                f" {get_args(GradientFormat)}, or None for the recipe's own"
            )
        for name in ("keep_first", "keep_last", "margin"):
            if getattr(self, name) < 0:
                problems.append(f"quantization.{name}={getattr(self, name)}: must be at least 0")
        if self.amax_history_length < 1:
            problems.append(
                f"quantization.amax_history_length={self.amax_history_length}: must be at least 1"
            )
        if self.margin > _LARGEST_MARGIN:
            problems.append(
                f"quantization.margin={self.margin}: must be at most {_LARGEST_MARGIN}, since E4M3"
                " has no more powers of two: beyond it hardly a value is not rounded to zero"
            )
        listed = isinstance(self.exclude, Collection) and not isinstance(self.exclude, str)
        if not listed or not all(isinstance(glob, str) for glob in self.exclude):
            problems.append(
                f"quantization.exclude={self.exclude!r}: give a list of globs, each of them text"
            )
        return problems

    def _kernel_problems(self) -> list[str]:
        if self.kernels not in get_args(ProductKernels):
            names = get_args(ProductKernels)
            return [f"quantization.kernels={self.kernels!r}: choose one of {names}"]
        if self.kernels == "torch":
            return []
        if self.simulate:
            return [
                "quantization.simulate=True with kernels='transformer_engine': it simulates"
                " nothing; use kernels='torch', or simulate=False"
            ]
        if self.recipe in REAL_RECIPES and self.recipe not in ENGINE_RECIPES:
            return [
                f"quantization.recipe={self.recipe!r} with kernels='transformer_engine': it has no"
                f" such recipe; use one of {ENGINE_RECIPES}, or kernels='torch'"
            ]
        return []
