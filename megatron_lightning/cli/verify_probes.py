"""What `verify` keeps of a rank's tensors: sketches of activations, hashes of samples, boxes of
weights; and which modules it watches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from megatron_lightning.checkpoint import BoxedTensor
from megatron_lightning.config.plan import canonical_name
from megatron_lightning.layers.loss import CrossEntropy
from megatron_lightning.parallel.checks import tensor_hash
from megatron_lightning.runtime.boxes import box_of
from megatron_lightning.strategies import MegatronStrategy

SKETCH_WIDTH = 4
CORE = "core_attention"
FEATURE_BLOCK = 16
"""Features of an attention output that are kept as one number; heads are made of whole blocks."""


def watched_modules(
    strategy: MegatronStrategy, module: LightningModule
) -> Iterator[tuple[str, nn.Module]]:
    """Modules of the plan by canonical name: first and last ones, layers, and the layers' parts."""
    plan = strategy.parallel_model.plan
    named = {canonical_name(f"{name}."): m for name, m in module.named_modules() if name}
    if plan is None:
        return
    ends = [f".{path}." for path in (*plan.first, *plan.last)]
    layer = f".{plan.layers}." if plan.layers else None
    for dotted, found in named.items():
        name = dotted.rstrip(".")
        is_end = any(f".{dotted}".endswith(end) for end in ends)
        inside = layer is not None and layer in f".{dotted}"
        depth = f".{dotted}".split(layer)[1].count(".") if inside and layer else 0
        is_part = inside and depth <= 2 and next(found.parameters(), None) is not None
        is_core = inside and name.endswith(CORE)
        if is_end or is_part or is_core or isinstance(found, CrossEntropy):
            yield name, found


def sketch(values: Tensor) -> Tensor:
    """(..., H) -> (..., SKETCH_WIDTH): products with fixed random vectors, of which a change of any
    element changes all.
    """
    generator = torch.Generator().manual_seed(values.shape[-1])
    vectors = torch.randn(values.shape[-1], SKETCH_WIDTH, generator=generator)
    return (values.float() @ vectors.to(values.device)) / values.shape[-1] ** 0.5


def block_sketch(values: Tensor) -> Tensor:
    """(..., H) -> (..., H / FEATURE_BLOCK): one product for each block of features."""
    generator = torch.Generator().manual_seed(FEATURE_BLOCK)
    vector = torch.randn(FEATURE_BLOCK, generator=generator).to(values.device)
    return values.unflatten(-1, (-1, FEATURE_BLOCK)).float() @ vector / FEATURE_BLOCK**0.5


def sample_hashes(batch: Any) -> dict[str, list[int]]:
    """Per field a hash of each sample."""
    if not isinstance(batch, Mapping):
        return {}
    return {
        str(name): [int(tensor_hash(row)) for row in value.cpu()]
        for name, value in batch.items()
        if isinstance(value, Tensor) and value.dim() > 1
    }


def weights(strategy: MegatronStrategy) -> dict[str, Any]:
    """This rank's boxes of all weights."""
    model = strategy.parallel_model
    values = {n: p.detach() for n, p in model.parameters.items()}
    return boxes({n: BoxedTensor.of(box_of(v, model.table[n])) for n, v in values.items()})


def masters(strategy: MegatronStrategy) -> dict[str, Any]:
    """This rank's boxes of what the optimizers update: fp32 masters, or the weights themselves."""
    update = strategy.update
    assert update is not None
    updated = {name: value.detach() for name, value in update.updated().items()}
    return boxes({n: BoxedTensor.of(update.box(n, v)) for n, v in updated.items()})


def boxes(tensors: Mapping[str, BoxedTensor]) -> dict[str, Any]:
    """{name: (global shape, [(offsets, local box), ...])}, float32 on the CPU."""
    return {
        name: (
            tuple(tensor.shape),
            [
                (tuple(box.offsets), view.detach().float().cpu().clone())
                for box, view in zip(tensor.boxes, tensor.views, strict=True)
            ],
        )
        for name, tensor in tensors.items()
    }
