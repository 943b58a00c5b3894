"""Triton kernels for CUDA, each with a function of plain torch beside its caller that computes the
same elsewhere. The modules here import triton: import them only when `can_run` says so.
"""

from megatron_lightning.layers.kernels.available import can_run

__all__ = ["can_run"]
