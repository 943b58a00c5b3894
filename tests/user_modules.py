"""Networks and LightningModules as users write them."""

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from megatron_lightning.config import (
    Gradient,
    ParallelPlan,
    Split,
    column,
    follows,
    replicated,
    row,
    vocabulary,
)
from megatron_lightning.layers import StagedNetwork

WIDTH, HEADS, VOCABULARY, LONGEST = 32, 4, 64, 64


class Attention(nn.Module):
    """Causal attention, (B, S, H) -> (B, S, H); rows of `qkv` are grouped by head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        heads = qkv.view(*qkv.shape[:2], -1, 3, WIDTH // HEADS).permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Decoder(StagedNetwork):
    """Batch-first language model; a tuple (hidden state, gate) passes from block to block."""

    layers_path = "blocks"

    def __init__(self, layers: int = 4, *, tied: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LONGEST, WIDTH)
        self.gate = nn.Linear(1, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def begin(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        share_of_even = (tokens % 2 == 0).float().mean(1, keepdim=True)[:, None]  # (B, 1, 1)
        gate = torch.sigmoid(self.gate(share_of_even.to(self.gate.weight.dtype)))  # (B, 1, H)
        return self.words(tokens) + self.positions(places), gate

    def apply_layer(
        self, name: str, layer: nn.Module, carried: Any, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        x, gate = carried
        return x + gate * (layer(x) - x), gate

    def finish(self, carried: Any, tokens: Tensor) -> Tensor:
        return self.head(self.norm(carried[0]))  # (B, S, V)


_SEQUENCE = replicated(Gradient.SEQUENCE)
BLOCK_SPLITS: dict[str, Split] = {
    "blocks.*.norm[12].*": _SEQUENCE,
    "blocks.*.attention.qkv.weight": column(),
    "blocks.*.attention.out.weight": row(),
    "blocks.*.attention.out.bias": _SEQUENCE,
    "blocks.*.up.weight": column(),
    "blocks.*.up.bias": follows(),
    "blocks.*.down.weight": row(),
    "blocks.*.down.bias": _SEQUENCE,
}


def decoder_plan(*, tied: bool = False) -> ParallelPlan:
    """How a `Decoder` is split and cut. A tied head is whole-gathered like the untied one."""
    splits = BLOCK_SPLITS | {
        "words.weight": vocabulary(),
        "positions.weight": _SEQUENCE,
        "gate.*": _SEQUENCE,
        "norm.*": _SEQUENCE,
        "head.weight": column(gather_output=True),
    }
    if tied:  # one parameter, one split: the whole table on every tensor rank
        splits |= {"words.weight": replicated(), "head.weight": replicated()}
    return ParallelPlan(
        splits=splits,
        layers="blocks",
        first=("words", "positions", "gate"),
        last=("norm", "head"),
        tied=(("words.weight", "head.weight"),) if tied else (),
        sequence_dim=1,
    )


class OwnTransformer(L.LightningModule):
    """Token mode; the network is built in `__init__` with real values."""

    def __init__(self, network: Callable[[], nn.Module] = Decoder, *, lr: float = 1e-3) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.net = network()
        self.lr = lr

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(mean loss of the tokens that count, their number)."""
        logits = self.net(batch["tokens"]).float()
        losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
        mask = batch["loss_mask"].flatten()
        return (losses * mask).sum() / mask.sum(), mask.sum()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss, count = self.losses(batch)
        self.log("train_loss", loss)
        return {"loss": loss, "num_tokens": count}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss, count = self.losses(batch)
        self.log("val_loss", loss)
        return {"val": loss, "num_tokens": count}

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        logits = self.net(batch["tokens"])
        return {"best": logits.argmax(-1), "size": [len(logits)]}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, betas=(0.9, 0.95))


class LateTransformer(OwnTransformer):
    """The network is built in `configure_model`, on the meta device."""

    def __init__(self, *, lr: float = 1e-3) -> None:
        L.LightningModule.__init__(self)
        self.net: nn.Module | None = None
        self.lr = lr

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta"):
                self.net = Decoder()


SEQUENTIAL = ParallelPlan(splits={"*": replicated()})


class SequentialModule(L.LightningModule):
    """A plain `nn.Sequential` classifier on tuple batches (x, y)."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.body = nn.Sequential(
                nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
            )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.body(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def pairs(count: int, seed: int = 3) -> list[tuple[Tensor, Tensor]]:
    """`count` samples (x (8,), class)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, generator=generator)
    return list(zip(x, x[:, :4].argmax(1), strict=True))


class Classifier(L.LightningModule):
    """Batch norm, a torchmetrics object, tuple batches; knows nothing of this package."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.body = nn.Sequential(
                nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)
            )
        self.accuracy = MulticlassAccuracy(4, average="micro")
        self.val_accuracy = MulticlassAccuracy(4, average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.body(x)
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        loss = F.cross_entropy(logits, y)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self.body(x)
        self.val_accuracy(logits, y)
        self.log_dict({"val_loss": F.cross_entropy(logits, y)}, sync_dist=True)
        self.log("val_accuracy", self.val_accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)
