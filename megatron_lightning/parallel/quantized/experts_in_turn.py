"""Experts in low precision, one after the other: any recipe, but the host waits for counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.parallel.quantized.products import QuantizedProducts


@dataclass(eq=False)
class QuantizedExperts:
    """What a layer of experts holds to run in low precision: one expert after the other, each with
    scales of its own, so that neither other experts nor empty rows touch them.
    """

    products: tuple[QuantizedProducts, ...]
    """Of each expert held."""

    def __call__(
        self, rows: Tensor, weight: Tensor, counts: Tensor, multiply: object, defer: object
    ) -> Tensor:
        """(R, in) by expert, (E, N, in), (E,) rows of each -> (R, N). The host waits for counts.
        Weight gradients are the recipe's, and none is put off.
        """
        return _experts_outside(self, rows, weight, counts)

    def run(self, rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        """See `__call__`."""
        sizes: list[int] = counts.tolist()
        *parts, left = rows.split([*sizes, len(rows) - sum(sizes)])
        done = [
            products(part, one, None, None, sums=False) if len(part) else F.linear(part, one)
            for products, part, one in zip(self.products, parts, weight.unbind(0), strict=True)
        ]
        return torch.cat([*done, rows.new_zeros(len(left), weight.shape[1])])


def _run_experts(experts: QuantizedExperts, rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return experts.run(rows, weight, counts)


_experts_outside: Any = torch.compiler.disable(_run_experts)
