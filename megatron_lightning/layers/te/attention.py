"""cuDNN's fused attention through Transformer Engine: whole sequences, sliding windows and packed
documents.

What it has no kernel for goes to torch's kernels: dropped probabilities, sinks, capped scores, and
heads of unusual sizes. Under context parallelism the core is exchanged for ours.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.layers.attention import FusedAttention
from megatron_lightning.parallel.sequence import SequenceInfo
from megatron_lightning.precision import te

_WHOLE = "sbhd_sbhd_sbhd"
_PACKED = "thd_thd_thd"
_MASKS = {_WHOLE: "causal", _PACKED: "padding_causal"}
_MAX_HEAD_DIM = 128
_MIN_LENGTHS = 128
"""Longest documents are taken for powers of two from here: each new number costs a plan."""


@functools.lru_cache(maxsize=256)
def _kernel(
    dtype: torch.dtype,
    layout: str,
    heads: int,
    groups: int,
    length: int,
    head_dim: int,
    window: int,
    deterministic: bool,
) -> Any:
    """The back end's name for what takes these sizes. RuntimeError when nothing does."""
    engine = te.engine()
    enums, name = engine.enums, engine.dtypes[dtype]
    found = engine.kernels.get_fused_attn_backend(
        True,
        name,
        name,
        enums.QKVLayout[layout],
        enums.AttnBiasType["no_bias"],
        enums.AttnMaskType[_MASKS[layout]],
        enums.SoftmaxType["vanilla"],
        0.0,
        heads,
        groups,
        length,
        length,
        head_dim,
        head_dim,
        *_window(window),
        False,
        False,
        deterministic,
    )
    wanted = enums.FusedAttnBackend["F16_arbitrary_seqlen"]
    if found != wanted:
        raise RuntimeError(
            f"Transformer Engine has no fused attention for {heads} heads of {head_dim}, {groups}"
            f" groups, {length} tokens, window_size={window}, deterministic={deterministic} in"
            f" {dtype} ({layout}); use backend='torch'"
        )
    return wanted


def _window(size: int) -> tuple[int, int]:
    return (size - 1, 0) if size else (-1, 0)


def _choose(query: Tensor, key: Tensor, layout: str, length: int, window: int) -> Any:
    deterministic = torch.are_deterministic_algorithms_enabled()
    heads, head_dim = query.shape[-2:]
    groups = key.shape[-2]
    return _kernel(query.dtype, layout, heads, groups, length, head_dim, window, deterministic)


@functools.lru_cache(maxsize=64)
def _ends(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # a validation may ask first, and training keeps it
        return torch.tensor((0, *lengths)).cumsum(0).to(device, torch.int32)


@functools.lru_cache(maxsize=8)
def _generator(device: torch.device) -> torch.Generator:
    """A generator of its own: each call takes numbers from one, though nothing is dropped, and the
    masks of other layers must not depend on it.
    """
    return torch.Generator(device)


def _ends_of(query: Tensor, ends: Tensor | None, length: int) -> Tensor:
    return _ends((length,) * query.shape[1], query.device) if ends is None else ends


@torch.library.custom_op("megatron_lightning::te_attention", mutates_args=())
def te_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor | None,
    length: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Causal attention of (S, B, N, D), (S, B, G, D), (S, B, G, Dv), or without B of packed tokens
    -> (S, B, N, Dv) or packed, and the kernel's statistics of rows.

    `ends` (sequences + 1,) int32, of packed tokens: where each sequence begins, then the end.
    `length`: none has more.
    """
    layout = _PACKED if query.dim() == 3 else _WHOLE
    query, key, value = (x.contiguous() for x in (query, key, value))
    starts = _ends_of(query, ends, length)
    out, kept = te.engine().attention_forward(
        True,
        length,
        length,
        starts,
        starts,
        query,
        key,
        value,
        query.dtype,
        _choose(query, key, layout, length, window),
        cu_seqlens_q_padded=starts if layout == _PACKED else None,
        cu_seqlens_kv_padded=starts if layout == _PACKED else None,
        attn_scale=scale,
        qkv_layout=layout,
        attn_mask_type=_MASKS[layout],
        window_size=_window(window),
        rng_gen=_generator(query.device),
    )[:2]
    return out.view(*query.shape[:-1], value.shape[-1]), kept[0]


@te_attention.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor | None,
    length: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    rows = (query.shape[1], query.shape[2], query.shape[0]) if query.dim() == 4 else query.shape[:2]
    return out, query.new_empty((*rows, 1), dtype=torch.float32)


@torch.library.custom_op("megatron_lightning::te_attention_backward", mutates_args=())
def te_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    rows: Tensor,
    ends: Tensor | None,
    length: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    engine = te.engine()
    layout = _PACKED if query.dim() == 3 else _WHOLE
    query, key, value, grad = (x.contiguous() for x in (query, key, value, grad))
    starts = _ends_of(query, ends, length)
    unused = torch.empty(2, dtype=torch.int64, device=query.device)  # no dropout
    grads = engine.attention_backward(
        length,
        length,
        starts,
        starts,
        query,
        key,
        value,
        out,
        grad,
        grad.dtype,
        engine.dtypes[grad.dtype],
        [rows, unused],
        _choose(query, key, layout, length, window),
        cu_seqlens_q_padded=starts if layout == _PACKED else None,
        cu_seqlens_kv_padded=starts if layout == _PACKED else None,
        attn_scale=scale,
        qkv_layout=layout,
        attn_mask_type=_MASKS[layout],
        window_size=_window(window),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    d_query, d_key, d_value = grads[:3]
    return d_query.view_as(query), d_key.view_as(key), d_value.view_as(value)


@te_attention_backward.register_fake
def _(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    rows: Tensor,
    ends: Tensor | None,
    length: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.length, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, ends, out, rows = ctx.saved_tensors
    grads = te_attention_backward(
        grad, query, key, value, out, rows, ends, ctx.length, ctx.scale, ctx.window
    )
    return *grads, None, None, None, None


te_attention.register_autograd(_backward, setup_context=_keep)


class TEAttention(FusedAttention):
    """`FusedAttention` by Transformer Engine where that has a kernel."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sequence: SequenceInfo | None = None,
        *,
        rows: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `CoreAttention.forward`."""
        others = self.drops or self.score_cap or sinks is not None or rows is not None
        if others or not _fits(query, value):
            return super().forward(query, key, value, sequence, rows=rows, sinks=sinks)
        if sequence is not None:
            return _packed(self, query, key, value, sequence)
        length = query.shape[0]
        window = self.window_size if self.window_size < length else 0
        out, _ = te_attention(query, key, value, None, length, self.scale, window)
        return out.flatten(2)


def _fits(query: Tensor, value: Tensor) -> bool:
    """Whether there is a kernel: CUDA, 16 bits, heads of sizes that every version takes."""
    size = query.shape[-1]
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    return size == value.shape[-1] and size % 8 == 0 and size <= _MAX_HEAD_DIM


def _run_packed(
    core: TEAttention, query: Tensor, key: Tensor, value: Tensor, sequence: SequenceInfo
) -> Tensor:
    lengths, batch = sequence.flat, query.shape[1]
    longest = max(_MIN_LENGTHS, 1 << (max(lengths) - 1).bit_length())
    window = core.window_size if core.window_size < longest else 0
    query, key, value = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
    ends = _ends(lengths, query.device)
    out, _ = te_attention(query, key, value, ends, longest, core.scale, window)
    return out.unflatten(0, (batch, -1)).transpose(0, 1).flatten(2)


_packed: Any = torch.compiler.disable(_run_packed)  # lengths are the host's
