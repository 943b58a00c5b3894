"""What the MLP half of a layer with experts keeps for its backward pass (see `activations.py`).

Rows are tokens times the experts that each is sent to; it is assumed that all experts get the same
number. What the other half keeps, and dense layers, stand in `activations.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lightning.config.model import GPTConfig
from megatron_lightning.config.moe import expert_width

INDEX_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class ExpertTensor:
    """One storage: its name, bytes a token on one rank, and who keeps it and takes it in."""

    name: str
    bytes_per_token: float
    kept_by: tuple[str, ...]
    enters: tuple[str, ...] = ()


def expert_tensors(
    model: GPTConfig,
    *,
    element: int,
    split_hidden: int,
    tensor_size: int,
    expert_size: int,
    expert_tensor_size: int,
) -> Sequence[ExpertTensor]:
    """Storages of router, experts and shared expert of one layer; `element`: bytes of one."""
    moe = model.moe
    assert moe is not None
    hidden, width = model.hidden_size / split_hidden, expert_width(model)
    inner = moe.latent_size or model.hidden_size
    rows = moe.router_topk * expert_tensor_size / tensor_size
    columns = width / expert_tensor_size
    router = 8 if moe.router_dtype == "float64" else 4
    halves = 2 if model.gated_linear_unit else 1
    remote = expert_size * expert_tensor_size > 1
    travel = moe.router_topk / tensor_size + (rows if remote else 0)
    numbers = (moe.num_experts * router + moe.router_topk * (INDEX_BYTES + router)) / split_hidden
    readers = ("mlp.shared_experts.linear_fc1",) if moe.shared_expert_ffn_hidden_size else ()
    readers += ("mlp.shared_expert_gate",) if moe.shared_expert_gate else ()
    readers += ("mlp.latent_down",) if moe.latent_size else ()
    found = [
        ExpertTensor(
            name="normed MLP input",
            bytes_per_token=element * hidden,
            kept_by=("mlp.router", *readers),
            enters=("mlp", "mlp.router", "mlp.shared_experts"),
        ),
        ExpertTensor(name="scores", bytes_per_token=numbers, kept_by=("mlp.router",)),
        ExpertTensor(
            name="orders of rows", bytes_per_token=2 * INDEX_BYTES * travel, kept_by=("mlp",)
        ),
        *_of_rows(element, rows, rows * columns, inner, halves),
    ]
    if moe.latent_size:
        found.append(
            ExpertTensor(
                name="latent output",
                bytes_per_token=element * moe.latent_size / split_hidden,
                kept_by=("mlp.latent_up",),
            )
        )
    return found + _shared(model, element, split_hidden, tensor_size)


def _of_rows(
    element: int, rows: float, product: float, inner: int, halves: int
) -> list[ExpertTensor]:
    """What the experts keep of `rows` rows a token."""
    return [
        ExpertTensor(
            name="rows of experts",
            bytes_per_token=element * rows * inner,
            kept_by=("mlp.experts.linear_fc1",),
            enters=("mlp.experts",),
        ),
        ExpertTensor(
            name="weights of rows",
            bytes_per_token=4 * rows,
            kept_by=("mlp.experts",),
            enters=("mlp.experts",),
        ),
        ExpertTensor(
            name="inside of experts",
            bytes_per_token=element * product * halves,
            kept_by=("mlp.experts",),
        ),
        ExpertTensor(
            name="product of experts",
            bytes_per_token=element * product,
            kept_by=("mlp.experts.linear_fc2",),
        ),
    ]


def _shared(
    model: GPTConfig, element: int, split_hidden: int, tensor_size: int
) -> list[ExpertTensor]:
    moe = model.moe
    assert moe is not None
    if not moe.shared_expert_ffn_hidden_size:
        return []
    width = element * moe.shared_expert_ffn_hidden_size / tensor_size
    halves = 2 if model.gated_linear_unit else 1
    found = [
        ExpertTensor(
            name="inside of the shared expert",
            bytes_per_token=width * halves,
            kept_by=("mlp.shared_experts",),
        ),
        ExpertTensor(
            name="product of the shared expert",
            bytes_per_token=width,
            kept_by=("mlp.shared_experts.linear_fc2",),
            enters=("mlp.shared_experts.linear_fc2",),
        ),
    ]
    if moe.shared_expert_gate:
        found.append(
            ExpertTensor(
                name="gated shared output",
                bytes_per_token=element * (model.hidden_size + 1) / split_hidden,
                kept_by=("mlp",),
            )
        )
    return found
