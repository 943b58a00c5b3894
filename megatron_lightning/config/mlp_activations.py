"""What the MLP half of a dense layer keeps for its backward pass (see `activations.py`); that of a
layer with experts: `expert_activations.py`.
"""

from __future__ import annotations

from megatron_lightning.config.model import GPTConfig
from megatron_lightning.config.saved_tensors import (
    ActivationSizes,
    SavedTensor,
    branch_norm_rows,
    dropout_mask,
    hidden_input,
    norm_rows,
)


def mlp_rows(model: GPTConfig, sizes: ActivationSizes) -> list[SavedTensor]:
    """Rows of one layer's half."""
    element = sizes.bytes_per_element
    hidden = model.hidden_size / sizes.split_hidden
    width = element * model.ffn_hidden_size / sizes.tensor_parallel_size
    gated = model.gated_linear_unit
    in_product = gated and model.activation == "silu" and model.clamp is None
    by_output = not gated and model.activation == "relu" and not sizes.compiled
    in_activation = ("mlp.activation",) if by_output else ()
    rows = [
        hidden_input("hidden between", model, sizes, "pre_mlp_layernorm"),
        *norm_rows("pre_mlp_layernorm", model, sizes, hidden, 1 / sizes.split_hidden),
        SavedTensor(
            name="normed MLP input",
            bytes_per_token=element * hidden,
            kept_by=("mlp.linear_fc1",),
            enters=("mlp", "mlp.linear_fc1"),
        ),
        SavedTensor(
            name="MLP product",
            bytes_per_token=width,
            kept_by=("mlp.linear_fc2", *in_activation),
            enters=("mlp.linear_fc2",),
            made_by="mlp.activation" if in_product else None,
        ),
    ]
    inner = 2 if gated else 0 if by_output else 1
    rows.append(SavedTensor(name="MLP inner", bytes_per_token=width * inner, kept_by=("mlp",)))
    between = gated + (gated and model.activation == "squared_relu")  # gate, and what it came from
    if model.activation == "silu":
        between = 0  # `layers.gated_silu`, `layers.clamped_gate`
    rows.append(
        SavedTensor(
            name="activated gate",
            bytes_per_token=width * between,
            kept_by=("mlp.activation",),
            pointwise=True,
        )
    )
    rows += branch_norm_rows("post_mlp_layernorm", model, sizes)
    return rows + dropout_mask("mlp_dropout", model, hidden)
