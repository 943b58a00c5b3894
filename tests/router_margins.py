"""How far routers are from another choice, in runs whose layouts are compared.

Two layouts of one training differ by rounding. Where a token's K-th best expert is better than the
next by less than that, they may send it to different experts, and are different trainings from then
on. So such tests assert that the smallest margin is well above the rounding of what is compared.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lightning.layers.moe import Router

# In float32, values by which experts are chosen are of size 0.1 to 1 and sums of 64 terms after
# about 40 roundings: errors are near sqrt(40) * 6e-8 = 4e-7. What AdamW makes of that in a few
# steps of lr 1e-3 moves logits by as much again. Twenty times that is asked for.
MARGIN = 1e-5


@contextmanager
def smallest_margins() -> Iterator[list[float]]:
    """Yields a list that gets the smallest margin of each routers' forward inside, in order."""
    found: list[float] = []

    def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if isinstance(module, Router):
            with torch.no_grad():
                values = module.selection(module.logits(args[0]))
            found.append(margin_of(values, module.config.router_topk))

    handle = nn.modules.module.register_module_forward_hook(note)
    try:
        yield found
    finally:
        handle.remove()


def assert_margins(margins: list[float]) -> None:
    """No router came near another choice."""
    assert margins, "no router ran"
    assert min(margins) > MARGIN, f"a choice within {min(margins)}, about the rounding"


def margin_of(selection: Tensor, topk: int) -> float:
    """(T, E) values: smallest distance of a token's K-th best and the next."""
    if topk == selection.shape[1]:
        return float("inf")
    best = selection.topk(topk + 1, dim=-1).values
    return float((best[:, -2] - best[:, -1]).min())
