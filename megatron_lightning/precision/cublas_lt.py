"""FP8 products that add to a float32 sum, by cuBLASLt itself.

Torch's `_scaled_mm` overwrites its result, so that a second micro-batch's gradient of a weight
would be written, read, and added in a pass of its own. cuBLASLt adds within the product. The
library is the one that torch has loaded, called by ctypes: nothing is built. Numbers of its
enumerations are those of cublasLt.h and library_types.h, the same since CUDA 12.0.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections.abc import Callable
from ctypes import POINTER, byref, c_float, c_int, c_int8, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.utils.logging import warn_once

_TYPES = {torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
_FLOAT32 = 0
_RESULTS = {torch.float32: _FLOAT32, torch.bfloat16: 14, torch.float16: 2}
_COMPUTE_FLOAT32 = 68
_TRANSPOSED = 1
_WORKSPACE = 32 * 2**20
"""Bytes, as cuBLAS asks for on compute capability 9.0."""
_ALIGNMENT = 256
"""Bytes; addresses that are multiples of more are as good."""

_TRANSPOSES_A = 3
_SCALE_OF_A, _SCALE_OF_B = 17, 18
_FAST = 25
_MOST_WORKSPACE = 1
_ALIGNMENTS = (5, 6, 7, 8)
"""Attributes: of a product, and of what is preferred (addresses of A, B, C and D)."""


class _Choice(ctypes.Structure):
    """`cublasLtMatmulHeuristicResult_t`; its algorithm comes first."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class CublasError(RuntimeError):
    """A call of cuBLASLt was refused."""


@functools.lru_cache(maxsize=1)
def library() -> Any:
    """The library that torch has loaded. OSError where there is none."""
    version = torch.version.cuda
    if version is None:
        raise OSError("torch without CUDA")
    library = ctypes.CDLL(f"libcublasLt.so.{version.split('.')[0]}")
    handle, out = c_void_p, POINTER(c_void_p)
    library.cublasLtCreate.argtypes = [out]
    library.cublasLtMatmulDescCreate.argtypes = [out, c_int, c_int]
    library.cublasLtMatmulDescSetAttribute.argtypes = [handle, c_int, c_void_p, c_size_t]
    library.cublasLtMatrixLayoutCreate.argtypes = [out, c_int, c_uint64, c_uint64, c_int64]
    library.cublasLtMatmulPreferenceCreate.argtypes = [out]
    library.cublasLtMatmulPreferenceSetAttribute.argtypes = [handle, c_int, c_void_p, c_size_t]
    library.cublasLtMatmulAlgoGetHeuristic.argtypes = [handle] * 7 + [c_int, c_void_p, c_void_p]
    library.cublasLtMatmul.argtypes = [handle] * 14 + [c_size_t, c_void_p]
    for kind in ("MatmulDesc", "MatrixLayout", "MatmulPreference"):
        getattr(library, f"cublasLt{kind}Destroy").argtypes = [handle]
    return library


def _checked(call: Callable[..., int], *arguments: Any) -> None:
    status = call(*arguments)
    if status:
        raise CublasError(f"{call.__name__} returned {status}")


def _made(call: Callable[..., int], *arguments: Any) -> c_void_p:
    made = c_void_p()
    _checked(call, byref(made), *arguments)
    return made


def _destroy(made: list[tuple[Callable[..., int], c_void_p]]) -> None:
    while made:
        call, one = made.pop()
        call(one)


@functools.lru_cache
def handle(device: int) -> c_void_p:
    """Of the device that is the current one."""
    return _made(library().cublasLtCreate)


