"""Gradients of sixteen-bit runs against float32's: errors are small, and noise, not a bias.

Rounding to nearest errs to both sides, so that the error along the true gradient is far below the
error as a whole. Truncation, or a sum kept in sixteen bits, shows as a gradient that is too short.
"""

from dataclasses import replace

import torch
from torch import Tensor

from tests.harness import run_ranks_fresh
from tests.layout_runs import Run, assemble, tiny_config, train

TOKENS = (32, 257)


def frequent_tokens(run: Run, index: int) -> dict[str, Tensor]:
    """Text-like frequencies: half of all tokens are one of three."""
    generator = torch.Generator().manual_seed(index)
    tokens = torch.rand(TOKENS, generator=generator).pow(6).mul(run.config.vocab_size).long()
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": torch.ones(TOKENS[0], TOKENS[1] - 1),
    }


RUN = Run(
    config=tiny_config(num_layers=2),
    steps=1,
    keep_gradients=(0,),
    normalization="micro_batch",
    make_batch=frequent_tokens,
)


def gradients(precision: str, **trainer: object) -> dict[str, Tensor]:
    """Those of the first step, by parameter."""
    options = dict(precision=precision, limit_val_batches=0, **trainer)
    (rank,) = run_ranks_fresh(train, 1, replace(RUN, trainer=options))
    return assemble([rank["gradients"][0]])


def errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, tuple[float, float]]:
    """By parameter, relative: length of the error, and its part along the true gradient."""
    result = {}
    for name, true in wanted.items():
        error, true = (found[name] - true).double().flatten(), true.double().flatten()
        square = true.dot(true)
        result[name] = (float((error.dot(error) / square).sqrt()), float(error.dot(true) / square))
    return result


def assert_noise(found: dict[str, Tensor], wanted: dict[str, Tensor], bits: int) -> None:
    """`bits`: of the mantissa, the leading one not counted."""
    for name, (length, along) in errors(found, wanted).items():
        assert length < 4 * 2**-bits, (name, length)
        assert abs(along) < 2**-bits, (name, along)


def test_bfloat16_errs_to_both_sides() -> None:
    assert_noise(gradients("bf16-mixed"), gradients("32-true"), 8)
