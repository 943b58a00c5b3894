"""Networks and batches of the benchmarks of a training step; see `train_step.py`."""

import math
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from torch import Tensor

from megatron_lightning.config import MoEConfig

SHAPES: dict[str, dict[str, Any]] = {
    "a": dict(
        layers=16,
        hidden=2048,
        ffn=8192,
        heads=32,
        groups=8,
        vocab=32768,
        seq=4096,
        micro=4,
        accumulate=2,
    ),
    "b": dict(
        layers=8,
        hidden=4096,
        ffn=14336,
        heads=32,
        groups=8,
        vocab=128256,
        seq=8192,
        micro=1,
        accumulate=2,
    ),
    "c": dict(
        layers=8,
        hidden=2048,
        ffn=6144,
        heads=32,
        groups=4,
        head_dim=128,
        vocab=151936,
        seq=4096,
        micro=2,
        accumulate=2,
        qk_layernorm=True,
        rope=1e6,
        experts=MoEConfig(
            num_experts=128,
            router_topk=8,
            ffn_hidden_size=768,
            aux_loss_coeff=1e-3,
        ),
    ),
    "tiny": dict(  # anywhere: does it run?
        layers=4,
        hidden=64,
        ffn=128,
        heads=4,
        groups=2,
        vocab=256,
        seq=64,
        micro=2,
        accumulate=2,
    ),
    "s": dict(  # bound by the host that launches kernels
        layers=8,
        hidden=1024,
        ffn=4096,
        heads=16,
        groups=4,
        vocab=8192,
        seq=1024,
        micro=1,
        accumulate=2,
    ),
}


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def document_starts(rows: int, seq: int, seed: int, mean: int = 1024) -> Tensor:
    """Where documents of log-normal lengths begin in samples that are full of them, then `seq`:
    (rows, documents + 1), what is over filled with `seq`. Documents end where samples do.
    """
    generator = torch.Generator().manual_seed(seed)
    starts: list[list[int]] = []
    for _ in range(rows):
        begins = [0]
        while begins[-1] < seq:
            drawn = mean * math.exp(0.9 * float(torch.randn((), generator=generator)) - 0.4)
            begins.append(min(seq, begins[-1] + max(16, int(drawn))))
        starts.append(begins)
    longest = max(map(len, starts))
    return torch.tensor(
        [[*begins, *[seq] * (longest - len(begins))] for begins in starts], dtype=torch.int32
    )


class RandomTokens(L.LightningDataModule):
    """A few fixed random batches over and over; `packed`: each sample full of short documents."""

    def __init__(self, shape: dict[str, Any], batches: int, packed: bool = False) -> None:
        super().__init__()
        self.shape, self.batches, self.packed = shape, batches, packed
        self.micro_batch_size = shape["micro"]

    def train_dataloader(self) -> "RandomTokens":
        return self

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        rows = self.shape["micro"] * self.shape["accumulate"]
        generator = torch.Generator().manual_seed(0)
        size = (4, rows, self.shape["seq"] + 1)
        tokens = torch.randint(0, self.shape["vocab"], size, generator=generator)
        for index in range(self.batches):
            row = tokens[index % 4]
            mask = torch.ones(rows, self.shape["seq"])
            yield {
                "tokens": row[:, :-1].contiguous(),
                "labels": row[:, 1:].contiguous(),
                "loss_mask": mask,
                **self._documents(rows, index),
            }

    def _documents(self, rows: int, batch: int) -> dict[str, Tensor]:
        """Others in every batch."""
        if not self.packed:
            return {}
        return {"cu_seqlens": document_starts(rows, self.shape["seq"], 5 + batch)}
