"""How layers are compiled whose weight gradients are put off (`parallel/weight_gradient.py`).

The factors of such a gradient outlive the backward pass that hands them over, while compiled code
writes to a buffer again once it has been read for the last time: in place, for another result of
the same size, or by an operation that the compiler turned into one in place. All three are switched
off. Memory is freed as before: a buffer that nobody keeps goes back to torch's allocator at its
last use, from which the next one comes.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from megatron_lightning.config.parallel import ParallelConfig
from megatron_lightning.config.plan import ParallelPlan
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.quantized.borders import one_operation
from megatron_lightning.parallel.schedules.build import SPLIT_SCHEDULES

_OPTIONS: dict[str, Any] = {
    "allow_buffer_reuse": False,
    "inplace_buffers": False,
    "disabled_passes": "REINPLACE_INPLACEABLE_OPS",
}


def puts_off_in_regions(plan: ParallelPlan, tensor: MeshAxis, config: ParallelConfig) -> bool:
    """Whether weight gradients are put off within compiled layers, see `keeps_buffers`."""
    if config.pipeline.schedule not in SPLIT_SCHEDULES or not config.runtime.compile_layers:
        return False
    whole = one_operation(
        tensor, sequence_parallel=config.sequence_parallel, sequence_dim=plan.sequence_dim
    )
    return whole and config.data_parallel.fuse_weight_gradients and can_keep_buffers()


def keeps_buffers(
    path: str, layer: nn.Module, *, plan: ParallelPlan, quantized: Collection[str]
) -> bool:
    """Whether a compiled layer at `path` has a linear layer whose weight's gradient is put off.

    Those at the paths `quantized` run in low precision and make theirs at once.
    """
    if plan.layers is None or not path.startswith(f"{plan.layers}."):
        return False
    return any(
        hasattr(module, "sums_weight_gradient") and name not in quantized
        for name, module in layer.named_modules(prefix=path)
    )


def can_keep_buffers() -> bool:
    """Whether this torch has all the switches, and the pass that one of them names."""
    from torch import _inductor
    from torch._inductor.fx_passes import post_grad

    known = set(_OPTIONS) <= set(_inductor.list_options())
    return known and hasattr(post_grad, "reinplace_inplaceable_ops")


def compile_options(*, keeps_buffers: bool) -> dict[str, Any]:
    """Keyword arguments of `torch.compile`."""
    return {"options": dict(_OPTIONS)} if keeps_buffers else {}
