"""Progress on the standard error: a bar on a terminal, a line now and then in a log."""

import sys
import time
from typing import TextIO

_BAR = 24  # characters
_BAR_SECONDS, _LINE_SECONDS = 0.2, 30.0


class Progress:
    """Counts what is done of `total` and shows it.

    Args:
        total: length of all sources, see `Source.size`.
        stream: where it is shown; None means nowhere.
    """

    def __init__(self, total: int, stream: TextIO | None = sys.stderr) -> None:
        self._total, self._stream = max(total, 1), stream
        self._bar = stream is not None and stream.isatty()
        self._started = self._shown = time.monotonic()
        self._reused = 0
        self._drawn = False
        self.done = self.documents = self.tokens = self.skipped = 0

    def reuse(self, length: int) -> None:
        """Counts what was there already; it does not count for the speed."""
        self.done += length
        self._reused += length

    def show(self) -> None:
        """Shows the state if it is time to."""
        now = time.monotonic()
        if self._stream is None or now - self._shown < (
            _BAR_SECONDS if self._bar else _LINE_SECONDS
        ):
            return
        self._shown = now
        if self._bar:
            self._drawn = True
            self._stream.write(f"\r{self.line(now)}\x1b[K")
            self._stream.flush()
        else:
            self.say(self.line(now))

    def say(self, text: str) -> None:
        """Shows a line of its own."""
        if self._stream is not None:
            self.clear()
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def clear(self) -> None:
        """Removes the bar."""
        if self._stream is not None and self._drawn:
            self._drawn = False
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def line(self, now: float) -> str:
        """Returns the state as text."""
        share = min(self.done / self._total, 1.0)
        seconds = max(now - self._started, 1e-9)
        rest = ""
        if self.done > self._reused and share < 1:
            left = seconds * (self._total - self.done) / (self.done - self._reused)
            rest = f", {_clock(left)} left"
        filled = round(share * _BAR)
        bar = f"[{'#' * filled}{'.' * (_BAR - filled)}] " if self._bar else ""
        skipped = f", {self.skipped:,} skipped" if self.skipped else ""
        return (
            f"{bar}{share:4.0%}  {self.documents:,} documents, {self.tokens:,} tokens{skipped}, "
            f"{self.documents / seconds:,.0f} documents/s{rest}"
        )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
