"""Whether the kernels can run."""

import functools

from torch import Tensor

from megatron_lightning.utils.logging import is_installed


@functools.lru_cache(maxsize=1)
def _has_triton() -> bool:
    return is_installed("triton")


def can_run(tensor: Tensor) -> bool:
    """Whether a kernel can work on a tensor: on CUDA, at most 32 bits wide, with triton there."""
    return tensor.is_cuda and tensor.element_size() <= 4 and _has_triton()
