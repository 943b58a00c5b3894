"""What the package calls of Transformer Engine, in plain torch: for tests without it.

Signatures and meanings are those of version 2.12; what is not passed by the package is left out.
"""

import enum
import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.precision.te import Engine

BLOCK = 128


class DType(enum.Enum):
    """Transformer Engine's names of dtypes."""

    kBFloat16 = torch.bfloat16
    kFloat16 = torch.float16
    kFloat32 = torch.float32
    kFloat8E4M3 = torch.float8_e4m3fn
    kFloat8E5M2 = torch.float8_e5m2


class Float8Tensor:
    def __init__(
        self,
        *,
        data: Tensor | None,
        fp8_scale_inv: Tensor,
        fp8_dtype: DType,
        data_transpose: Tensor | None = None,
    ) -> None:
        assert data is None or data.dtype is torch.uint8
        assert fp8_scale_inv.shape == (1,)
        self._data, self._scale_inv, self._transpose = data, fp8_scale_inv, data_transpose
        self.fp8_dtype = fp8_dtype

    def dequantize(self) -> Tensor:
        assert self._data is not None
        return self._data.view(self.fp8_dtype.value).float() * self._scale_inv


class Float8Quantizer:
    def __init__(
        self,
        scale: Tensor,
        amax: Tensor,
        fp8_dtype: DType,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        assert scale.shape == amax.shape == (1,)
        self.scale, self.amax, self.dtype = scale, amax, fp8_dtype
        self.rowwise, self.columnwise = rowwise, columnwise

    def quantize_impl(self, x: Tensor) -> Float8Tensor:
        assert x.is_contiguous()
        assert len(x) % 16 == 0
        torch.maximum(self.amax, x.abs().max().float(), out=self.amax)
        limit = torch.finfo(self.dtype.value).max
        values = (x.float() * self.scale).clamp(-limit, limit).to(self.dtype.value)
        data = values.view(torch.uint8)
        return Float8Tensor(
            data=data if self.rowwise else None,
            fp8_scale_inv=self.scale.reciprocal(),
            fp8_dtype=self.dtype,
            data_transpose=data.t().contiguous() if self.columnwise else None,
        )


class OwnQuantizer:
    def __init__(
        self,
        fp8_dtype: DType,
        device: torch.device,
        *,
        rowwise: bool,
        columnwise: bool,
        force_pow_2_scales: bool,
    ) -> None:
        assert force_pow_2_scales
        self.dtype, self.sides = fp8_dtype, dict(rowwise=rowwise, columnwise=columnwise)

    def quantize_impl(self, x: Tensor) -> Float8Tensor:
        largest = x.abs().max().float().reshape(1)
        limit = torch.finfo(self.dtype.value).max
        scale = torch.exp2(torch.floor(torch.log2(limit / largest)))
        return Float8Quantizer(scale, largest, self.dtype, **self.sides).quantize_impl(x)


class BlockTensor:
    def __init__(
        self,
        *,
        rowwise_data: Tensor | None,
        rowwise_scale_inv: Tensor | None,
        columnwise_data: Tensor | None,
        columnwise_scale_inv: Tensor | None,
        fp8_dtype: DType,
        quantizer: Any,
        is_2D_scaled: bool,
    ) -> None:
        self._rowwise_data, self._rowwise_scale_inv = rowwise_data, rowwise_scale_inv
        self._columnwise_data, self._columnwise_scale_inv = columnwise_data, columnwise_scale_inv
        self.fp8_dtype, self.square = fp8_dtype, is_2D_scaled

    def dequantize(self) -> Tensor:
        assert self._rowwise_data is not None
        assert self._rowwise_scale_inv is not None
        rows, columns = self._rowwise_data.shape
        scale = self._rowwise_scale_inv
        if self.square:
            scale = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        else:
            assert scale.shape == (math.ceil(columns / BLOCK), rows + -rows % 4)
            scale = scale.t().repeat_interleave(BLOCK, 1)
        values = self._rowwise_data.view(self.fp8_dtype.value).float()
        return values * scale[:rows, :columns]


class BlockQuantizer:
    def __init__(
        self, fp8_dtype: DType, *, rowwise: bool, columnwise: bool, block_scaling_dim: int = 2
    ) -> None:
        self.dtype, self.height = fp8_dtype, BLOCK if block_scaling_dim == 2 else 1
        self.sides = rowwise, columnwise

    def quantize_impl(self, x: Tensor) -> BlockTensor:
        sides = [
            self._quantize(side) if wanted else (None, None)
            for side, wanted in zip((x, x.t()), self.sides, strict=True)
        ]
        return BlockTensor(
            rowwise_data=sides[0][0],
            rowwise_scale_inv=sides[0][1],
            columnwise_data=sides[1][0],
            columnwise_scale_inv=sides[1][1],
            fp8_dtype=self.dtype,
            quantizer=self,
            is_2D_scaled=self.height > 1,
        )

    def _quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns = x.shape
        padded = torch.nn.functional.pad(x.float(), (0, -columns % BLOCK, 0, -rows % self.height))
        blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, self.height))
        largest = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp(min=1e-30)
        limit = torch.finfo(self.dtype.value).max
        scale = torch.exp2(torch.floor(torch.log2(limit / largest)))
        values = (blocks * scale).flatten(2).flatten(0, 1)[:rows, :columns]
        inverse = scale.reciprocal()[:, 0, :, 0]  # (rows / height, columns / BLOCK)
        inverse = inverse if self.height > 1 else inverse.t()
        inverse = torch.nn.functional.pad(inverse, (0, -inverse.shape[1] % 4))
        return values.to(self.dtype.value).contiguous().view(torch.uint8), inverse


