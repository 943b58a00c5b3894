"""What of a linear layer a tensor axis splits, as its products need to know it."""

from __future__ import annotations

from typing import Literal

from megatron_lightning.config.plan import Role, Split

TensorSplit = Literal["columns", "rows", "none"]
"""What of a linear layer the tensor axis splits: output features, input features, nothing."""

_SPLITS: dict[Role, TensorSplit] = {Role.COLUMN: "columns", Role.ROW: "rows"}


def tensor_split_of(split: Split, dims: int) -> TensorSplit:
    """By a row of the plan, of a weight with so many dims."""
    if split.role is Role.EXPERT and split.dim is not None:
        return "rows" if split.dim % dims == dims - 1 else "columns"
    return _SPLITS.get(split.role, "none")
