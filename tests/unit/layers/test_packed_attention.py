"""Packed documents on one rank: what each token sees is what it sees in its document alone."""

import pytest
import torch
from torch import Tensor

from megatron_lightning.layers import (
    Dropout,
    FusedAttention,
    PackedSequences,
    ReferenceAttention,
    SequenceInfo,
    TorchBackend,
)
from megatron_lightning.models.gpt import GPTModel
from megatron_lightning.models.gpt_network import GPTNetwork
from megatron_lightning.parallel.core_attention import CoreAttention
from megatron_lightning.parallel.streams import Layout
from tests.layout_runs import tiny_config

LENGTHS = ((3, 1, 8), (12,))
CORES = [FusedAttention, ReferenceAttention]


def made(kind: type[CoreAttention], window: int = 0, dropout: float = 0.0) -> CoreAttention:
    return kind(scale=0.25, window_size=window, dropout=Dropout(dropout, Layout.HEADS))


def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(12, 2, heads, 16, generator=generator) for heads in (4, 2, 2)]


@pytest.mark.parametrize("kind", CORES)
@pytest.mark.parametrize("window", [0, 4])
def test_each_document_alone(kind: type[CoreAttention], window: int) -> None:
    packed = [x.requires_grad_() for x in tensors()]
    alone = [x.requires_grad_() for x in tensors()]
    grad = torch.randn(12, 2, 64, generator=torch.Generator().manual_seed(2))
    output = made(kind, window)(*packed, SequenceInfo(LENGTHS))
    output.backward(grad)
    for sample, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            rows = slice(start, start + length)
            one = made(kind, window)(*(x[rows, sample : sample + 1] for x in alone))
            torch.testing.assert_close(output[rows, sample : sample + 1], one)
            one.backward(grad[rows, sample : sample + 1])
            start += length
    for got, want in zip(packed, alone, strict=True):
        torch.testing.assert_close(got.grad, want.grad)


@pytest.mark.parametrize("kind", CORES)
@pytest.mark.parametrize("sequence", [None, SequenceInfo(LENGTHS)])
def test_queries_that_are_some_rows(
    kind: type[CoreAttention], sequence: SequenceInfo | None
) -> None:
    query, key, value = tensors()
    rows = torch.tensor([[0, 5, 11], [2, 3, 4]])
    whole = made(kind, 4)(query, key, value, sequence)
    some = torch.stack([query[row, sample] for sample, row in enumerate(rows)], dim=1)
    found = made(kind, 4)(some, key, value, sequence, rows=rows)
    for sample, row in enumerate(rows):
        torch.testing.assert_close(found[:, sample], whole[row, sample])


def test_packed_dropout_stays_in_the_document() -> None:
    query, key, value = tensors()
    core = made(FusedAttention, dropout=0.5).train()
    value[:3, 0] = 0.0
    output = core(query, key, value, SequenceInfo(LENGTHS))
    assert torch.count_nonzero(output[:3, 0]) == 0
    assert torch.count_nonzero(output[4:, 0]) > 0


@pytest.mark.parametrize("attention", ["fused", "reference"])
@pytest.mark.parametrize("position_embedding", ["rope", "learned"])
def test_network_gives_the_logits_of_each_document(attention, position_embedding) -> None:
    config = tiny_config(position_embedding=position_embedding, num_layers=2)
    network = GPTNetwork(config, TorchBackend(attention=attention))
    with torch.no_grad():
        for index, parameter in enumerate(network.parameters()):
            parameter.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(index))
        tokens = torch.randint(257, (2, 12), generator=torch.Generator().manual_seed(9))
        packed = network(tokens, cu_seqlens=SequenceInfo(LENGTHS).cu_seqlens())
        for sample, lengths in enumerate(LENGTHS):
            start = 0
            for length in lengths:
                alone = network(tokens[sample : sample + 1, start : start + length])
                torch.testing.assert_close(
                    packed[start : start + length, sample : sample + 1], alone, rtol=1e-4, atol=1e-5
                )
                start += length


def test_lengths_are_read_once_for_a_micro_batch() -> None:
    packed = PackedSequences()
    cu_seqlens = SequenceInfo(LENGTHS).cu_seqlens()
    first = packed(cu_seqlens)
    assert first is packed(cu_seqlens)
    assert first is not packed(cu_seqlens.clone())
    cu_seqlens[0, 1] = 2
    changed = packed(cu_seqlens)
    assert changed is not None
    assert changed.lengths == ((2, 2, 8), (12,))
    assert packed(None) is None


def test_compiled_once_for_all_lengths() -> None:
    # Torch 2.11 compiles anew for other values in a frozen dataclass, later ones only if it's read.
    assert not torch._dynamo.utils.is_frozen_dataclass(SequenceInfo(LENGTHS))
    config = tiny_config()
    network = GPTNetwork(config, TorchBackend())
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    for layer in network.decoder.layers.values():
        layer.compile(backend="eager")
    tokens = torch.arange(24).view(2, 12)
    for step, rows in enumerate([LENGTHS, ((5, 7), (2, 10)), ((1, 1, 10), (6, 3, 3))]):
        cu_seqlens = SequenceInfo(rows).cu_seqlens()
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            network(tokens, labels=tokens, cu_seqlens=cu_seqlens).sum().backward()


def test_lengths_stay_on_the_host() -> None:
    model = GPTModel(tiny_config())
    batch = {"tokens": torch.zeros(2, 12), "cu_seqlens": SequenceInfo(LENGTHS).cu_seqlens()}
    moved = model.transfer_batch_to_device(batch, torch.device("meta"), 0)
    assert moved["tokens"].is_meta
    assert moved["cu_seqlens"] is batch["cu_seqlens"]
    moved = model.transfer_batch_to_device([batch["tokens"]], torch.device("meta"), 0)
    assert moved[0].is_meta