def general_gemm(
    A: Any,
    B: Any,
    out_dtype: torch.dtype,
    *,
    layout: str,
    bias: Tensor | None,
    out: Tensor | None,
    accumulate: bool,
    use_split_accumulator: bool,
) -> tuple[Tensor, None, None, None]:
    a, b = (x if isinstance(x, Tensor) else x.dequantize() for x in (A, B))
    assert a.is_contiguous()
    assert b.is_contiguous()
    wide = torch.promote_types(a.dtype, torch.float32)
    a, b = a.to(wide), b.to(wide)
    result = (b.t() if layout[1] == "T" else b) @ (a.t() if layout[0] == "T" else a)
    result = result if bias is None else result + bias
    if out is None:
        return result.to(out_dtype), None, None, None
    assert out.dtype is out_dtype
    out.copy_(out + result if accumulate else result)
    return out, None, None, None


def rmsnorm_fwd(
    x: Tensor,
    weight: Tensor,
    epsilon: float,
    out: None,
    cast: None,
    dtype: Any,
    margin: int,
    zero: bool,
) -> tuple[Tensor, None, Tensor]:
    inverse = (x.double().square().mean(-1) + epsilon).rsqrt()
    factor = weight.double() + (1 if zero else 0)
    return (x * inverse[:, None] * factor).to(x.dtype), None, inverse.float()


def rmsnorm_bwd(
    grad: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, margin: int, zero: bool
) -> tuple[Tensor, Tensor]:
    factor = weight + (1 if zero else 0)
    normed, scaled = x * inverse[:, None], grad * factor
    mean = (normed * scaled).mean(-1, keepdim=True)
    return (scaled - normed * mean) * inverse[:, None], (grad * normed).sum(0)


def layernorm_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    epsilon: float,
    out: None,
    cast: None,
    dtype: Any,
    margin: int,
    zero: bool,
) -> list[Tensor]:
    mean = x.mean(-1)
    inverse = (x.var(-1, unbiased=False) + epsilon).rsqrt()
    return [(x - mean[:, None]) * inverse[:, None] * weight + bias, mean, inverse]


def layernorm_bwd(
    grad: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor, margin: int, zero: bool
) -> list[Tensor]:
    normed, scaled = (x - mean[:, None]) * inverse[:, None], grad * weight
    parts = scaled - scaled.mean(-1, keepdim=True)
    parts = parts - normed * (scaled * normed).mean(-1, keepdim=True)
    return [parts * inverse[:, None], (grad * normed).sum(0), grad.sum(0)]


def _probabilities(
    query: Tensor, key: Tensor, ends: Tensor, scale: float, window: tuple[int, int]
) -> Tensor:
    """(T, N, D), (T, N, D) of sequences one after the other -> (N, T, T)."""
    place = torch.arange(len(query))
    sequence = torch.bucketize(place, ends[1:].long(), right=True)
    distance = place[:, None] - place[None, :]
    seen = (sequence[:, None] == sequence[None, :]) & (distance >= 0)
    if window[0] >= 0:
        seen &= distance <= window[0]
    scores = torch.einsum("qnd,knd->nqk", query, key) * scale
    return scores.masked_fill(~seen, -torch.inf).softmax(-1)


