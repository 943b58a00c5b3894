"""Triton kernels for CUDA; `precision/fp8_casts.py` has a function of plain torch beside each. The
modules here import triton: import them only where it is there.
"""
