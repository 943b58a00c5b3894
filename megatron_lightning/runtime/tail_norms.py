"""Norms of a window's gradients, taken bucket by bucket while the last buckets are being reduced.

The reduction of the last bucket can't be hidden under the backward pass. The norm of what is there
already can be taken meanwhile, which is a pass over all gradients that clipping would otherwise
begin only then. Whether norms will be asked for, and gradients left as they are until then, is
known from the step before.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megatron_lightning.optim.clip import tensor_norms
from megatron_lightning.parallel.data import GradientBuckets


class TailNorms:
    """Norms of the gradients that `buckets` reduce; `norms` is empty in a window without them."""

    def __init__(self, buckets: GradientBuckets) -> None:
        self._buckets = buckets
        self._wanted = False
        self.norms: Mapping[str, list[Tensor]] = {}
        """Of each gradient (on the CPU: of pieces of it), by name; 0-dim tensors."""
        buckets.on_launched = self._take

    def begin(self) -> None:
        """A window begins."""
        self.norms = {}

    def asked(self, *, unchanged: bool) -> None:
        """The norm was asked for. `unchanged`: of gradients as the buckets have summed them."""
        self._wanted = unchanged

    def _take(self) -> None:
        if not self._wanted:
            return
        self._wanted = False
        changed = self._buckets.summed_later()
        norms: dict[str, list[Tensor]] = {}
        for bucket in self._buckets.buckets:
            if not bucket.is_complete_by_waiting:
                continue
            bucket.wait()
            grads = {
                slot.name: slot.own_grad if self._buckets.sharded else slot.main_grad
                for slot in bucket.slots
                if slot.received and slot.name not in changed
            }
            norms |= zip(grads, tensor_norms(list(grads.values())), strict=True)
        self.norms = norms
