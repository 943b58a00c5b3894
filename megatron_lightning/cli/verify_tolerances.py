"""How close a layout must come to the baseline, for each dtype. Stated before anything runs.

Two layouts of one training differ by the order of their sums and by nothing else. The numbers hold
for about four layers, lr <= 1e-3 and ten steps, and grow with the root of the depth: 10 roundings a
layer, each independent of the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

TABLE_LAYERS = 4
"""Depth for which the table is written."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Relative errors that are allowed; see each field for what of."""

    activation: float
    """Norm of the difference over norm, of what one rank holds of one module's output."""
    token_loss: float
    """Norm of the difference over norm, of one rank's losses of single tokens."""
    loss: float
    """Of each step's loss."""
    gradient_norm: float
    """Of each step's global norm before clipping."""
    gradient: float
    """Norm of the difference over norm, for each parameter, in the first step."""
    zero_gradient: float
    """A gradient, or an element of one, of at most this part of the global norm counts as zero."""
    first_update: float
    """Norm of the difference over norm of the change of each parameter in the first step, over the
    elements whose gradient is not lost in rounding."""
    update: float
    """The same over all steps."""

    def at_depth(self, num_layers: int) -> Limits:
        """The limits for a network of another depth; never tighter than the table."""
        factor = max(1.0, math.sqrt(num_layers / TABLE_LAYERS))
        return Limits(**{name: value * factor for name, value in vars(self).items()})


LIMITS = {
    "32-true": Limits(
        # 40 roundings of 6e-8 and sums of some hundred terms: at most 8e-6; measured near 5e-7.
        activation=1e-5,
        token_loss=1e-5,
        loss=1e-5,
        gradient_norm=1e-5,
        gradient=1e-5,
        zero_gradient=1e-5,
        # Adam's first step is the gradient's sign where that is known to 1 %.
        first_update=1e-3,
        # A rounding n in a gradient of spread s changes ten of Adam's steps by sqrt(3 n / s).
        update=2e-2,
    ),
    "bf16-mixed": Limits(
        # Unit roundoff 3.9e-3, root mean square 2.3e-3; two reductions of rounded sums a layer.
        activation=2e-2,
        token_loss=3e-2,
        loss=1e-2,
        gradient_norm=3e-2,
        gradient=5e-2,
        zero_gradient=1e-2,
        first_update=3e-1,
        update=5e-1,
    ),
}
LIMITS["64-true"] = Limits(
    **{name: value * 1e-6 for name, value in vars(LIMITS["32-true"]).items()}
)
LIMITS["bf16-true"] = LIMITS["bf16-mixed"]
