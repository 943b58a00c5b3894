"""Adam's step as one pass over memory, in place of that of torch's fused optimizer.

The pass scales the gradients (the window's weight, clipping), updates moments and parameters, and
writes the rounded copies that the network computes with: 30 bytes a parameter are moved instead of
50 in four passes. The optimizer object stays what it is, with its groups, hooks, schedulers and
state: its own `step` finds no gradients and changes nothing, then this one runs as the first of its
post-hooks. It never waits for the device. What has been updated can be sent to other ranks while
the rest of the pass goes on (`Stage`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from megatron_lightning.layers.kernels import can_run

OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW)
Copies = Callable[[], Mapping[Parameter, Tensor]]
Stage = tuple[Collection[Parameter], Callable[[], None]]
"""Some of the parameters, and what is to be called when all of them that take part are updated and
their copies written, on the device."""
Stages = Callable[[], Sequence[Stage]]

Member = tuple[Parameter, Tensor, Tensor | None]
"""(what is updated, its gradient, its rounded copy if there is one)"""


@dataclass
class _Group:
    """Tensors of one parameter group, as the kernel finds them."""

    rows: list[list[int]]
    table: Tensor
    tensor_of: Tensor
    block_of: Tensor
    ends: list[int]
    """Programs up to the end of each tensor."""


class _Launch(NamedTuple):
    """A group's step, begun: what its kernels are given, and which tensors belong to each stage."""

    group: dict[str, Any]
    held: _Group
    corrections: Tensor
    counts: list[int]
    """Tensors of each stage; they follow each other."""
    copy_dtype: torch.dtype


