"""Where model families leave the plain transformer: scores and softmax of attention, the hidden
state between the layers, the gated unit.

The defaults of `AttentionConfig` and `StreamConfig` change nothing. The formulas are in
`layers/attention.py`, `layers/block.py`, `layers/norm.py`, `layers/mlp.py` and `layers/loss.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from megatron_lightning.config.names import NamesFields
from megatron_lightning.config.rotary import RotaryConfig

if TYPE_CHECKING:
    from megatron_lightning.config.model import GPTConfig


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(NamesFields):
    """Scores, softmax and rotation of attention."""

    scale_dim: int = 0
    """Scores are divided by the square root of this; 0: of head_dim."""
    score_cap: float = 0.0
    """Scores s become cap * tanh(s / cap) before the mask (Gemma 2, arXiv 2408.00118); 0: they
    stay."""
    sinks: bool = False
    """One learned number for each query head joins the softmax's denominator and no value
    (GPT-OSS, arXiv 2508.10925)."""
    local_rotary: RotaryConfig | None = None
    """Rotary frequencies of the sliding layers; None: those of the full ones."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """From the form of `dataclasses.asdict`."""
        local = values.get("local_rotary")
        return cls(**{**values, "local_rotary": None if local is None else RotaryConfig(**local)})


@dataclass(frozen=True, kw_only=True)
class StreamConfig(NamesFields):
    """The hidden state outside of attention and MLP."""

    embedding_scale: float = 1.0
    """Factor on the word embeddings, rounded to their dtype; the head's weight has none."""
    zero_centered_norm: bool = False
    """Every norm multiplies by 1 + weight, and its weight begins at 0; rmsnorm only."""
    branch_norm: bool = False
    """Norms of what attention and MLP give, before it is added to the hidden state."""
    logit_cap: float = 0.0
    """Logits x become cap * tanh(x / cap); 0: they stay."""


@dataclass(frozen=True, kw_only=True)
class ClampConfig(NamesFields):
    """The gated unit of GPT-OSS: g * sigmoid(alpha * g) * (u + 1).

    The gate g is at most `limit`, and u within +-limit.
    """

    alpha: float = 1.702
    """Factor on the gate in the sigmoid."""
    limit: float = 7.0
    """Largest gate, and largest absolute value of the other half."""


def variant_problems(config: GPTConfig) -> list[str]:
    """Every violated rule as a sentence with field, value and remedy."""
    return [*_attention(config), *_local_rotary(config), *_stream(config), *_clamp(config)]


def _attention(config: GPTConfig) -> list[str]:
    attention, found = config.attention, []
    if attention.scale_dim < 0:
        found.append(
            f"attention.scale_dim={attention.scale_dim} must be positive, or 0 for head_dim"
        )
    if not 0 <= attention.score_cap < math.inf:
        found.append(f"attention.score_cap={attention.score_cap} must be positive, or 0 for none")
    return found


def _local_rotary(config: GPTConfig) -> list[str]:
    local = config.attention.local_rotary
    if local is None:
        return []
    if config.position_embedding != "rope":
        return [
            f"attention.local_rotary with position_embedding={config.position_embedding!r}: leave"
            " it None, or use 'rope'"
        ]
    found = [f"attention.local_{problem}" for problem in local.check()]
    if local.percent != config.rotary.percent:
        found.append(
            f"attention.local_rotary.percent={local.percent} must equal"
            f" rotary.percent={config.rotary.percent}"
        )
    if not config.window_size:
        found.append(
            "attention.local_rotary with window_size=0: no layer slides; leave it None, or give"
            " window_size"
        )
    return found


def _stream(config: GPTConfig) -> list[str]:
    stream, found = config.stream, []
    if not 0 < stream.embedding_scale < math.inf:
        found.append(f"stream.embedding_scale={stream.embedding_scale} must be positive; 1: none")
    if not 0 <= stream.logit_cap < math.inf:
        found.append(f"stream.logit_cap={stream.logit_cap} must be positive, or 0 for none")
    if stream.zero_centered_norm and config.norm != "rmsnorm":
        found.append(f"stream.zero_centered_norm=True with norm={config.norm!r}: use 'rmsnorm'")
    return found


def _clamp(config: GPTConfig) -> list[str]:
    clamp, found = config.clamp, []
    if clamp is None:
        return []
    if not (config.gated_linear_unit and config.activation == "silu"):
        found.append(
            f"clamp with activation={config.activation!r},"
            f" gated_linear_unit={config.gated_linear_unit}: it is a gated unit of its own; use"
            " 'silu' and True, or clamp=None"
        )
    if not clamp.limit > 0:
        found.append(f"clamp.limit={clamp.limit} must be positive")
    if not clamp.alpha > 0:
        found.append(f"clamp.alpha={clamp.alpha} must be positive")
    return found
