"""Continuing token sequences: greedy, or sampled with temperature, top-k and top-p (nucleus, arXiv
1904.09751).

Works over any callable that maps all tokens so far to the logits of the next one, so it does not
know of networks, ranks or devices. Every step computes the whole prefix anew: there is no key/value
cache, and the cost of n tokens is quadratic in n. On several ranks each one must call it with the
same logits and an equally seeded generator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

NextLogits = Callable[[Tensor], Tensor]
"""Tokens so far (B, S) int64 -> logits of the next token (B, V)."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen from its logits."""

    temperature: float = 0.0
    """Divides the logits; 0 always takes the most likely token (greedy)."""
    top_k: int = 0
    """Only the k most likely tokens may be drawn; 0: all."""
    top_p: float = 1.0
    """Only the smallest set of most likely tokens whose probabilities reach top_p may be drawn; 1:
    all.
    """

    def check(self) -> list[str]:
        """Every violated rule as a sentence with field, value and remedy."""
        problems = []
        if self.temperature < 0:
            problems.append(f"temperature={self.temperature} must be 0 (greedy) or positive")
        if self.top_k < 0:
            problems.append(f"top_k={self.top_k} must be 0 (all tokens) or positive")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p={self.top_p} must be in (0, 1]")
        return problems


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """(B, V) -> the same with all but each row's k largest set to -inf; more than k where the k-th
    is tied.
    """
    if k == 0 or k >= logits.shape[-1]:
        return logits
    smallest = logits.topk(k, dim=-1).values[:, -1:]
    return logits.masked_fill(logits < smallest, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """(B, V) -> the same with -inf outside the smallest set of largest logits whose probability
    reaches p.
    """
    if p >= 1:
        return logits
    ordered, index = logits.sort(dim=-1, descending=True)
    probability = ordered.softmax(dim=-1)
    # A token stays when those before it do not reach p, so the first always does.
    dropped = probability.cumsum(dim=-1) - probability >= p
    return logits.masked_fill(dropped.scatter(-1, index, dropped), -torch.inf)


def next_tokens(
    logits: Tensor, sampling: Sampling, generator: torch.Generator | None = None
) -> Tensor:
    """Choose one token a row: logits (B, V) -> ids (B,) int64."""
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    scaled = keep_top_k(logits.float() / sampling.temperature, sampling.top_k)
    probability = keep_top_p(scaled, sampling.top_p).softmax(dim=-1)
    return torch.multinomial(probability, 1, generator=generator)[:, 0]


@torch.no_grad()
def generate(
    next_logits: NextLogits,
    tokens: Tensor,
    *,
    max_new_tokens: int,
    vocab_size: int,
    sampling: Sampling | None = None,
    end_token: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Append up to `max_new_tokens` ids to `tokens` (B, S) int64; returns (B, S + new).

    `vocab_size` is the true one: logits beyond it (padding) are never chosen. A row that has
    produced `end_token` repeats it, and generation stops when every row has. ValueError for wrong
    arguments.
    """
    sampling = Sampling() if sampling is None else sampling
    problems = sampling.check()
    if tokens.dim() != 2 or 0 in tokens.shape:
        problems.append(
            f"tokens of shape {tuple(tokens.shape)} must be (B, S) with at least one token a row"
        )
    if max_new_tokens < 0:
        problems.append(f"max_new_tokens={max_new_tokens} must not be negative")
    if problems:
        raise ValueError("; ".join(problems))
    ended = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
    for _ in range(max_new_tokens):
        chosen = next_tokens(next_logits(tokens)[:, :vocab_size], sampling, generator)
        if end_token is not None:
            chosen = chosen.masked_fill(ended, end_token)
            ended = ended | (chosen == end_token)
        tokens = torch.cat((tokens, chosen[:, None].to(tokens)), dim=1)
        if end_token is not None and bool(ended.all()):
            break
    return tokens
