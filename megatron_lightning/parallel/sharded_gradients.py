"""Gradients of fully sharded parameters (`fsdp.py`) over one accumulation window.

Micro-batches are summed, never averaged: the window's weight divides the sum once, as everywhere
else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from megatron_lightning.config.plan import ParameterInfo
from megatron_lightning.parallel.flat import is_tensor_partial, sum_tensors
from megatron_lightning.parallel.mesh import ParallelMesh


class ShardedGradients:
    """Gradients of fully sharded parameters over one window; stands where `GradientBuckets` do.

    Micro-batches are summed in whole gradients and reduced by the last backward pass of the window,
    or each by its own with `reduce_each`. `roots` are the sharded networks of each chunk.
    """

    sharded = True
    is_stale = False

    def __init__(
        self,
        roots: Sequence[Sequence[FSDPModule]],
        named_parameters: Mapping[str, Parameter],
        table: Mapping[str, ParameterInfo],
        mesh: ParallelMesh,
        *,
        sequence_parallel: bool,
        tied: Sequence[str] = (),
        reduce_each: bool = False,
    ) -> None:
        self._roots = [list(chunk) for chunk in roots]
        self._parameters = dict(named_parameters)
        self._mesh = mesh
        self._reduce_each = reduce_each
        self._partial = [
            name
            for name in self._parameters
            if is_tensor_partial(table[name], sequence_parallel=sequence_parallel)
        ]
        self._tied = tuple(tied) if mesh.axis("edges").size > 1 else ()
        self._sums: dict[str, Tensor] = {}

    # ------------------------------------------------------------------ one window

    def reset(self) -> None:
        """Begin an accumulation window."""
        self._sums = {}
        self.withdraw()
        for chunk in range(len(self._roots)):
            self._expect_last(chunk, False)

    rebuild = reset

    def begin_run(self) -> None:
        """Before a batch: let autograd add to the sums so far."""
        for name, parameter in self._parameters.items():
            parameter.grad = self._sums.get(name)

    def end_run(self) -> None:
        """After a batch: put the sums aside, where zeroing doesn't reach them."""
        self._sums = {n: p.grad for n, p in self._parameters.items() if p.grad is not None}
        self.withdraw()

    def arm(self, chunk: int = 0, names: Collection[str] | None = None) -> None:
        """Say that the next backward pass of `chunk` is its last one: it reduces gradients."""
        assert names is None, "split backwards are refused with fully sharded parameters"
        self._expect_last(chunk, True)

    def finish(self, weight: Tensor | float) -> None:
        """Complete the window: sum over tensor ranks and tied copies, divide by `weight`."""
        partial = [self._local(name) for name in self._partial if name in self._sums]
        sum_tensors(partial, self._mesh.tp)
        sum_tensors(self._tied_sums(), self._mesh.axis("edges"))
        divisor = torch.as_tensor(weight, device=self._mesh.device)
        divisor = torch.where(divisor == 0, torch.ones_like(divisor), divisor)
        for name in self._sums:
            local = self._local(name)
            local.div_(divisor.to(torch.promote_types(local.dtype, torch.float32)))

    def publish(self, *, in_parameter_dtype: bool = False) -> None:
        """Make each parameter's `grad` its reduced gradient, a DTensor as the parameter."""
        self.begin_run()

    def withdraw(self) -> None:
        """Take every `grad` away."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def release(self) -> None:
        """Let autograd reduce each pass by itself again, and drop the sums."""
        self._sums = {}
        self.withdraw()
        for chunk in range(len(self._roots)):
            self._expect_last(chunk, True)

    def _expect_last(self, chunk: int, last: bool) -> None:
        for root in self._roots[chunk]:
            root.set_requires_gradient_sync(last or self._reduce_each)
            root.set_is_last_backward(last)

    def _local(self, name: str) -> Tensor:
        grad = self._sums[name]
        return grad.to_local() if isinstance(grad, DTensor) else grad

    def _tied_sums(self) -> list[Tensor]:
        """Local sums of tied parameters; zeros where this stage got none and the other may have."""
        trained = [name for name in self._tied if self._parameters[name].requires_grad]
        for name in trained:
            if name not in self._sums:
                self._sums[name] = torch.zeros_like(self._parameters[name])
        return [self._local(name) for name in trained]
