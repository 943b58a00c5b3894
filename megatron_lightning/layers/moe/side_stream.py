"""A CUDA stream on which a part of a layer runs beside the rest of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class SideStream:
    """Runs a function of one tensor on a stream of its own; autograd runs its backward there too.

    Shared experts run there while tokens travel to the routed ones and back. Gradients that are
    added there are waited for by the gradient buckets (`parallel/data.py`).
    """

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()

    def __deepcopy__(self, memo: dict[int, Any]) -> SideStream:
        """Itself: a stream is shared, also by copies of a network (weight averaging)."""
        return self

    def begin(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Tensor]:
        """Start `function(x)` behind what the current stream has to do; call the result for its
        output, for which the then current stream waits.
        """
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            x.record_stream(self.stream)
            y = function(x)

        def finish() -> Tensor:
            current = torch.cuda.current_stream()
            current.wait_stream(self.stream)
            y.record_stream(current)
            return y

        return finish
