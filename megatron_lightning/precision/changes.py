"""Which weights a user has changed since masters were made of them, or last rounded to them.

Masters hold more than the weights, so a hook that writes to weights would be undone by the next
step. Before training, values tell: a number made of all bits of a weight is compared, once, with
the one noted before. Between steps, where nobody may wait for the device, torch's own counters of
writes tell which weights are to be compared with their masters, and the device does that.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_ONCE = 1 << 24
"""Elements looked at together, which takes up to 16 bytes for each."""
_ODD = 1_000_003
_version, _place = attrgetter("_version"), Tensor.data_ptr


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
        prints = [print_of(weight) for weight in self._weights.values()]
        return torch.stack(prints) if prints else None


class WeightWrites:
    """Counts of writes to weights. `weights`, by name, may be added to; see `follow`.

    Every in-place operation on a weight, its views or its `detach()` counts, without autograd or in
    inference mode too, and so does other memory (`weight.data = ...`). What is written through
    `weight.data`, NumPy or an address does not. All of it is known to the host, which reads two
    numbers of each weight.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self._versions: list[int] = []
        self._places: list[int] = []
        self.follow()

    def follow(self) -> None:
        """Count for weights that were added, from now on."""
        known = len(self._versions)
        if known != len(self._weights):
            added = list(self._weights.values())[known:]
            self._versions += map(_version, added)
            self._places += map(_place, added)

    def note(self) -> None:
        """Forget what was written in place until now."""
        self.follow()
        self._versions = list(map(_version, self._weights.values()))

    def forget(self) -> None:
        """Forget what was written in place or moved until now."""
        self.note()
        self._places = list(map(_place, self._weights.values()))

    def names(self) -> list[str]:
        """What has been written to since this was last asked, noted or followed."""
        self.follow()
        versions = list(map(_version, self._weights.values()))
        places = list(map(_place, self._weights.values()))
        if versions == self._versions and places == self._places:
            return []
        pairs = zip(self._weights, versions, self._versions, places, self._places, strict=True)
        found = [name for name, now, then, here, there in pairs if now != then or here != there]
        self._versions, self._places = versions, places
        return found


@dataclass(frozen=True, slots=True)
class MasterCopy:
    """A master, or part of one, and the weight's values at the same places."""

    master: Tensor
    weight: Tensor
    given: Callable[[Tensor], Tensor] | None = None
    """What weights are given for a rounded master, where that is not itself."""

    @torch.no_grad()
    def take_written(self) -> None:
        """Take the elements of the weight for those of the master that are not rounded to them; all
        others keep their further digits. Nothing waits for the device where both lie on one.
        """
        for master, weight, same in self._compared():
            master.copy_(torch.where(same, master, weight.to(master.dtype)))

    @torch.no_grad()
    def differs(self) -> Tensor:
        """Whether there are such elements, a 0-dim bool on the master's device."""
        return ~torch.stack([same.all() for _, _, same in self._compared()]).all()

    def _compared(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Some rows at a time: the master, the weight beside it, and where they are the same."""
        for master, values in zip(_parts(self.master), _parts(self.weight), strict=True):
            weight, rounded = values.to(master.device), master.to(values.dtype)
            same = (rounded == weight) | (rounded.isnan() & weight.isnan())
            if self.given is not None:
                same |= self.given(rounded) == weight
            yield master, weight, same


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Views of some rows each."""
    if tensor.dim() == 0 or tensor.numel() <= _AT_ONCE:
        return (tensor,)
    return tensor.split(max(1, _AT_ONCE * len(tensor) // tensor.numel()))


@torch.no_grad()
def print_of(weight: Tensor) -> Tensor:
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
