"""Delayed scaling: FP8 tensors are scaled by the largest values of past steps (arXiv 2209.05433).

So it is rounded in one pass over memory, without waiting for its own largest value, and no rank has
to be asked within a step: largest values are gathered once at the end of a window, over all ranks
that hold or see other parts of a tensor. What a checkpoint keeps is the history of each layer; a
scale follows from it. In the first window, without a history, tensors are scaled by themselves. A
tensor without a value in the history later (of a layer that joins, or one that was all zero) is
scaled by 1 for a window: only the device knows, and its own largest value would take another pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_lightning.precision.formats import FP8_MAX, power_of_two_scale
from megatron_lightning.precision.operands import Reduce, Role, largest
from megatron_lightning.precision.simulated import TensorRecipe

ROLES: tuple[Role, ...] = ("input", "weight", "gradient")
_STEP = 4
"""Float32 numbers from one scale to the next: cuBLAS wants each at a multiple of 16 bytes."""


class DelayedScaling:
    """Histories of the layers of one rank, by canonical name."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        gradient: str,
        length: int,
        margin: int,
        device: torch.device,
    ) -> None:
        self.names = tuple(names)
        self._gradient = gradient
        limits = [FP8_MAX[gradient if role == "gradient" else "e4m3"] for role in ROLES]
        self._limits = torch.tensor(limits, device=device) * 2.0**-margin
        self.amax = torch.zeros(len(self.names), len(ROLES), device=device)
        """Largest values of this window so far: (layers, roles)."""
        self.scales = torch.ones_like(self.amax)
        self.inverses = torch.ones(*self.amax.shape, _STEP, device=device)[..., 0]
        """1 / scale; each at an address that products take."""
        self.history = torch.zeros(*self.amax.shape, length, device=device)
        """Largest values of past windows, the last one first: (layers, roles, length)."""
        self.has_history = False
        self.recording = True
        """False while nothing is learned: evaluation leaves no trace."""

    def recipe(self, name: str) -> DelayedRecipe:
        """The recipe of one layer."""
        return DelayedRecipe(self, self.names.index(name), self._gradient)

    def finish_window(self, over_ranks: Reduce) -> None:
        """Take the window's largest values, over all ranks, into the history, and set the scales
        of the next one. Values that aren't finite (an overflow in float16) are left out.
        """
        amax = over_ranks(self.amax)
        amax = torch.where(amax.isfinite(), amax, 0.0)
        self.history = torch.cat((amax[..., None], self.history[..., :-1]), dim=-1)
        self.amax.zero_()
        self._set_scales()

    def tensors(self) -> dict[str, Tensor]:
        """Histories by layer, (roles, length) each: what is saved, and loaded into in place."""
        return {name: self.history[i] for i, name in enumerate(self.names)}

    def loaded(self) -> None:
        """After histories were read into `tensors`, which are views."""
        if bool(self.history.any()):
            self._set_scales()

    def _set_scales(self) -> None:
        top = self.history.amax(dim=-1)
        scales = [power_of_two_scale(top[:, i] / self._limits[i], 1.0) for i in range(len(ROLES))]
        self.scales.copy_(torch.stack(scales, dim=1))
        self.inverses.copy_(self.scales.reciprocal())
        self.has_history = True


class DelayedRecipe(TensorRecipe):
    """`TensorRecipe` by what the store knows of one layer."""

    def __init__(self, store: DelayedScaling, index: int, gradient: str) -> None:
        super().__init__(gradient)
        self.store = store
        self.index = index

    def __deepcopy__(self, memo: dict[int, object]) -> DelayedRecipe:
        """Itself: copies of a network (weight averaging) don't train."""
        return self

    @property
    def is_settled(self) -> bool:
        """See `Recipe.is_settled`: in the first window there is no history."""
        return self.store.has_history

    def place(self, role: Role) -> tuple[Tensor, Tensor, Tensor]:
        """0-dim views: the window's largest value so far, the scale, 1 / scale."""
        i, store = ROLES.index(role), self.store
        return store.amax[self.index, i], store.scales[self.index, i], store.inverses[self.index, i]

    def scale(self, x: Tensor, role: Role, over_rows: Reduce, over_columns: Reduce) -> Tensor:
        """See `TensorRecipe.scale`."""
        amax, scale, _ = self.place(role)
        if self.store.recording or not self.store.has_history:
            own = largest(x)
            if self.store.recording:
                torch.maximum(amax, own, out=amax)
            if not self.store.has_history:
                own = over_columns(over_rows(own))
                return power_of_two_scale(own, FP8_MAX[self.format_of(role)])
        return scale
