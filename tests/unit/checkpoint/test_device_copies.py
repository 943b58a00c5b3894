"""How tensors are cut into pieces for their copies from a GPU; the copies themselves are tested in
tests/gpu/test_async_checkpoint.py.
"""

import torch

from megatron_lightning.checkpoint.device_copies import pieces


def test_pieces_are_every_element_once_and_small() -> None:
    sources = [torch.randn(7, 5), torch.randn(3), torch.randn(()), torch.empty(0, 4)]
    sources.append(torch.randn(64).to(torch.bfloat16))
    targets = [torch.full_like(source, 9.0) for source in sources]
    parts = list(pieces(list(zip(targets, sources, strict=True)), piece_bytes=32))
    assert max(source.nbytes for _, source in parts) == 32
    assert sum(source.numel() for _, source in parts) == sum(s.numel() for s in sources)
    for target, source in parts:
        target.copy_(source)
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source)


def test_a_tensor_with_gaps_stays_whole() -> None:
    source, target = torch.randn(6, 8)[:, :3], torch.zeros(6, 3)
    assert [part.shape for _, part in pieces([(target, source)], piece_bytes=8)] == [(6, 3)]
    whole = torch.zeros(6, 3)
    assert len(list(pieces([(target, whole)], piece_bytes=8))) == 9


def test_a_piece_holds_at_least_one_element() -> None:
    source = torch.randn(3, dtype=torch.float64)
    assert [part.numel() for _, part in pieces([(source.clone(), source)], piece_bytes=4)] == [
        1
    ] * 3
