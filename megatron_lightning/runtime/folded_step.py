"""The factor that gradients still wait for, and the optimizer's step that takes it along.

Dividing by the window's weight and clipping would each be a pass over all gradients. Where nothing
but the optimizer reads them (`fold`), both are kept as one factor, and `optim.adam_pass` multiplies
by it while it updates. Whoever asks this package for gradients gets them scaled: `settle` makes up
for it. A window of weight 0 leaves everything unchanged without the host knowing of it; it is told
a window or so later.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron_lightning.optim.adam_pass import AdamPass, Copies, Stages, all_fit, can_pass
from megatron_lightning.parallel.data import GradientBuckets
from megatron_lightning.utils.tensors import scalar


class FoldedStep:
    """Steps of one optimizer over gradient buckets, in one pass."""

    def __init__(
        self,
        optimizer: Optimizer,
        copies: Copies,
        device: torch.device,
        *,
        fold: bool,
        stages: Stages | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._device = device
        self._fold = fold
        self._pass = AdamPass(optimizer, copies, stages)
        self._buckets: GradientBuckets | None = None
        self._factor: Tensor | None = None
        self._active = torch.ones((), device=device)
        self._notices: list[tuple[Tensor, torch.cuda.Event | None]] = []
        self.is_rounded = False
        """True when the pass has the last word in this step: copies need no rounding after it."""

    @classmethod
    def of(
        cls,
        optimizers: Sequence[Optimizer],
        copies: Copies,
        device: torch.device,
        *,
        fold: bool,
        stages: Stages | None = None,
    ) -> FoldedStep | None:
        """For one optimizer that the pass can stand in for, else None. `stages`: see `AdamPass`."""
        if len(optimizers) != 1 or not can_pass(optimizers[0]):
            return None
        if not all_fit(optimizers[0], copies):
            return None
        return cls(optimizers[0], copies, device, fold=fold, stages=stages)

    # ------------------------------------------------------------------ one window

    def reduce(self, buckets: GradientBuckets, weight: Tensor | float) -> None:
        """Sum the window's gradients; divide them by `weight`, or keep that for later."""
        buckets.sum()
        exact = scalar(weight, self._device)
        self._buckets = buckets
        self._active = (exact != 0).float()
        self._factor = torch.where(exact == 0, torch.ones_like(exact), exact).reciprocal().float()
        if not self._fold:
            self.settle()
        self._notice()

    def settle(self) -> None:
        """Make gradients what they should be."""
        if self._factor is not None:
            assert self._buckets is not None
            self._buckets.scale(self._factor)
            self._factor = None

    def fold(self, factor: Tensor) -> bool:
        """Let gradients be multiplied by `factor`, too, later; False where they don't wait."""
        if self._factor is None:
            return False
        self._factor = (self._factor * factor).float()
        return True

    @property
    def active(self) -> Tensor:
        """0-dim, on the device: 0 where the last window had no weight, else 1."""
        return self._active

    @property
    def factor(self) -> Tensor | None:
        """What gradients are to be multiplied with; None when they are what they should be."""
        return self._factor

    def before_step(self) -> None:
        """Take the gradients for the pass, right before the optimizer's own step."""
        if self._buckets is None:
            return  # no window has ended
        settled = self._factor is None
        factor = torch.ones_like(self._active) if self._factor is None else self._factor
        if can_pass(self._optimizer) and self._pass.take(factor, self._active, keep=settled):
            self.is_rounded = self._pass.is_last
            return
        self.settle()
        if not bool(self._active):
            for group in self._optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def finish(self) -> None:
        """After the step: gradients that were not scaled are nobody's business."""
        self._pass.drop()
        if self._factor is not None and self._buckets is not None:
            self._buckets.withdraw()
        self._buckets = self._factor = None
        self.is_rounded = False

    def release(self) -> None:
        """Let the optimizer step by itself again."""
        self._pass.remove()

    # ------------------------------------------------------------------ empty windows

    def _notice(self) -> None:
        """Send word to the host whether the window had any weight."""
        if self._device.type != "cuda":
            self._notices.append((self._active, None))
            return
        word = torch.empty((), dtype=self._active.dtype, pin_memory=True)
        word.copy_(self._active, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._notices.append((word, event))

    def heard_of_empty_window(self) -> bool:
        """Whether word has come that a window had no weight; doesn't wait for any."""
        found = False
        while self._notices:
            word, event = self._notices[0]
            if event is not None and not event.query():
                break
            self._notices.pop(0)
            found = found or not bool(word)
        return found
