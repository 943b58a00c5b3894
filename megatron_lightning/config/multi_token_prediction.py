"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2) as data. The layers are in
`layers/multi_token_prediction.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_lightning.config.names import NamesFields

if TYPE_CHECKING:
    from megatron_lightning.config.model import GPTConfig


@dataclass(frozen=True, kw_only=True)
class MultiTokenPredictionConfig(NamesFields):
    """Further layers behind the last one, each of which predicts one token further ahead.

    They share embedding and output layer with the network and serve training only.
    """

    num_layers: int = 1
    """Depths: layer k (from 1) predicts the token k places behind the next one."""
    loss_scaling_factor: float = 0.1
    """The mean of the depths' losses is added to the loss with this factor."""


def prediction_problems(config: GPTConfig) -> list[str]:
    """Every violated rule as a sentence with field, value and remedy."""
    prediction = config.multi_token_prediction
    if prediction is None:
        return []
    found = []
    if prediction.num_layers < 1:
        found.append(
            f"multi_token_prediction.num_layers={prediction.num_layers} must be at least 1; for"
            " none leave multi_token_prediction=None"
        )
    factor = prediction.loss_scaling_factor
    if not 0 <= factor < math.inf:
        found.append(
            f"multi_token_prediction.loss_scaling_factor={factor} must be a finite number, not"
            " negative; 0.1 and 0.3 are usual"
        )
    if config.position_embedding == "learned":
        found.append(
            "position_embedding='learned' with multi_token_prediction: not supported; use 'rope'"
            " or 'none'"
        )
    return found
