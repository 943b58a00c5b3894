"""What products of low-precision layers ask of memory that only a GPU would miss."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.quantized import borders
from megatron_lightning.parallel.quantized.by_parts import partial_sums
from megatron_lightning.precision.operands import Operand


class Copies(TorchDispatchMode):
    """Writes down copies."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            self.events.append("copy")
        return func(*args, **(kwargs or {}))


def test_a_gradient_is_copied_before_its_turn_begins() -> None:
    """What is moved follows what the stream was given before `begin`."""
    events: list[str] = []
    turn = SimpleNamespace(
        gather=lambda part, joins: events.append(f"gather {part.is_contiguous()}"),
        whole=lambda: torch.zeros(2),
        end=lambda: events.append("end"),
    )
    exchange = SimpleNamespace(begin=lambda *_: (events.append("begin"), turn)[1])
    products: Any = SimpleNamespace(
        exchange=lambda *_: exchange, gradient=lambda whole, *_: (whole, None)
    )
    of_a_concatenation = torch.randn(8, 6)[:, :3]
    with Copies(events):
        borders._of_whole(products, of_a_concatenation, (True, True), None, None)
    assert events == ["copy", "begin", "gather True", "end"]


@pytest.mark.parametrize("rows", [6, 8])
def test_scales_of_rows_begin_where_products_can_read_them(rows: int) -> None:
    """Products by cuBLAS want multiples of 16 bytes."""
    seen: list[Tensor] = []

    def product(a: Operand, b: Operand, dtype: torch.dtype, *, forward: bool) -> Tensor:
        assert a.scale is not None
        assert a.scale.data_ptr() % 16 == 0
        seen.append(a.scale)
        return a.values

    recipe: Any = SimpleNamespace(product=product)
    turn: Any = SimpleNamespace(send=lambda step, partial: None)
    axis = MeshAxis(name="tp", rank=1, size=2, ranks=(0, 1))
    scale = torch.arange(2.0 * rows).unsqueeze(1)
    whole = Operand(torch.ones(2 * rows, 4), scale)
    partial_sums(recipe, whole, whole, torch.float32, turn, axis, forward=True)
    assert torch.equal(torch.cat(seen), scale)
