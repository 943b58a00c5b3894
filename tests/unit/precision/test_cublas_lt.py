"""The call of cuBLASLt, by a library that reads what it is given as cuBLAS does: columns first."""

import ctypes
import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lightning.precision import cublas_lt
from megatron_lightning.precision.formats import cast_fp8
from megatron_lightning.precision.fp8 import FP8TensorRecipe

_TYPES = {0: torch.float32, 28: torch.float8_e4m3fn, 29: torch.float8_e5m2}


def address(value: Any) -> int:
    if isinstance(value, ctypes.c_void_p):
        return value.value or 0
    return value if isinstance(value, int) else ctypes.addressof(value._obj)


class Library:
    """On the CPU; `found`: algorithms that it has."""

    def __init__(self, found: int = 1) -> None:
        self.found = found
        self.layouts: dict[int, tuple[int, int, int, int]] = {}
        self.attributes: dict[int, int] = {}
        self.wishes: dict[int, int] = {}
        self.calls = 0
        self.alive: dict[int, str] = {}

    def _name(self, out: Any, kind: str) -> int:
        self.calls += 1
        out._obj.value = self.calls
        self.alive[self.calls] = kind
        return self.calls

    def cublasLtMatmulDescDestroy(self, made: Any) -> int:  # noqa: N802
        assert self.alive.pop(made.value) == "product"
        return 0

    def cublasLtMatrixLayoutDestroy(self, made: Any) -> int:  # noqa: N802
        assert self.alive.pop(made.value) == "layout"
        return 0

    def cublasLtMatmulPreferenceDestroy(self, made: Any) -> int:  # noqa: N802
        assert self.alive.pop(made.value) == "wishes"
        return 0

    def cublasLtMatmulDescCreate(self, out: Any, compute: int, scale: int) -> int:  # noqa: N802
        assert (compute, scale) == (68, 0)
        self._name(out, "product")
        return 0

    def cublasLtMatmulDescSetAttribute(  # noqa: N802
        self, product: Any, name: int, value: Any, size: int
    ) -> int:
        assert size == {17: 8, 18: 8, 25: 1}.get(name, 4)
        self.attributes[name] = value._obj.value
        return 0

    def cublasLtMatrixLayoutCreate(  # noqa: N802
        self, out: Any, type_: int, rows: int, columns: int, leading: int
    ) -> int:
        self.layouts[self._name(out, "layout")] = (type_, rows, columns, leading)
        return 0

    def cublasLtMatmulPreferenceCreate(self, out: Any) -> int:  # noqa: N802
        self._name(out, "wishes")
        return 0

    def cublasLtMatmulPreferenceSetAttribute(  # noqa: N802
        self, wishes: Any, name: int, value: Any, size: int
    ) -> int:
        assert size == (8 if name == 1 else 4)
        self.wishes[name] = value._obj.value
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, *arguments: Any) -> int:  # noqa: N802
        *_, asked, choice, found = arguments
        assert asked == 1
        found._obj.value = self.found
        choice._obj[0].workspace = 64
        return 0

    def _matrix(self, layout: Any, place: int) -> Tensor:
        """(rows, columns) with columns first in memory."""
        type_, rows, columns, leading = self.layouts[layout.value]
        assert leading == rows
        dtype = _TYPES[type_]
        size = rows * columns * dtype.itemsize
        memory = (ctypes.c_uint8 * size).from_address(place)
        return torch.frombuffer(memory, dtype=dtype).view(columns, rows).t()

    def cublasLtMatmul(self, *arguments: Any) -> int:  # noqa: N802
        _, _, alpha, a, of_a, b, of_b, beta, c, of_c, d, of_d, choice, _, size, stream = arguments
        assert (alpha._obj.value, beta._obj.value) == (1.0, 1.0)
        assert (c, of_c.value) == (d, of_d.value)
        assert (choice._obj.workspace, size, stream) == (64, 64, 7)
        assert (self.attributes[3], self.attributes[25]) == (1, 0)
        scales = [ctypes.c_float.from_address(self.attributes[name]).value for name in (17, 18)]
        product = self._matrix(of_a, a).float().t() @ self._matrix(of_b, b).float()
        self._matrix(of_d, d).add_(product * scales[0] * scales[1])
        return 0


def test_rows_become_columns_and_factors_change_places() -> None:
    torch.manual_seed(0)
    a = cast_fp8(torch.randn(48, 32), "e5m2")
    b = cast_fp8(torch.randn(16, 32), "e4m3")
    scale_a, scale_b = torch.tensor(0.5), torch.tensor(4.0)
    total = torch.randn(48, 16)
    want = total + (a.float() @ b.float().t()) * 2.0
    library = Library()
    product = cublas_lt.Product(
        library, ctypes.c_void_p(1), (48, 16, 32), (a.dtype, b.dtype), (256, 16, 32)
    )
    product(total, a, scale_a, b, scale_b, 7)
    torch.testing.assert_close(total, want)
    assert library.wishes == {1: 32 * 2**20, 5: 16, 6: 256, 7: 32, 8: 32}
    product(total, a, scale_b, b, scale_b, 7)
    torch.testing.assert_close(total, want + (a.float() @ b.float().t()) * 16.0)


TYPES = (torch.float8_e4m3fn, torch.float8_e4m3fn)


@pytest.mark.parametrize("found", [0, 1])
def test_what_was_made_is_destroyed(found: int) -> None:
    library = Library(found)
    try:
        made = cublas_lt.Product(library, ctypes.c_void_p(1), (16, 16, 16), TYPES, (16, 16, 16))
        assert sorted(library.alive.values()) == ["layout"] * 3 + ["product", "wishes"]
        del made
    except cublas_lt.CublasError:
        assert not found
    gc.collect()
    assert library.calls == 5
    assert not library.alive


def test_a_product_that_there_is_not_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(cublas_lt.CublasError, match="no algorithm"):
        cublas_lt.Product(Library(0), ctypes.c_void_p(1), (16, 16, 16), TYPES, (16, 16, 16))
    said: list[str] = []
    monkeypatch.setattr(cublas_lt, "library", lambda: Library(0))
    monkeypatch.setattr(cublas_lt, "handle", ctypes.c_void_p)
    monkeypatch.setattr(cublas_lt, "warn_once", said.append)
    assert cublas_lt._product_of.__wrapped__(0, (16, 16, 16), TYPES, (16, 16, 16)) is None
    assert len(said) == 1
    assert "in a pass of their own" in said[0]
    assert "no algorithm" in said[0]


def test_alignments_are_powers_of_two() -> None:
    memory = torch.empty(2048, dtype=torch.uint8)
    begin = -memory.data_ptr() % 512
    for offset, want in ((0, 256), (4, 4), (16, 16), (48, 16), (128, 128), (256, 256)):
        assert cublas_lt._alignment(memory[begin + offset :]) == want


def test_on_the_cpu_nothing_is_added() -> None:
    recipe = FP8TensorRecipe("e5m2")
    grad = recipe.pair(torch.ones(16, 32), "gradient").transposed
    x = recipe.pair(torch.ones(16, 48), "input").transposed
    assert grad is not None
    assert x is not None
    total = torch.zeros(32, 48)
    assert not recipe.add_product_(total, grad, x)
    assert not total.any()
