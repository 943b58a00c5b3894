"""From the batch's `cu_seqlens` to what layers are told of packed documents."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lightning.layers.rotary import tensor_version
from megatron_lightning.parallel.sequence import SequenceInfo


class PackedSequences:
    """Makes the `SequenceInfo` of a micro-batch and remembers the last one, for the layers that
    follow. `cu_seqlens` on the host cost no wait; on a GPU they are waited for once a micro-batch.
    """

    def __init__(self) -> None:
        self._cu_seqlens: Tensor | None = None
        self._version: object = None
        self._info: SequenceInfo | None = None
        self._positions: Tensor | None = None

    def __call__(self, cu_seqlens: Tensor | None) -> SequenceInfo | None:
        """(B, documents + 1) -> documents; None -> None: every sample is one document."""
        if cu_seqlens is None:
            return None
        version = tensor_version(cu_seqlens)
        if self._info is None or cu_seqlens is not self._cu_seqlens or version != self._version:
            self._info = SequenceInfo.from_cu_seqlens(cu_seqlens)
            self._positions = None
            self._cu_seqlens, self._version = cu_seqlens, version
        return self._info

    def positions(self, cu_seqlens: Tensor | None, device: torch.device) -> Tensor | None:
        """Position of each token within its document, (B, S); None when nothing is packed."""
        info = self(cu_seqlens)
        if info is None:
            return None
        if self._positions is None or self._positions.device != device:
            self._positions = info.positions(device)
        return self._positions


__all__ = ["PackedSequences", "SequenceInfo"]