class AdamPass:
    """Steps of one optimizer. `copies` gives the tensors that are to hold parameters rounded; a
    parameter may have none. `stages`: the order in which parameters are updated, where no hook
    comes after the pass (`is_last`).

    A step is: `take`, the optimizer's own step. Parameters without gradient are left alone, as
    torch does it.
    """

    def __init__(self, optimizer: Optimizer, copies: Copies, stages: Stages | None = None) -> None:
        self._optimizer = optimizer
        self._copies = copies
        self._stages = stages
        self._taken: list[Member] | None = None
        """None where the step is torch's; a rank may have nothing to update in a step of ours."""
        self._factor: Tensor | None = None
        self._active: Tensor | None = None
        self._keep = False
        self._groups: dict[int, _Group] = {}
        self._handle = optimizer.register_step_post_hook(self._after_step)
        # Hooks of the user are to see updated parameters.
        optimizer._optimizer_step_post_hooks.move_to_end(self._handle.id, last=False)  # type: ignore[attr-defined]

    def drop(self) -> None:
        """Forget what was taken for a step that was not made."""
        self._taken = None

    def remove(self) -> None:
        """Let the optimizer step by itself again."""
        self._handle.remove()
        self._groups.clear()

    @property
    def is_last(self) -> bool:
        """True when no hook of the user's runs after the pass and may change parameters again."""
        own = self._optimizer._optimizer_step_post_hooks  # type: ignore[attr-defined]
        return len(own) == 1 and not _global_optimizer_post_hooks

    def take(self, factor: Tensor, active: Tensor, *, keep: bool) -> bool:
        """Take the gradients away and make the next step with them; False where torch has to.

        `factor`: 0-dim float32, to multiply them with. `active`: 0-dim, the step changes nothing
        where it is 0. With `keep` the gradients stand there again after the step.
        """
        copies = self._copies()
        if self._optimizer._optimizer_step_pre_hooks or _global_optimizer_pre_hooks:  # type: ignore[attr-defined]
            return False  # they are to see gradients
        taken: list[Member] = [
            (parameter, parameter.grad, copies.get(parameter))
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        dtypes = {copy.dtype for _, _, copy in taken if copy is not None}
        if len(dtypes) > 1 or not all(fits(*one) for one in taken):
            return False
        self._taken, self._factor, self._active, self._keep = taken, factor, active, keep
        for parameter, _, _ in taken:
            parameter.grad = None
        return True

    # ------------------------------------------------------------------ the step

    @torch.no_grad()
    def _after_step(self, *_args: Any) -> None:
        taken, self._taken = self._taken, None
        if taken is None:
            return
        assert self._factor is not None
        assert self._active is not None
        stages = [] if self._stages is None or not self.is_last else list(self._stages())
        stage_of = {p: number for number, (members, _) in enumerate(stages) for p in members}
        found = {one[0]: one for one in taken}
        launches: list[_Launch] = []
        for number, group in enumerate(self._optimizer.param_groups):
            members = [found[p] for p in group["params"] if p in found]
            if members:
                members.sort(key=lambda one: stage_of.get(one[0], len(stages)))
                found_in = Counter(stage_of.get(one[0], len(stages)) for one in members)
                counts = [found_in[stage] for stage in range(len(stages) + 1)]
                launches.append(self._begin_group(number, group, members, counts))
        for stage in range(len(stages) + 1):
            for launch in launches:
                self._launch(launch, stage)
            if stage < len(stages):
                stages[stage][1]()
        changed = [tensor for p, _, copy in taken for tensor in (p, copy) if tensor is not None]
        torch.autograd.graph.increment_version(changed)  # the kernel writes behind torch's back
        if self._keep:
            for parameter, grad, _ in taken:
                parameter.grad = grad

    def _begin_group(
        self, number: int, group: dict[str, Any], members: Sequence[Member], counts: list[int]
    ) -> _Launch:
        assert self._active is not None
        states = [self._state(parameter) for parameter, _, _ in members]
        beta1, beta2 = group["betas"]
        steps = [state["step"] for state in states]
        active = self._active.to(steps[0].dtype)
        torch._foreach_add_(steps, [active] * len(steps))  # with one tensor the host would wait
        ages = torch.stack(steps).double()
        corrections = torch.stack((1 - beta1**ages, (1 - beta2**ages).sqrt()), dim=1).float()
        held = self._group(number, members, states)
        dtype = next((copy.dtype for _, _, copy in members if copy is not None), torch.float32)
        return _Launch(group, held, corrections, counts, dtype)

    def _launch(self, launch: _Launch, stage: int) -> None:
        """Update the tensors of one stage."""
        first = sum(launch.counts[:stage])
        last = first + launch.counts[stage]
        if first == last:
            return
        assert self._factor is not None
        assert self._active is not None
        from megatron_lightning.layers.kernels import adam

        group, held = launch.group, launch.held
        beta1, beta2 = group["betas"]
        programs = slice(held.ends[first - 1] if first else 0, held.ends[last - 1])
        adam.update(
            held.table,
            held.tensor_of[programs],
            held.block_of[programs],
            launch.corrections,
            self._factor,
            self._active,
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=decouples(self._optimizer, group),
            copy_dtype=launch.copy_dtype,
        )

    def _state(self, parameter: Parameter) -> dict[str, Any]:
        """The state as torch makes it at the first step."""
        state = self._optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state

    def _group(
        self,
        number: int,
        members: Sequence[Member],
        states: Sequence[dict[str, Any]],
    ) -> _Group:
        """The table of a group, made anew where an address has changed."""
        rows = [
            [
                parameter.data_ptr(),
                grad.data_ptr(),
                state["exp_avg"].data_ptr(),
                state["exp_avg_sq"].data_ptr(),
                0 if copy is None else copy.data_ptr(),
                parameter.numel(),
            ]
            for (parameter, grad, copy), state in zip(members, states, strict=True)
        ]
        held = self._groups.get(number)
        if held is None or held.rows != rows:
            held = self._groups[number] = _lay_out(rows, members[0][0].device)
        return held


def _lay_out(rows: list[list[int]], device: torch.device) -> _Group:
    from megatron_lightning.layers.kernels import adam

    blocks = torch.tensor([-(-row[-1] // adam.BLOCK) for row in rows])
    tensor_of = torch.repeat_interleave(torch.arange(len(rows)), blocks)
    begins = blocks.cumsum(0) - blocks
    block_of = torch.arange(len(tensor_of)) - begins[tensor_of]
    table = torch.tensor(rows, dtype=torch.int64)
    return _Group(
        rows=rows,
        table=_to_device(table, device),
        tensor_of=_to_device(tensor_of.int(), device),
        block_of=_to_device(block_of.int(), device),
        ends=blocks.cumsum(0).tolist(),
    )


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy that doesn't wait for the device."""
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def decouples(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether decay acts on the parameter, not through the gradient."""
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)))


def fits(parameter: Tensor, grad: Tensor, copy: Tensor | None) -> bool:
    """Whether the kernel can update `parameter`."""
    tensors = [parameter, grad] if copy is None else [parameter, grad, copy]
    return (
        can_run(parameter)
        and parameter.dtype is torch.float32
        and grad.dtype is torch.float32
        and all(
            t.device == parameter.device
            and t.is_contiguous()
            and t.shape == parameter.shape
            and t.data_ptr() % 16 == 0
            for t in tensors
        )
    )


def can_pass(optimizer: Optimizer) -> bool:
    """Whether the optimizer is torch's Adam or AdamW with its fused kernel and nothing unusual."""
    return type(optimizer) in OPTIMIZERS and all(
        group["fused"]
        and not (group["amsgrad"] or group["maximize"] or group["differentiable"])
        and not isinstance(group["lr"], Tensor)
        and not any(isinstance(beta, Tensor) for beta in group["betas"])
        for group in optimizer.param_groups
    )


def all_fit(optimizer: Optimizer, copies: Copies) -> bool:
    """Whether the kernel can update all parameters of an optimizer."""
    of, groups = copies(), optimizer.param_groups
    return all(fits(p, p, of.get(p)) for group in groups for p in group["params"])
