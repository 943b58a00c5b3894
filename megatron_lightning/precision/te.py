"""Transformer Engine's kernels as plain functions: the one place of `precision` that imports it.

Only what computes is taken from it (cuBLAS products, casts to FP8, norms, cuDNN attention); its
modules, parameters and global FP8 state are not.
"""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lightning.utils.logging import is_installed

VERSION = "2.12"
"""What this was written for."""
INSTALL = f"pip install --no-build-isolation 'transformer_engine[pytorch]=={VERSION}.*'"
_REMEDY = "use backend='torch' (GPTModel) and kernels='torch' (QuantizationConfig)"


def missing() -> str | None:
    """Why Transformer Engine can't be used here, with the remedy; None when it can."""
    if not is_installed("transformer_engine"):
        return f"Transformer Engine is not installed; install it ({INSTALL}), or {_REMEDY}"
    if torch.cuda.device_count() == 0:  # unlike `is_available`, no context that forks would inherit
        return f"Transformer Engine needs a CUDA device, and there is none here; {_REMEDY}"
    return None


class Engine(NamedTuple):
    """What is called of Transformer Engine."""

    kernels: Any
    """The module of its C++ functions."""
    gemm: Any
    """`general_gemm`."""
    attention_forward: Any
    """`fused_attn_fwd`."""
    attention_backward: Any
    """`fused_attn_bwd`."""
    enums: Any
    """The module that names attention's layouts, masks and back ends."""
    dtypes: Any
    """torch's dtypes -> its own."""
    float8_quantizer: Any
    """Casts with one given scale."""
    own_quantizer: Any
    """Casts with a scale of the tensor's own largest value."""
    float8_tensor: Any
    """A matrix in FP8 with one scale."""
    block_quantizer: Any
    """Casts with scales of blocks."""
    block_tensor: Any
    """A matrix in FP8 with scales of blocks."""


@functools.lru_cache(maxsize=1)
def engine() -> Engine:
    """Import it. ValueError where that is impossible, or where a version lacks what is called."""
    problem = missing()
    if problem is not None:
        raise ValueError(problem)
    try:
        return _imported()
    except (ImportError, AttributeError, OSError) as error:
        raise ValueError(
            f"Transformer Engine {_version()} is installed, but what is called of it could not be"
            f" imported ({type(error).__name__}: {error}); install version {VERSION}, for which"
            f" this was written ({INSTALL}), or {_REMEDY}"
        ) from error


def _version() -> str:
    try:
        return importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _imported() -> Engine:
    import transformer_engine.pytorch.constants as constants  # pyright: ignore[reportMissingImports]
    import transformer_engine.pytorch.cpp_extensions as calls  # pyright: ignore[reportMissingImports]
    import transformer_engine.pytorch.tensor as tensors  # pyright: ignore[reportMissingImports]
    import transformer_engine_torch as kernels  # pyright: ignore[reportMissingImports]

    return Engine(
        kernels=kernels,
        gemm=calls.general_gemm,
        attention_forward=calls.fused_attn.fused_attn_fwd,
        attention_backward=calls.fused_attn.fused_attn_bwd,
        enums=calls.fused_attn,
        dtypes=constants.TE_DType,
        float8_quantizer=tensors.Float8Quantizer,
        own_quantizer=tensors.Float8CurrentScalingQuantizer,
        float8_tensor=tensors.Float8TensorStorage,
        block_quantizer=tensors.Float8BlockQuantizer,
        block_tensor=tensors.Float8BlockwiseQTensorStorage,
    )


def multiply(
    a: Any,
    b: Any,
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    add: bool = False,
    layout: str = "TN",
    exact: bool = False,
) -> Tensor:
    """The product a b^T: (M, K), (N, K) -> (M, N) in `dtype`, or written (added) to `out`. With
    layout "NN" a b of (M, K), (K, N); with "NT" a^T b of (K, M), (K, N).

    `exact`: FP8 products are summed in float32 throughout.
    """
    result, *_ = engine().gemm(
        b,
        a,
        out_dtype=dtype,
        layout=layout,
        bias=bias,
        out=out,
        accumulate=add,
        use_split_accumulator=exact,
    )
    return result


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, zero_centered: bool) -> tuple[Tensor, ...]:
    """(R, C), (C,) -> normed (R, C) and 1 / root mean square (R,)."""
    te = engine()
    y, _, inverse = te.kernels.rmsnorm_fwd(
        x, weight, epsilon, None, None, te.dtypes[x.dtype], 0, zero_centered
    )
    return y, inverse


def rms_norm_backward(
    grad: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of input and weight."""
    return engine().kernels.rmsnorm_bwd(grad, x, inverse, weight, 0, zero_centered)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> tuple[Tensor, ...]:
    """(R, C), (C,), (C,) -> normed (R, C), means (R,) and 1 / deviation (R,)."""
    te = engine()
    return tuple(
        te.kernels.layernorm_fwd(x, weight, bias, epsilon, None, None, te.dtypes[x.dtype], 0, False)
    )


def layer_norm_backward(
    grad: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input, weight and bias."""
    return tuple(engine().kernels.layernorm_bwd(grad, x, mean, inverse, weight, 0, False))  # type: ignore[return-value]
