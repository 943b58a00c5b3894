"""Samplers that ranks share, and fingerprints of batches."""

import torch
from torch.utils.data import RandomSampler

from megatron_lightning.strategies.loaders import SharedSampler, fingerprint


def test_fingerprints_tell_batches_apart() -> None:
    x = torch.arange(12).reshape(3, 4)
    batch = {"tokens": x, "mask": torch.ones(3, 4), "name": "a"}
    assert fingerprint(batch) == fingerprint({**batch, "tokens": x.clone()})
    others = [
        {**batch, "tokens": x.flip(0)},  # the same samples in another order
        {**batch, "tokens": x + 1},
        {**batch, "mask": torch.ones(3, 4) * 2},
        {**batch, "mask": torch.full((3, 4), 1 + 1e-7)},
        {**batch, "tokens": x.bool()},
    ]
    assert fingerprint(batch) not in {fingerprint(other) for other in others}


def test_fingerprints_of_what_holds_no_numbers() -> None:
    assert fingerprint(None) == fingerprint([]) == fingerprint(torch.empty(0)) == 0


def test_large_tensors_are_looked_at_in_places() -> None:
    large = torch.zeros(1_000_000, dtype=torch.bfloat16)
    other = large.clone()
    other[::2] = 1
    assert fingerprint(large) != fingerprint(other)


def test_a_shared_sampler_takes_over_an_order_and_forwards_the_rest() -> None:
    sampler = RandomSampler(range(5))
    drawn: list[list[int]] = []

    def share(order: list[int]) -> list[int]:
        drawn.append(sorted(order))
        return [4, 3, 2, 1, 0]

    shared = SharedSampler(sampler, share)
    assert list(shared) == [4, 3, 2, 1, 0]
    assert drawn == [[0, 1, 2, 3, 4]]
    assert len(shared) == 5
    assert shared.num_samples == 5
    assert not hasattr(shared, "set_epoch")