def _flat(x: Tensor, heads: int) -> Tensor:
    """(S, B, G, D) or (T, G, D) -> (B * S, N, D)."""
    x = x if x.dim() == 3 else x.transpose(0, 1).flatten(0, 1)
    return x.repeat_interleave(heads // x.shape[1], 1)


def _shaped(x: Tensor, like: Tensor) -> Tensor:
    """(B * S, N, D) -> as `like`, summed over the heads of a group."""
    x = x.unflatten(1, (like.shape[-2], -1)).sum(2)
    return x if like.dim() == 3 else x.unflatten(0, (like.shape[1], -1)).transpose(0, 1)


def fused_attn_fwd(
    is_training: bool,
    max_q: int,
    max_kv: int,
    ends_q: Tensor,
    ends_kv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fake_dtype: torch.dtype,
    backend: str,
    *,
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    attn_scale: float,
    qkv_layout: str,
    attn_mask_type: str,
    window_size: tuple[int, int],
    rng_gen: torch.Generator,
) -> tuple[Tensor, list[Tensor]]:
    assert is_training
    assert backend == "arbitrary"
    assert ends_q.dtype is torch.int32
    packed = q.dim() == 3
    assert (qkv_layout, attn_mask_type) == (
        ("thd_thd_thd", "padding_causal") if packed else ("sbhd_sbhd_sbhd", "causal")
    )
    assert (cu_seqlens_q_padded is not None) == packed
    assert int(ends_q.diff().max()) <= max_q
    heads = q.shape[-2]
    query, key, value = (_flat(x, heads) for x in (q, k, v))
    weights = _probabilities(query, key, ends_q, attn_scale, window_size)
    out = _shaped(torch.einsum("nqk,knd->qnd", weights, value), q).contiguous()
    rows = (*q.shape[:2], 1) if packed else (q.shape[1], q.shape[2], q.shape[0], 1)
    return out, [q.new_zeros(rows, dtype=torch.float32), torch.zeros(2, dtype=torch.int64)]


def fused_attn_bwd(
    max_q: int,
    max_kv: int,
    ends_q: Tensor,
    ends_kv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    grad: Tensor,
    fake_dtype: torch.dtype,
    dtype: DType,
    kept: list[Tensor],
    backend: str,
    *,
    attn_scale: float,
    window_size: tuple[int, int],
    deterministic: bool,
    **layout: Any,
) -> tuple[Tensor, ...]:
    assert [x.dtype for x in kept] == [torch.float32, torch.int64]
    heads = q.shape[-2]
    query, key, value, dy = (_flat(x, heads) for x in (q, k, v, grad.view_as(q)))
    weights = _probabilities(query, key, ends_q, attn_scale, window_size)
    d_value = torch.einsum("nqk,qnd->knd", weights, dy)
    d_weights = torch.einsum("qnd,knd->nqk", dy, value)
    mean = (d_weights * weights).sum(-1, keepdim=True)
    d_scores = weights * (d_weights - mean) * attn_scale
    d_query = torch.einsum("nqk,knd->qnd", d_scores, key)
    d_key = torch.einsum("nqk,qnd->knd", d_scores, query)
    pairs = zip((d_query, d_key, d_value), (q, k, v), strict=True)
    return tuple(_shaped(x, like).contiguous() for x, like in pairs)


def engine() -> Engine:
    """The stand-in."""
    names = ("QKVLayout", "AttnBiasType", "AttnMaskType", "SoftmaxType")
    layouts = {"sbhd_sbhd_sbhd", "thd_thd_thd", "no_bias", "causal", "padding_causal", "vanilla"}
    enums: dict[str, Any] = {name: {layout: layout for layout in layouts} for name in names}
    kernels = SimpleNamespace(
        DType=DType,
        get_fused_attn_backend=lambda *args: "arbitrary",
        rmsnorm_fwd=rmsnorm_fwd,
        rmsnorm_bwd=rmsnorm_bwd,
        layernorm_fwd=layernorm_fwd,
        layernorm_bwd=layernorm_bwd,
    )
    return Engine(
        kernels=kernels,
        gemm=general_gemm,
        attention_forward=fused_attn_fwd,
        attention_backward=fused_attn_bwd,
        enums=SimpleNamespace(**enums, FusedAttnBackend={"F16_arbitrary_seqlen": "arbitrary"}),
        dtypes={dtype.value: dtype for dtype in DType},
        float8_quantizer=Float8Quantizer,
        own_quantizer=OwnQuantizer,
        float8_tensor=Float8Tensor,
        block_quantizer=BlockQuantizer,
        block_tensor=BlockTensor,
    )
