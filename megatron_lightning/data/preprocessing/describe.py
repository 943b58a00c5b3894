"""Digests of the sources for the data card."""

import threading
from collections.abc import Sequence
from typing import Any

from megatron_lightning.data.preprocessing.dataset_sources import StreamedSource
from megatron_lightning.data.preprocessing.files import Source


class Describing:
    """Digests of the sources, computed beside the work (hashing does not hold the interpreter)."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._found: dict[int, list[dict[str, Any]]] = {}
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._describe, daemon=True)
        self._thread.start()

    def _describe(self) -> None:
        try:
            for number, source in enumerate(self._sources):
                if not isinstance(source, StreamedSource):  # which is known when it was read
                    self._found[number] = source.describe()
        except Exception as error:  # raised where the result is asked for
            self._error = error

    def result(self) -> list[dict[str, Any]]:
        """Returns the entries of all sources, in order."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        entries = [
            self._found[number] if number in self._found else source.describe()
            for number, source in enumerate(self._sources)
        ]
        return [entry for found in entries for entry in found]
