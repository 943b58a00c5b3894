"""How tokens reach experts on other ranks. See `parallel/expert.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from megatron_lightning.config.names import NamesFields

DispatcherName = Literal["all_to_all", "all_gather", "deep_ep"]


@dataclass(frozen=True, kw_only=True)
class ExpertConfig(NamesFields):
    """Choices of expert parallelism beyond its sizes."""

    dispatcher: DispatcherName = "all_to_all"
    """all_to_all (each token travels to the ranks of its experts), all_gather (every rank gets all
    tokens of the expert ranks and takes those of its experts; for few ranks or many experts a
    token) or deep_ep (as the first, by the kernels of the DeepEP package, which must be
    installed)."""
    overlap_shared_experts: bool = False
    """On CUDA: compute shared experts on a stream of their own beside the tokens' travel."""
    overlap_all_to_all: bool = False
    """Run each backward beside the forward of another micro-batch, so that the tokens' travel in
    one is hidden under the other's computing; for more activations (docs/expert_parallel.md)."""

    def check(self) -> list[str]:
        """Every violated rule, as a sentence with field, value and remedy."""
        known = get_args(DispatcherName)
        if self.dispatcher not in known:
            return [f"expert.dispatcher={self.dispatcher!r}: choose one of {known}"]
        return []
