"""What a pipeline stage's computation must give, checked, and what is taken from it."""

from __future__ import annotations

import torch
from torch import Tensor

StageResult = tuple[Tensor, ...] | Tensor | None


def activations(result: StageResult, chunk: int, device: torch.device) -> tuple[Tensor, ...]:
    """The tensors for the next virtual stage; ValueError where they cannot be sent."""
    outputs: list[Tensor] = []
    for output in result if isinstance(result, tuple) else (result,):
        if not isinstance(output, Tensor) or output.device != device:
            where = output.device if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(
                f"chunk {chunk} must return a tensor or a tuple of tensors on {device} for the next"
                f" pipeline stage, but returned one {where}."
            )
        outputs.append(output)
    return tuple(outputs)


def loss(result: StageResult, micro_batch: int, *, backward: bool) -> tuple[Tensor, ...]:
    """The loss as a tuple of one, or of none if there is nothing to differentiate."""
    if not backward or result is None:
        return ()
    if not isinstance(result, Tensor) or result.numel() != 1:
        what = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise ValueError(
            f"the last pipeline stage must return a scalar loss for micro-batch {micro_batch}, or"
            f" None, but returned {what}."
        )
    return (result,)


def take_grad(tensor: Tensor) -> Tensor:
    """Move the gradient out of a received tensor; zeros if none has reached it."""
    grad, tensor.grad = tensor.grad, None
    return torch.zeros_like(tensor) if grad is None else grad
