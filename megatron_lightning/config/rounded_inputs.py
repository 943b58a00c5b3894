"""What products in eight or four bits keep for their backward pass, in place of their input.

A linear layer in low precision keeps the rounded transpose of its input
(`parallel/quantized/products.py`); the input itself stays only where something else keeps it, or a
recomputed module takes it in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from megatron_lightning.config.quantization import QuantizationConfig
from megatron_lightning.config.saved_tensors import SavedTensor

RoundedInputs = tuple[tuple[str, float], ...]
"""(path of a linear layer within its layer, bytes kept for each element of its input held here)."""

SIMULATED_BYTES = 2
"""Of a rounded value that is held in a dtype of products: bfloat16, on a GPU."""
_BLOCK = 128
_SCALE_BYTES = 4


def weight_copies(config: QuantizationConfig, *, experts: bool = False) -> int:
    """Storages that hold the two operands of a weight: one, where one is a view of the other."""
    if not config.simulate or (experts and config.scales_rows_of_experts):
        return 2
    return 2 if config.recipe in ("fp8_rowwise", "mxfp8") else 1


def value_bytes(config: QuantizationConfig, simulated_bytes: int = SIMULATED_BYTES) -> int:
    """Of one rounded value."""
    return simulated_bytes if config.simulate else 1


def input_bytes(
    config: QuantizationConfig, tokens: float, simulated_bytes: int = SIMULATED_BYTES
) -> float:
    """Of one element of an input of `tokens` rows, its share of the scales in it."""
    if config.simulate:
        return float(simulated_bytes)
    if config.recipe == "fp8_blockwise":
        return 1 + _SCALE_BYTES / _BLOCK
    return 1 + _SCALE_BYTES / tokens if config.recipe == "fp8_rowwise" else 1.0


def with_rounded_inputs(
    rows: Iterable[SavedTensor], rounded: RoundedInputs, bytes_per_element: int
) -> list[SavedTensor]:
    """`rows` of a layer of which the linear layers `rounded` are in low precision."""
    sizes = dict(rounded)
    found = []
    for row in rows:
        products = [path for path in row.kept_by if path in sizes]
        if not products:
            found.append(row)
            continue
        left = tuple(path for path in row.kept_by if path not in sizes)
        found.append(replace(row, kept_by=left, made_by=None))
        elements = row.bytes_per_token / bytes_per_element
        found += [
            SavedTensor(
                name=f"{row.name}, rounded for {path}",
                bytes_per_token=elements * sizes[path],
                kept_by=(path,),
            )
            for path in products
        ]
    return found
