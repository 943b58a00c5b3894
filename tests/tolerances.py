"""How close two runs of one training must be, per dtype. Written before the first comparison.

A tolerance is not widened to make a test pass: a test that needs more shows a mistake, or something
that belongs into this table with its reason. Two layouts of one training differ by the order of
their sums and by nothing else, so each number follows from the rounding of the dtype, the depth of
the small models in the tests (4 layers, about 10 roundings each), and what AdamW does with it.
Steps are counted from 0. The numbers hold for lr <= 1e-3 and at most ten steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LR = 1e-3


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Limits for one dtype of the computation; masters and accumulated gradients are float32."""

    loss: float
    """Relative, at every step."""
    gradient_norm: float
    """Relative, of the global norm before clipping, at every step."""
    first_gradient: float
    """Norm of the difference over norm, for each parameter, at step 0."""
    later_gradient: float
    """The same at later steps."""
    zero_gradient: float
    """A gradient of at most this part of the global norm counts as zero."""
    update: float
    """Norm of the difference over norm of the change since the start, for each parameter."""


TOLERANCES: dict[torch.dtype, Tolerance] = {
    # Unit roundoff 6e-8.
    torch.float32: Tolerance(
        # 40 roundings in the depth and sums of some hundred terms: sqrt(40 * 500) * 6e-8 = 8e-6 if
        # every error pointed the same way; measured differences are near 5e-7.
        loss=1e-5,
        gradient_norm=1e-5,
        # The same weights and one pass forward and backward: as for the loss.
        first_gradient=1e-5,
        # AdamW divides by the gradient's own size, so that rounding in an element that is nearly
        # zero moves its weight by up to 2 lr. At lr 5e-3 ten steps magnify the re-ordering of sums
        # to 7e-5, at 1e-3 to less; the limit leaves room for deeper sums.
        later_gradient=1e-4,
        # What remains of a true zero (a key bias, which softmax cancels): a sum of 512 rounded
        # terms, sqrt(512) * 6e-8 = 1.4e-6 of their size, which is at most the global norm.
        zero_gradient=1e-5,
        # An error n in a gradient element g changes AdamW's step by min(n / g, 2) of its size. For
        # elements spread around zero with deviation s the mean square of that is about 3 n / s;
        # with n / s = 1e-4, as above, its root is 1.7e-2.
        update=2e-2,
    ),
    # Unit roundoff 2^-8 = 3.9e-3, root mean square of a rounding 2.3e-3.
    torch.bfloat16: Tolerance(
        # Partial sums rounded before each reduction, two a layer: 2.3e-3 * sqrt(8) = 6.5e-3 of the
        # logits, which are of size 1 to 3: 2e-2 a token, twice that in its loss, over a loss of 5.
        loss=1e-2,
        # Errors of single elements are independent and nearly cancel in the norm of all of them;
        # what remains is the drift of the weights (below).
        gradient_norm=3e-2,
        # 80 roundings forward and backward: 2.3e-3 * sqrt(80) = 2e-2; twice and a half of it, since
        # some parameters (biases, norms) sum few of them.
        first_gradient=5e-2,
        # n / s = 2e-2 gives an error of sqrt(3 * 2e-2) = 25 % of the change of the weights, which
        # after ten steps of lr 1e-3 is half of a weight (deviation 0.02): 12 %, and as much in what
        # the gradients have become.
        later_gradient=2e-1,
        # sqrt(512) * 2.3e-3 = 5e-2 of a single term, which is far below the global norm.
        zero_gradient=1e-2,
        # sqrt(3 * 5e-2) = 0.39.
        update=5e-1,
    ),
}

# AdamW's step without weight decay is at most 1.17 lr an element with betas (0.9, 0.95), and within
# ten steps 1.05 lr with (0.9, 0.999) (Cauchy-Schwarz on both moments). So no element, not even one
# whose gradient is nothing but rounding, may differ by more than twice that for each step made.
ELEMENT_LIMIT_PER_LR = 2.4

# Recorded runs of another implementation: other kernels, sums in another order in every layer, and
# printed values of six digits.
RECORDED = 1e-4


def relative_error(got: float, want: float) -> float:
    """|got - want| / |want|; the absolute difference where want is 0."""
    return abs(got - want) / (abs(want) or 1.0)


def assert_loss_close(
    got: float | Tensor, want: float | Tensor, step: int = 0, dtype: torch.dtype = torch.float32
) -> None:
    """Compare the losses of one step."""
    _check(f"loss at step {step}", relative_error(float(got), float(want)), TOLERANCES[dtype].loss)


def assert_gradient_norm_close(
    got: float | Tensor, want: float | Tensor, step: int = 0, dtype: torch.dtype = torch.float32
) -> None:
    """Compare the global gradient norms, before clipping, of one step."""
    error = relative_error(float(got), float(want))
    _check(f"gradient norm at step {step}", error, TOLERANCES[dtype].gradient_norm)


def assert_gradient_close(
    name: str,
    got: Tensor,
    want: Tensor,
    global_norm: float | Tensor,
    step: int = 0,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Compare a parameter's whole gradients; a zero one (see the table) against `global_norm`."""
    tolerance = TOLERANCES[dtype]
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    scale = want.double().norm().item()
    limit = tolerance.first_gradient if step == 0 else tolerance.later_gradient
    if scale <= tolerance.zero_gradient * float(global_norm):
        scale, limit = float(global_norm), tolerance.zero_gradient
    difference = (got.double() - want.double()).norm().item()
    _check(f"gradient of {name} at step {step}", difference / (scale or 1.0), limit)


def assert_update_close(
    name: str,
    got: Tensor,
    want: Tensor,
    initial: Tensor,
    learning_rates: Sequence[float],
    zero_gradient: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Compare a parameter after AdamW steps at `learning_rates`, one for each step made.

    Elements where the boolean `zero_gradient` is true have no true gradient: AdamW turns their
    rounding into full steps, so that only the limit for each element applies to them.
    """
    assert max(learning_rates) <= MAX_LR, f"the table holds for lr <= {MAX_LR}"
    difference = got.double() - want.double()
    if dtype == torch.bfloat16:
        # What is compared are stored weights: both were rounded to bfloat16 once more, by up to
        # half a unit in the last place each, which near 1.0 is more than some steps of AdamW.
        stored = torch.finfo(torch.bfloat16).eps * want.double().abs()
        difference = difference.sign() * (difference.abs() - stored).clamp(min=0.0)
    cap = ELEMENT_LIMIT_PER_LR * sum(learning_rates)
    largest = difference.abs().max().item() if difference.numel() else 0.0
    _check(f"largest difference in {name}", largest, cap)
    live = torch.ones_like(want, dtype=torch.bool) if zero_gradient is None else ~zero_gradient
    change = (want.double() - initial.double())[live].norm().item()
    error = difference[live].norm().item() / (change or 1.0)
    _check(f"update of {name}", error, TOLERANCES[dtype].update)


def assert_recorded_close(got: float | Tensor, want: float | Tensor, what: str = "value") -> None:
    """Compare a loss or gradient norm with that of a recorded run."""
    _check(what, relative_error(float(got), float(want)), RECORDED)


def _check(what: str, error: float, limit: float) -> None:
    assert error <= limit, f"{what}: differs by {error:.3g}, allowed is {limit:.3g}"  # NaN fails