class Product:
    """One kind of product on one device, ready to be called. cuBLAS counts columns first: what is
    (M, N) by rows is (N, M) to it, so that its A is our b, and its B our a.
    """

    def __init__(
        self,
        library: Any,
        handle: c_void_p,
        shape: tuple[int, int, int],
        types: tuple[torch.dtype, torch.dtype],
        alignments: tuple[int, int, int],
        *,
        result: torch.dtype = torch.float32,
        add: bool = True,
        fast: bool = False,
        rank: int = 0,
    ) -> None:
        """`shape` (M, N, K); `types` of a and b; bytes that addresses of a, b and the sum are
        multiples of; dtype of the sum, and whether the product is added to it; `fast`: it may be
        summed in less than float32. `rank`: which of the algorithms that cuBLAS proposes.
        """
        rows, columns, summed = shape
        self._library, self._handle = library, handle
        self._lock = threading.Lock()  # the scales' addresses are attributes
        self._one, self._kept = c_float(1.0), c_float(float(add))
        self._owned: list[tuple[Callable[..., int], c_void_p]] = []
        weakref.finalize(self, _destroy, self._owned).atexit = False
        self._product = self._own("MatmulDesc", _COMPUTE_FLOAT32, _FLOAT32)
        self._set(_TRANSPOSES_A, c_int(_TRANSPOSED))
        self._set(_FAST, c_int8(fast))
        layout = functools.partial(self._own, "MatrixLayout")
        self._a = layout(_TYPES[types[0]], summed, rows, summed)
        self._b = layout(_TYPES[types[1]], summed, columns, summed)
        self._sum = layout(_RESULTS[result], columns, rows, columns)
        self._choice = self._choose(alignments, rank)

    def _own(self, kind: str, *arguments: Any) -> c_void_p:
        """Make something of cuBLASLt's that is destroyed with this object."""
        made = _made(getattr(self._library, f"cublasLt{kind}Create"), *arguments)
        self._owned.append((getattr(self._library, f"cublasLt{kind}Destroy"), made))
        return made

    def _set(self, attribute: int, value: Any) -> None:
        size = ctypes.sizeof(value)
        set_ = self._library.cublasLtMatmulDescSetAttribute
        _checked(set_, self._product, attribute, byref(value), size)

    def _choose(self, alignments: tuple[int, int, int], rank: int) -> _Choice:
        library, choices, found = self._library, (_Choice * (rank + 1))(), c_int(0)
        wishes = self._own("MatmulPreference")
        of_a, of_b, of_sum = alignments
        values = [(_MOST_WORKSPACE, c_uint64(_WORKSPACE))]
        wanted = zip(_ALIGNMENTS, (of_b, of_a, of_sum, of_sum), strict=True)
        values += [(name, ctypes.c_uint32(value)) for name, value in wanted]
        for name, value in values:
            size = ctypes.sizeof(value)
            _checked(library.cublasLtMatmulPreferenceSetAttribute, wishes, name, byref(value), size)
        # Addresses of scales say that there are some; those of a call are set when it is made.
        self._set(_SCALE_OF_A, c_void_p(_ALIGNMENT))
        self._set(_SCALE_OF_B, c_void_p(_ALIGNMENT))
        layouts = (self._b, self._a, self._sum, self._sum)
        _checked(
            library.cublasLtMatmulAlgoGetHeuristic,
            self._handle,
            self._product,
            *layouts,
            wishes,
            rank + 1,
            byref(choices),
            byref(found),
        )
        if found.value <= rank or choices[rank].status:
            raise CublasError("no algorithm for an FP8 product that adds to float32")
        return choices[rank]

    def __call__(
        self, total: Tensor, a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, stream: int
    ) -> None:
        """`total` += a b^T times both scales, or without `add` =."""
        workspace = torch.empty(self._choice.workspace, dtype=torch.uint8, device=total.device)
        with self._lock:
            self._set(_SCALE_OF_A, c_void_p(scale_b.data_ptr()))
            self._set(_SCALE_OF_B, c_void_p(scale_a.data_ptr()))
            address = total.data_ptr()
            _checked(
                self._library.cublasLtMatmul,
                self._handle,
                self._product,
                byref(self._one),
                b.data_ptr(),
                self._b,
                a.data_ptr(),
                self._a,
                byref(self._kept),
                address,
                self._sum,
                address,
                self._sum,
                byref(self._choice),
                workspace.data_ptr(),
                self._choice.workspace,
                stream,
            )


@functools.lru_cache(maxsize=4096)  # one for each shape, where numbers of tokens vary
def _product_of(
    device: int,
    shape: tuple[int, int, int],
    types: tuple[torch.dtype, torch.dtype],
    alignments: tuple[int, int, int],
) -> Product | None:
    """None, and a warning, where cuBLAS has no such product."""
    try:
        return Product(library(), handle(device), shape, types, alignments)
    except (CublasError, OSError) as error:
        _warn(error)
        return None


def _warn(error: Exception) -> None:
    warn_once(f"FP8 gradients are added in a pass of their own, which takes longer: {error}")


def _alignment(tensor: Tensor) -> int:
    """The largest power of two that divides the address, at most 256."""
    address = tensor.data_ptr() | _ALIGNMENT
    return address & -address


def add_product_(total: Tensor, a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> bool:
    """`total` (M, N) += a b^T times both scales: float32, FP8 (M, K) and (N, K), contiguous, scales
    0-dim float32. False, and nothing is changed, where that can't be done in one product.
    """
    device = total.device.index
    if total.dtype is not torch.float32 or not total.is_cuda:
        return False
    if torch.version.cuda is None or device != torch.cuda.current_device():
        return False
    if not total.numel() or scale_a.dim() or scale_b.dim():
        return False
    shape = (len(a), len(b), a.shape[1])
    alignments = (_alignment(a), _alignment(b), _alignment(total))
    product = _product_of(device, shape, (a.dtype, b.dtype), alignments)
    if product is None:
        return False
    try:
        product(total, a, scale_a, b, scale_b, torch.cuda.current_stream().cuda_stream)
    except CublasError as error:
        _warn(error)
        return False
    return True
