"""What the MLP half of a layer with experts keeps for its backward pass (see `activations.py`).

Rows are tokens times the experts that each is sent to; it is assumed that all experts get the same
number. Dense layers: `mlp_activations.py`.
"""

from __future__ import annotations

from megatron_lightning.config.model import GPTConfig
from megatron_lightning.config.moe import expert_width
from megatron_lightning.config.saved_tensors import (
    ActivationSizes,
    SavedTensor,
    branch_norm_rows,
    dropout_mask,
    hidden_input,
    norm_rows,
)

INDEX_BYTES = 8


def expert_rows(model: GPTConfig, sizes: ActivationSizes) -> list[SavedTensor]:
    """Rows of one layer's half."""
    hidden = model.hidden_size / sizes.split_hidden
    return [
        hidden_input("hidden between", model, sizes, "pre_mlp_layernorm"),
        *norm_rows("pre_mlp_layernorm", model, sizes, hidden, 1 / sizes.split_hidden),
        *_layer_rows(model, sizes),
        *branch_norm_rows("post_mlp_layernorm", model, sizes),
        *dropout_mask("mlp_dropout", model, hidden),
    ]


def _layer_rows(model: GPTConfig, sizes: ActivationSizes) -> list[SavedTensor]:
    """Router, experts and shared expert."""
    element, split_hidden = sizes.bytes_per_element, sizes.split_hidden
    tensor_size, expert_tensor_size = sizes.tensor_parallel_size, sizes.expert_tensor_size
    moe = model.moe
    assert moe is not None
    hidden, width = model.hidden_size / split_hidden, expert_width(model)
    inner = moe.latent_size or model.hidden_size
    rows = moe.router_topk * expert_tensor_size / tensor_size
    columns = width / expert_tensor_size
    router = 8 if moe.router_dtype == "float64" else 4
    halves = 2 if model.gated_linear_unit else 1
    remote = sizes.expert_size * expert_tensor_size > 1
    travel = moe.router_topk / tensor_size + (rows if remote else 0)
    numbers = (moe.num_experts * router + moe.router_topk * (INDEX_BYTES + router)) / split_hidden
    readers = ("mlp.shared_experts.linear_fc1",) if moe.shared_expert_ffn_hidden_size else ()
    readers += ("mlp.shared_expert_gate",) if moe.shared_expert_gate else ()
    readers += ("mlp.latent_down",) if moe.latent_size else ()
    found = [
        SavedTensor(
            name="normed MLP input",
            bytes_per_token=element * hidden,
            kept_by=("mlp.router", *readers),
            enters=("mlp", "mlp.router", "mlp.shared_experts"),
        ),
        SavedTensor(name="scores", bytes_per_token=numbers, kept_by=("mlp.router",)),
        SavedTensor(
            name="orders of rows", bytes_per_token=2 * INDEX_BYTES * travel, kept_by=("mlp",)
        ),
        *_of_rows(element, rows, rows * columns, inner, halves),
    ]
    if moe.latent_size:
        found.append(
            SavedTensor(
                name="latent output",
                bytes_per_token=element * moe.latent_size / split_hidden,
                kept_by=("mlp.latent_up",),
            )
        )
    return found + _shared(model, element, split_hidden, tensor_size)


def _of_rows(
    element: int, rows: float, product: float, inner: int, halves: int
) -> list[SavedTensor]:
    """What the experts keep of `rows` rows a token."""
    return [
        SavedTensor(
            name="rows of experts",
            bytes_per_token=element * rows * inner,
            kept_by=("mlp.experts.linear_fc1",),
            enters=("mlp.experts",),
        ),
        SavedTensor(
            name="weights of rows",
            bytes_per_token=4 * rows,
            kept_by=("mlp.experts",),
            enters=("mlp.experts",),
        ),
        SavedTensor(
            name="inside of experts",
            bytes_per_token=element * product * halves,
            kept_by=("mlp.experts",),
        ),
        SavedTensor(
            name="product of experts",
            bytes_per_token=element * product,
            kept_by=("mlp.experts.linear_fc2",),
        ),
    ]


def _shared(
    model: GPTConfig, element: int, split_hidden: int, tensor_size: int
) -> list[SavedTensor]:
    moe = model.moe
    assert moe is not None
    if not moe.shared_expert_ffn_hidden_size:
        return []
    width = element * moe.shared_expert_ffn_hidden_size / tensor_size
    halves = 2 if model.gated_linear_unit else 1
    found = [
        SavedTensor(
            name="inside of the shared expert",
            bytes_per_token=width * halves,
            kept_by=("mlp.shared_experts",),
        ),
        SavedTensor(
            name="product of the shared expert",
            bytes_per_token=width,
            kept_by=("mlp.shared_experts.linear_fc2",),
            enters=("mlp.shared_experts.linear_fc2",),
        ),
    ]
    if moe.shared_expert_gate:
        found.append(
            SavedTensor(
                name="gated shared output",
                bytes_per_token=element * (model.hidden_size + 1) / split_hidden,
                kept_by=("mlp",),
            )
        )
    return found
