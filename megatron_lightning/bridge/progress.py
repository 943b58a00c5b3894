"""A bar on the standard error while tensors are read or written: on the first rank, where it is a
terminal.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from tqdm import tqdm


class Bar:
    """Counts what is done of a total that may grow; gone from the screen's last line when all of
    it is.
    """

    def __init__(self, title: str, unit: str) -> None:
        first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
        self._title, self._unit = title, unit
        self._hidden: bool | None = None if first else True  # None: unless it is a terminal
        self._bar: Any = None
        self.total = self.done = 0

    @classmethod
    @contextmanager
    def of(cls, title: str, num_bytes: int) -> Iterator[Bar]:
        """A bar for so many bytes, gone with the context."""
        bar = cls(title, "B")
        bar.expect(num_bytes)
        try:
            yield bar
        finally:
            bar.close()

    def __getstate__(self) -> dict[str, object]:
        """Without what is drawn."""
        return {**self.__dict__, "_bar": None}

    def expect(self, amount: int) -> None:
        """Let the total grow."""
        self.total += amount
        if self._bar is not None:
            self._bar.total = self.total

    def update(self, amount: int) -> None:
        """Count what was done."""
        if self._bar is None:
            self._bar = tqdm(
                desc=self._title,
                total=self.total,
                initial=self.done,
                unit=self._unit,
                unit_scale=True,
                disable=self._hidden,
                mininterval=0.5,
            )
        self.done += amount
        self._bar.update(amount)
        if self.done >= self.total:
            self.close()

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
