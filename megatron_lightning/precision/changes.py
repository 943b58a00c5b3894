"""Which weights a user has changed since masters were made of them, before training begins.

Masters hold more than the weights, so a hook that writes to weights would be undone by the first
step. Whether it did is asked once: a number made of all bits of a weight is compared with the one
noted before. What is changed later, between steps, is not seen.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_ONCE = 1 << 24
"""Elements looked at together, which takes up to 16 bytes for each."""
_ODD = 1_000_003


class WeightChanges:
    """Weights by name, as they were when this was made; fully sharded ones as their shards."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = dict(weights)
        self._before = self._prints()

    def names(self, agree: Callable[[Tensor], None]) -> frozenset[str]:
        """Those that have changed since on any of the ranks over which `agree` takes the least, in
        place. All of them must call this.
        """
        if self._before is None:
            return frozenset()
        same = (self._prints() == self._before).int()
        agree(same)
        verdicts = zip(self._weights, same.tolist(), strict=True)
        return frozenset(name for name, verdict in verdicts if not verdict)

    def _prints(self) -> Tensor | None:
        prints = [_print_of(weight) for weight in self._weights.values()]
        return torch.stack(prints) if prints else None


@torch.no_grad()
def _print_of(weight: Tensor) -> Tensor:
    """A 0-dim int64 that all bits and their places go into."""
    value = weight.to_local() if isinstance(weight, DTensor) else weight
    bits = value.detach().contiguous().view(-1).view(_INTEGERS[value.element_size()])
    if bits.device.type == "cpu":
        return torch.tensor(zlib.crc32(bits.view(torch.uint8).numpy().data))
    return _sum_of(bits)


def _sum_of(bits: Tensor) -> Tensor:
    """The same of integers on a device that adds faster than it could send them to the host."""
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for part in bits.split(_AT_ONCE):
        # Factors whose sum has no large power of two: all elements may change by the same one.
        factors = torch.arange(len(part), device=bits.device).mul_(2 * _ODD).add_(1)
        total = total * _ODD + factors.mul_(part).sum()
    return total
