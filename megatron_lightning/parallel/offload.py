"""What a layer saves for its backward pass, kept in CPU memory in the meantime.

A region like those of `recompute.py`. On CUDA, copies run on two streams of their own: out while
the next layer computes, and back one layer ahead of the backward pass; the CPU side is pinned. Each
storage is copied once, however many operations saved a view of it. Weights and small tensors stay
where they are. On a CPU device the same code copies to other CPU memory, which saves nothing and
shows that the results are the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class Offloaded:
    """Moves what the function saves to the CPU, and back for the backward pass."""

    def __init__(self, device: torch.device, *, min_bytes: int) -> None:
        """`device`: where activations live; storages below `min_bytes` bytes stay there."""
        self.device = device
        self.min_bytes = min_bytes
        on_cuda = device.type == "cuda"
        self._out = torch.cuda.Stream(device) if on_cuda else None
        self._back = torch.cuda.Stream(device) if on_cuda else None
        self._last: weakref.ref[_Run] | None = None

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `function`; without gradients, just that."""
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        before = None if self._last is None else self._last()
        run = _Run(before)
        self._last = weakref.ref(run)

        def pack(tensor: Tensor) -> Tensor | _View:
            return self._pack(tensor, run)

        with saved_tensors_hooks(pack, self._unpack):
            result = function(*args, **kwargs)
        # On CUDA the copies of the layer before had the time of this one to finish.
        self._release_sources(run if self._out is None else before)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Offloaded:
        """Itself: streams are shared, also by copies of a network."""
        return self

    # ------------------------------------------------------------------ out

    def _pack(self, tensor: Tensor, run: _Run) -> Tensor | _View:
        storage = tensor.untyped_storage()
        moves = (
            type(tensor) is Tensor
            and tensor.layout is torch.strided
            and tensor.device.type == self.device.type
            and not isinstance(tensor._base, nn.Parameter)
            and storage.nbytes() >= self.min_bytes
        )
        if not moves:
            return tensor
        # Sources live as long as a run is packed, so that no address can come to mean another one.
        key = (storage.data_ptr(), tensor._version, tensor.dtype)
        if key not in run.copies:
            run.copies[key] = self._copy_out(tensor)
        return _View(run, run.copies[key], tensor)

    def _copy_out(self, tensor: Tensor) -> _Copy:
        elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        flat = tensor.detach().as_strided((elements,), (1,), 0)
        if self._out is None:
            return _Copy(source=flat, host=flat.clone(), written=None)
        host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            host.copy_(flat, non_blocking=True)
            written = self._out.record_event()
        return _Copy(source=flat, host=host, written=written)

    def _release_sources(self, run: _Run | None) -> None:
        """Let the originals go. What the device allocates there next is written after the copy."""
        for copy in run.copies.values() if run is not None else ():
            if copy.written is not None and copy.source is not None:
                torch.cuda.current_stream(self.device).wait_event(copy.written)
            copy.source = None

    # ------------------------------------------------------------------ back

    def _unpack(self, packed: Tensor | _View) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self._copy_back(packed.run)
        self._copy_back(packed.run.before())  # whose turn is next
        copy = packed.copy
        if copy.read is not None:
            torch.cuda.current_stream(self.device).wait_event(copy.read)
        flat = copy.host if copy.device is None else copy.device
        return flat.as_strided(packed.size, packed.stride, packed.offset)

    def _copy_back(self, run: _Run | None) -> None:
        """Start to bring back all that one run saved; on a CPU it is there."""
        if self._back is None or run is None or run.is_back:
            return
        run.is_back = True
        absent = []
        for copy in run.copies.values():
            if copy.source is not None:  # the backward pass came before it was let go
                copy.device = copy.source
            else:
                copy.device = torch.empty_like(copy.host, device=self.device)
                absent.append(copy)
        self._back.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._back):
            for copy in absent:
                copy.device.copy_(copy.host, non_blocking=True)
                copy.read = self._back.record_event()


class _Copy:
    """One storage on its way."""

    def __init__(self, *, source: Tensor | None, host: Tensor, written: Any) -> None:
        self.source = source
        """The original, until the copy to `host` is done."""
        self.host = host
        self.written = written
        """CUDA event behind the copy out."""
        self.device: Any = None
        """Back on the device."""
        self.read: Any = None
        """CUDA event behind the copy back."""


class _Run:
    """What one call of a region saved."""

    def __init__(self, before: _Run | None) -> None:
        self._before = None if before is None else weakref.ref(before)
        self.copies: dict[tuple[int, int, torch.dtype], _Copy] = {}
        self.is_back = False

    def before(self) -> _Run | None:
        """The run of the layer before, unless its backward pass is done."""
        return None if self._before is None else self._before()


class _View:
    """What autograd holds in place of a saved tensor."""

    def __init__(self, run: _Run, copy: _Copy, tensor: Tensor) -> None:
        self.run, self.copy = run, copy
        self.size, self.stride = tensor.size(), tensor.stride()
        self.offset = tensor.storage_offset()
