"""Between a rank's tokens and the rows that its experts work on: the seam of expert parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from torch import Tensor

from megatron_lightning.layers.moe.permute import permute, permute_probs, sort_by_expert, unpermute
from megatron_lightning.layers.moe.routing import Routing


class Known(StrEnum):
    """What the host knows of rows without asking the device."""

    NOTHING = "nothing"
    ROWS = "rows"
    """How many there are."""
    EACH = "each"
    """How many each expert gets."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Dispatched:
    """What the experts of this rank have to do."""

    tokens: Tensor
    """(R, H) rows sorted by local expert. Rows behind the sum of `counts` may hold anything: what
    comes of them, forward and backward, is not read.
    """
    probs: Tensor
    """(R,) weight of each row's output."""
    counts: Tensor
    """(E_local,) int64 rows of each expert, on the device."""
    each: int | None = None
    """Rows of each expert where these are equal, R of all, and known to the host; None: unequal."""
    kept: Any = None
    """What `combine` needs of `dispatch`."""


class TokenDispatcher(Protocol):
    """Brings tokens to experts and sums what comes back."""

    def known(self, *, padded: bool) -> Known:
        """What follows from the number of tokens; `padded`: routers fill experts up."""
        ...

    def dispatch(self, hidden: Tensor, routing: Routing) -> Dispatched:
        """(T, H) tokens of this rank -> rows for its experts."""
        ...

    def combine(self, output: Tensor, dispatched: Dispatched) -> Tensor:
        """(R, H) outputs of the experts, weighted already -> (T, H), summed over a token's
        experts.
        """
        ...


class LocalDispatcher:
    """All experts are on this rank."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def known(self, *, padded: bool) -> Known:
        """See `TokenDispatcher.known`."""
        return Known.EACH if padded else Known.ROWS

    def dispatch(self, hidden: Tensor, routing: Routing) -> Dispatched:
        """See `TokenDispatcher.dispatch`."""
        order = sort_by_expert(routing, self.num_experts)
        return Dispatched(
            tokens=permute(hidden, order),
            probs=permute_probs(routing.probs, order),
            counts=order.counts,
            each=routing.capacity,
            kept=order,
        )

    def combine(self, output: Tensor, dispatched: Dispatched) -> Tensor:
        """See `TokenDispatcher.combine`."""
        return unpermute(output, dispatched.kept)
