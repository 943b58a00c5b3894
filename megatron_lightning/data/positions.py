"""Where a loader is in its data: a count of samples, and how Lightning's passes relate to it.

The state is the same on every rank and in every layout.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar


@dataclass(kw_only=True)
class Position:
    """Where a loader is; equal on all ranks, independent of the layout."""

    epoch: int = 0
    """Epoch of the data of the batch delivered last (or first to come), from 0."""
    consumed_in_epoch: int = 0
    """Samples of that epoch delivered to all ranks together, padding not counted."""
    consumed_samples: int = 0
    """Samples delivered to all ranks together since the run began, padding not counted."""
    pass_number: int = 0
    """The current pass over the loader (Lightning's epoch), from 0."""
    batches_in_pass: int = 0
    """Batches delivered in that pass."""


class PositionedLoader:
    """A loader with a position: its state, and what Lightning announces to it.

    Args:
        restart: begin every pass at the first sample of the first epoch.
        names: of the sources that the accounts of batches refer to by number.
    """

    position_type: ClassVar[type[Position]] = Position

    def __init__(self, *, restart: bool, names: tuple[str, ...]) -> None:
        self._restart, self._names = restart, names
        self._loaded_pass: int | None = None  # pass in which a loaded position was saved
        self.position = self.position_type()

    @property
    def sampler(self) -> "PositionedLoader":
        """The object whose `set_epoch` Lightning calls."""
        return self

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of the sources that the accounts of batches refer to by number."""
        return self._names

    def set_epoch(self, epoch: int) -> None:
        """Announces pass `epoch`; a loader without a position also begins with that data epoch."""
        self.position.pass_number = epoch
        if self.position.consumed_samples == 0 and not self._restart:
            self.position.epoch = epoch

    def _continues_pass(self, length: float) -> None:
        """Starts the count of a new pass, unless the loaded position lies within this one."""
        at = self.position
        if self._loaded_pass != at.pass_number or at.batches_in_pass >= length:
            at.batches_in_pass = 0
        self._loaded_pass = None

    def state_dict(self) -> dict[str, int]:
        """Returns the position: equal on all ranks, independent of the layout."""
        return asdict(self.position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at the position of `state`: in the pass in which it was saved, or in a pass
        announced since.

        Raises:
            ValueError: a field is missing or is no count.
        """
        names = [field.name for field in fields(self.position_type)]
        wrong = [name for name in names if type(state.get(name)) is not int or state[name] < 0]
        if wrong:
            raise ValueError(
                f"loader state {dict(state)} must hold a count for {', '.join(wrong)}: the "
                "checkpoint was written with another data loader"
            )
        self.position = self.position_type(**{name: state[name] for name in names})
        self._loaded_pass = self.position.pass_number
