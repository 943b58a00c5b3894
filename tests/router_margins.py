"""How far routers are from another choice, in runs whose layouts are compared.

Two layouts of one training differ by rounding. Where a token's K-th best expert is better than the
next by less than that, they may send it to different experts, and are different trainings from then
on. So such tests assert that the smallest margin is well above the rounding of what is compared.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lightning.layers.moe import Router

# Logits of the small test models are sums of 64 terms of size 0.1 after about 40 roundings: errors
# are near sqrt(40) * 6e-8 * their size (below 1) = 4e-7 in float32. Ten times that is asked for.
MARGINS: Mapping[torch.dtype, float] = {torch.float32: 4e-6, torch.float64: 1e-14}


@contextmanager
def smallest_margins(network: nn.Module) -> Iterator[dict[str, float]]:
    """Yields {router: smallest margin of its selection values} of the forwards inside."""
    found: dict[str, float] = {}
    handles = [
        router.register_forward_hook(_watch(found, name))
        for name, router in network.named_modules()
        if isinstance(router, Router)
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def assert_margins(margins: Mapping[str, float], dtype: torch.dtype) -> None:
    """No router came near another choice."""
    assert margins, "no router ran"
    close = {name: margin for name, margin in margins.items() if margin < MARGINS[dtype]}
    assert not close, f"choices within the rounding of {dtype}: {close}"


def margin_of(selection: Tensor, topk: int) -> float:
    """(T, E) values: smallest distance of a token's K-th best and the next."""
    if topk == selection.shape[1]:
        return float("inf")
    best = selection.topk(topk + 1, dim=-1).values
    return float((best[:, -2] - best[:, -1]).min())


def _watch(found: dict[str, float], name: str) -> Any:
    def hook(router: Router, args: tuple[Tensor], output: Any) -> None:
        values = router.selection(router.logits(args[0]).detach())
        found[name] = min(
            found.get(name, float("inf")), margin_of(values, router.config.router_topk)
        )

    return hook
