"""What a Trainer's `precision` means for a network with a plan: one dtype for each kind of tensor.

Unlike in Lightning, "bf16-mixed" does not autocast the network: its weights are bfloat16, gradients
are summed in float32, and the optimizer works on float32 masters, as in Megatron-LM
(mixed-precision training, arXiv 1710.03740). The rest of a step is autocast (`precision.autocast`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_FP8 = (
    "for FP8 give the strategy quantization=QuantizationConfig(recipe='fp8_tensorwise') under"
    " precision='bf16-mixed'"
)
_ENGINE = f"{_FP8}, and kernels='transformer_engine' there for its products"
_REASONS = {
    "16-true": "float16 without masters diverges; '16-mixed' keeps them",
    "transformer-engine": f"it makes Transformer Engine's layers for nn.Linear; {_ENGINE}",
    "transformer-engine-float16": f"it makes Transformer Engine's layers for nn.Linear; {_ENGINE}",
    "fp8": _FP8,
}


@dataclass(frozen=True, kw_only=True)
class PrecisionPolicy:
    """The dtypes of one run."""

    name: str
    """Lightning's name of the precision."""
    params_dtype: torch.dtype
    """Weights as the forward pass reads them, and activations."""
    main_params_dtype: torch.dtype
    """Weights as the optimizer updates them; a second copy (masters) where it differs from
    `params_dtype`.
    """
    main_grads_dtype: torch.dtype
    """Gradient sums over the micro-batches of a window."""
    grad_reduce_dtype: torch.dtype
    """Gradients while they are summed over data-parallel ranks."""

    @property
    def scales_loss(self) -> bool:
        """True when gradients would be lost without a scale of the loss (float16)."""
        return self.params_dtype is torch.float16

    @property
    def has_masters(self) -> bool:
        """True when the optimizer works on copies of the weights in another dtype."""
        return self.main_params_dtype is not self.params_dtype


def _policy(
    name: str, params: torch.dtype, main_params: torch.dtype, grads: torch.dtype
) -> PrecisionPolicy:
    return PrecisionPolicy(
        name=name,
        params_dtype=params,
        main_params_dtype=main_params,
        main_grads_dtype=grads,
        grad_reduce_dtype=grads,
    )


POLICIES = {
    policy.name: policy
    for policy in (
        _policy("32-true", torch.float32, torch.float32, torch.float32),
        _policy("bf16-mixed", torch.bfloat16, torch.float32, torch.float32),
        _policy("16-mixed", torch.float16, torch.float32, torch.float32),
        _policy("bf16-true", torch.bfloat16, torch.bfloat16, torch.float32),
        _policy("64-true", torch.float64, torch.float64, torch.float64),
    )
}


def policy_for(precision: str) -> PrecisionPolicy:
    """Return the policy of a Trainer precision such as "bf16-mixed"; ValueError, with the reason,
    when unsupported.
    """
    if precision in POLICIES:
        return POLICIES[precision]
    reason = _REASONS.get(precision)
    reason = f" ({reason})" if reason else ""
    raise ValueError(
        f"precision={precision!r} does not work with MegatronStrategy{reason}; use one of"
        f" {list(POLICIES)}"
    )
