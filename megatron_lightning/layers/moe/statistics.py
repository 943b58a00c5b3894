"""What the routers of a run did, as sums on the device: nothing here makes the host wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def is_recomputation() -> bool:
    """True inside of a backward pass, where a forward is one that is computed again."""
    return torch._C._current_graph_task_id() != -1


@dataclass(eq=False)
class RouterStatistics:
    """Sums of one layer's router over a window's training forwards, of this rank's tokens.

    Sums over ranks are for who reads them: `tokens` over the ranks that hold tokens.
    """

    tokens: Tensor
    """(E,) int64 tokens that the router sent to each expert, before any was dropped."""
    num_tokens: Tensor
    """int64, tokens that came."""
    dropped: Tensor
    """int64, of tokens x K places, those without room."""
    entropy: Tensor
    """Sum over tokens of the entropy of their scores, in nats; at most log(E) a token."""
    aux_loss: Tensor
    """Sum over forwards of the auxiliary loss (times its coefficient), this rank's part of it."""
    z_loss: Tensor
    """Likewise of the z-loss."""
    num_forwards: Tensor
    """int64, forwards that were added."""
    is_closed: bool = False
    """True after the end of a window: the next forward begins anew."""

    @classmethod
    def zeros(cls, num_experts: int, device: torch.device | str) -> RouterStatistics:
        """Nothing has come."""
        counts = torch.zeros(num_experts + 3, dtype=torch.int64, device=device)
        sums = torch.zeros(3, dtype=torch.float32, device=device)
        entropy, aux_loss, z_loss = sums.unbind()
        return cls(
            tokens=counts[:num_experts],
            num_tokens=counts[num_experts],
            dropped=counts[num_experts + 1],
            num_forwards=counts[num_experts + 2],
            entropy=entropy,
            aux_loss=aux_loss,
            z_loss=z_loss,
        )

    def reset(self) -> None:
        """Begin anew."""
        reset_all([self])

    def close(self) -> None:
        """End the window; the sums stay until the next forward."""
        self.is_closed = True

    @torch.no_grad()
    def add(
        self,
        *,
        tokens: Tensor,
        num_tokens: int | Tensor,
        dropped: Tensor | None,
        scores: Tensor,
        aux_loss: Tensor | None,
        z_loss: Tensor | None,
    ) -> None:
        """Add one forward. `tokens` (E,); `dropped` (T, K) bool; `scores` (T, E), sums 1."""
        if self.is_closed:
            self.reset()
        self.tokens += tokens
        entropy = torch.special.entr(scores).sum()
        sums = [(self.entropy, entropy), (self.aux_loss, aux_loss), (self.z_loss, z_loss)]
        given = [(total, value.detach()) for total, value in sums if value is not None]
        torch._foreach_add_([total for total, _ in given], [value for _, value in given])
        if dropped is not None:
            self.dropped += dropped.sum()
        if isinstance(num_tokens, int):
            torch._foreach_add_([self.num_tokens, self.num_forwards], [num_tokens, 1])
        else:
            self.num_tokens += num_tokens
            self.num_forwards += 1


@torch.no_grad()
def reset_all(statistics: Sequence[RouterStatistics]) -> None:
    """Let each begin anew."""
    counts = [s for one in statistics for s in (one.num_tokens, one.dropped, one.num_forwards)]
    losses = [s for one in statistics for s in (one.entropy, one.aux_loss, one.z_loss)]
    torch._foreach_zero_([one.tokens for one in statistics] + counts)
    torch._foreach_zero_(losses)
    for one in statistics:
        one.is_closed = False
