"""Rotary position embedding (RoPE, arXiv 2104.09864) as data: base, rotated share of a head, and
context extension.

Scaling follows the published definitions: position interpolation (`linear`, arXiv 2306.15595), the
piecewise scheme of Llama 3.1 (`llama3`) and YaRN (`yarn`, arXiv 2309.00071). The formulas are in
`layers/rotary.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from megatron_lightning.config.names import NamesFields

RotaryScaling = Literal["plain", "linear", "llama3", "yarn"]


@dataclass(frozen=True, kw_only=True)
class RotaryConfig(NamesFields):
    """Rotary frequencies and how they are stretched beyond the length of the original training."""

    base: float = 10000.0
    """Base of the geometric series of wave lengths (rope_theta)."""
    percent: float = 1.0
    """Share of a head that is rotated, from its front; the rest passes unchanged. 0 < percent <=
    1.
    """
    interleaved: bool = False
    """Pairs are neighbours (elements 2i and 2i + 1), as in DeepSeek and GPT-J; False: element i and
    the one half of the rotated part further."""
    scaling: RotaryScaling = "plain"
    """Context extension: plain (none), linear, llama3 or yarn."""
    factor: float = 1.0
    """Target context over original context; used by linear, llama3 and yarn."""
    original_max_position_embeddings: int = 0
    """Context of the original training, in tokens; llama3 and yarn need it."""
    low_freq_factor: float = 1.0
    """llama3: wave lengths above original / low_freq_factor are stretched by the whole factor."""
    high_freq_factor: float = 4.0
    """llama3: wave lengths below original / high_freq_factor stay as they are."""
    beta_fast: float = 32.0
    """yarn: pairs that turn more often than this over the original context stay as they are."""
    beta_slow: float = 1.0
    """yarn: pairs that turn less often than this are stretched by the whole factor."""
    truncate: bool = True
    """yarn: round the borders of the ramp to whole pairs."""
    mscale: float = 1.0
    """yarn: weight of the logarithm in the numerator of the attention factor."""
    mscale_all_dim: float = 0.0
    """yarn: weight of the logarithm in its denominator, and in latent attention in a factor on the
    scores."""
    attention_factor: float | None = None
    """yarn: factor on cosines and sines itself; None: from mscale and mscale_all_dim."""

    def check(self) -> list[str]:
        """Every violated rule as a sentence with field, value and remedy; empty when all is
        well.
        """
        found = (rule(self) for rule in _RULES)
        return [message for message in found if message is not None]


def _known_scaling(rotary: RotaryConfig) -> str | None:
    if rotary.scaling in get_args(RotaryScaling):
        return None
    return f"rotary.scaling={rotary.scaling!r} is unknown; use one of {get_args(RotaryScaling)}"


def _positive_base(rotary: RotaryConfig) -> str | None:
    if rotary.base > 1:
        return None
    return f"rotary.base={rotary.base} must be greater than 1; 10000 is usual"


def _percent_range(rotary: RotaryConfig) -> str | None:
    if 0 < rotary.percent <= 1:
        return None
    return (
        f"rotary.percent={rotary.percent} must be in (0, 1];"
        " for no rotation set position_embedding='none'"
    )


def _scaling_has_factor(rotary: RotaryConfig) -> str | None:
    if rotary.scaling == "plain" or rotary.factor >= 1:
        return None
    return (
        f"rotary.factor={rotary.factor} must be at least 1 with rotary.scaling={rotary.scaling!r}"
    )


def _plain_has_no_factor(rotary: RotaryConfig) -> str | None:
    if rotary.scaling != "plain" or rotary.factor == 1:
        return None
    return (
        f"rotary.factor={rotary.factor} has no effect with rotary.scaling='plain';"
        " choose 'linear', 'llama3' or 'yarn'"
    )


def _scaling_has_original(rotary: RotaryConfig) -> str | None:
    if rotary.scaling not in ("llama3", "yarn") or rotary.original_max_position_embeddings > 0:
        return None
    return (
        f"rotary.original_max_position_embeddings={rotary.original_max_position_embeddings} must be"
        f" the context of the original training with rotary.scaling={rotary.scaling!r}, e.g. 8192"
    )


def _llama3_borders(rotary: RotaryConfig) -> str | None:
    if rotary.scaling != "llama3" or 0 < rotary.low_freq_factor < rotary.high_freq_factor:
        return None
    return (
        f"rotary.low_freq_factor={rotary.low_freq_factor} must be positive and below"
        f" rotary.high_freq_factor={rotary.high_freq_factor}"
    )


def _yarn_borders(rotary: RotaryConfig) -> str | None:
    if rotary.scaling != "yarn" or 0 < rotary.beta_slow < rotary.beta_fast:
        return None
    return (
        f"rotary.beta_slow={rotary.beta_slow} must be positive and below"
        f" rotary.beta_fast={rotary.beta_fast}"
    )


_RULES = (
    _known_scaling,
    _positive_base,
    _percent_range,
    _scaling_has_factor,
    _plain_has_no_factor,
    _scaling_has_original,
    _llama3_borders,
    _yarn_borders,
)
