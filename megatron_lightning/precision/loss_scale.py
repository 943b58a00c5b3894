"""Dynamic loss scaling for float16 (mixed-precision training, arXiv 1710.03740).

The loss is multiplied by the scale before the backward pass, so that small gradients are not lost
in float16, and the summed float32 gradients are divided by it at the end of the window. A step
whose gradients are not finite is skipped and the scale halved; after a number of good steps it is
doubled. Before the first good step it is divided by 16 at a time: losses that are summed over
tokens (`loss_normalization="token"`) need a scale that is smaller by their number. The state is a
few numbers on the host: every rank decides by the global gradient norm, which is the same on all of
them, so that no rank has to be asked.
"""

from __future__ import annotations

from typing import Any

from megatron_lightning.config.loss_scale import LossScaleConfig

_GROWTH = 2.0
_SEARCH = 16.0
"""What the scale is divided by while no step has been made yet."""
_LARGEST = 2.0**40
"""The scale does not grow beyond this; it multiplies a float32 loss."""


class LossScaler:
    """The scale and how it changes. The same on every rank."""

    def __init__(self, config: LossScaleConfig | None = None) -> None:
        self.config = config or LossScaleConfig()
        self.scale = float(self.config.initial)
        """Factor of the loss in the next step."""
        self.good_steps = 0
        """Steps with finite gradients since the scale last changed."""
        self.tolerated = 0
        """Steps without finite gradients since the scale last grew that did not halve it."""
        self.skipped_in_a_row = 0
        """Steps skipped since the last one that was made."""
        self.skipped_steps = 0
        """Steps skipped since training began."""
        self.made_a_step = False

    def update(self, *, finite: bool) -> None:
        """Take note of one step, and set the scale of the next one.

        FloatingPointError after `max_skipped_steps` steps in a row without finite gradients.
        """
        if finite:
            self._good()
            return
        self.good_steps = 0
        self.skipped_steps += 1
        self.skipped_in_a_row += 1
        used = self.scale
        self.tolerated += 1
        if self.tolerated >= self.config.hysteresis and not self.config.static:
            lower = self.scale / (_GROWTH if self.made_a_step else _SEARCH)
            self.scale = max(lower, min(self.scale, self.config.minimum))
        if self.skipped_in_a_row >= self.config.max_skipped_steps:
            raise FloatingPointError(
                f"{self.skipped_in_a_row} steps in a row had gradients that are not finite, at last"
                f" with loss scale {used:g}: scaling does not help against that. Look for a loss"
                " that is not finite (data, learning rate), or train with precision='bf16-mixed'"
            )

    def _good(self) -> None:
        self.made_a_step = True
        self.skipped_in_a_row = 0
        self.good_steps += 1
        if self.good_steps >= self.config.growth_interval:
            self.good_steps = self.tolerated = 0
            if not self.config.static:
                self.scale = min(self.scale * _GROWTH, max(self.scale, _LARGEST))

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "scale": self.scale,
            "good_steps": self.good_steps,
            "tolerated": self.tolerated,
            "skipped_in_a_row": self.skipped_in_a_row,
            "skipped_steps": self.skipped_steps,
            "made_a_step": self.made_a_step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`. A static scale stays that of the config."""
        if not self.config.static:
            self.scale = float(state["scale"])
        for name in ("good_steps", "tolerated", "skipped_in_a_row", "skipped_steps"):
            setattr(self, name, int(state[name]))
        self.made_a_step = bool(state["made_a_step"])
