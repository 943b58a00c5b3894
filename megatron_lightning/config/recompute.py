"""What is kept of a forward pass for its backward: everything, or less at the price of computing it
again or of moving it to the CPU. Pure data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from megatron_lightning.config.names import NamesFields

RecomputeMode = Literal["none", "full", "selective"]
RecomputeMethod = Literal["uniform", "block"]


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig(NamesFields):
    """Activation recompute and offload. See `docs/recompute.md` for what each form keeps."""

    mode: RecomputeMode = "none"
    """none, full (whole layers: only their inputs are kept) or selective (modules by name)."""
    method: RecomputeMethod = "uniform"
    """full only. uniform: every layer, in groups of `num_layers`; block: the first `num_layers`
    layers of each model chunk, the others keep everything."""
    num_layers: int = 1
    """full only. Layers of one group (uniform) or of a chunk's recomputed block (block)."""
    modules: Sequence[str] = ("core_attention",)
    """selective only. Globs over module names or their ends: "core_attention", "layers.0.mlp",
    "*_layernorm". A module inside a matching one is part of it."""
    offload: bool = False
    """Keep what the layers save for backward in CPU memory (pinned on CUDA) until it is needed."""
    offload_min_bytes: int = 1 << 20
    """Smaller tensors, in bytes, stay on the device."""

    def check(self) -> list[str]:
        """Return every violation as one explained sentence; an empty list when there is none."""
        problems = []
        if self.mode not in get_args(RecomputeMode):
            problems.append(
                f"recompute.mode={self.mode!r}: choose one of {get_args(RecomputeMode)}"
            )
        if self.method not in get_args(RecomputeMethod):
            problems.append(
                f"recompute.method={self.method!r}: choose one of {get_args(RecomputeMethod)}"
            )
        if self.num_layers < 1:
            problems.append(f"recompute.num_layers={self.num_layers}: must be at least 1 layer")
        if self.mode != "full" and (self.method, self.num_layers) != ("uniform", 1):
            problems.append(
                f"recompute.method={self.method!r}, num_layers={self.num_layers}: they have no"
                f" meaning for mode={self.mode!r}; leave them out or choose mode='full'"
            )
        if isinstance(self.modules, str) or (self.mode == "selective" and not self.modules):
            problems.append(
                f"recompute.modules={self.modules!r}: give a list of globs, e.g."
                " ['core_attention', 'mlp']"
            )
        if self.offload_min_bytes < 0:
            problems.append(
                f"recompute.offload_min_bytes={self.offload_min_bytes}: must be at least 0 bytes"
            )
        return problems
