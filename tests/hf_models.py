"""Reference models of transformers, and what this package computes with them in any layout."""

import json
import shutil
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_lightning.bridge import from_hf
from megatron_lightning.layers.moe import MoELayer
from megatron_lightning.models import GPTModel
from tests.layout_runs import make_strategy

LOCAL = Path(__file__).parent / "data" / "hf"
GOLDEN = Path(__file__).parents[2] / "shared" / "golden" / "models"
GOLDEN_NAMES = (
    "deepseek_v3",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_oss",
    "llama",
    "mixtral",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
)
LOCAL_NAMES = (*GOLDEN_NAMES, "mistral")
MOE_NAMES = ("deepseek_v3", "gpt_oss", "mixtral", "qwen3_moe")
"""Those with experts."""
LOGITS, TRAINING = 1e-4, 1e-3
"""Tolerances that the rounding of float32 asks for (see the README of the recorded models)."""


@dataclass(frozen=True)
class Recorded:
    """What transformers computes."""

    folder: Path
    arrays: dict[str, Tensor]
    losses: list[float]

    @classmethod
    def read(cls, folder: Path) -> "Recorded":
        arrays = {k: torch.from_numpy(v) for k, v in np.load(folder / "golden.npz").items()}
        meta = json.loads((folder / "meta.json").read_text())
        return cls(folder, arrays, meta["train"]["losses"])

    def batch(self) -> dict[str, Tensor]:
        """The recorded batch with shifted labels."""
        ids, labels = self.arrays["input_ids"], self.arrays["labels"]
        shifted = torch.full_like(labels, -100)
        shifted[:, :-1] = labels[:, 1:]
        return {"tokens": ids, "labels": shifted, "loss_mask": (shifted >= 0).float()}

    def greedy(self) -> dict[str, Tensor]:
        """The greedy continuation, twice (a pipeline wants two rows)."""
        return {"tokens": self.arrays["greedy_ids"].repeat(2, 1)}


def legacy_copy(folder: Path, target: Path) -> Path:
    """The model with its config in the spelling of transformers 4.x."""
    target.mkdir(parents=True)
    shutil.copyfile(folder / "config_legacy.json", target / "config.json")
    shutil.copyfile(folder / "model.safetensors", target / "model.safetensors")
    return target


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a model folder, by the library that others read it with."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_same_tensors(folder: Path, source: Path) -> None:
    """Names, dtypes, shapes and bytes."""
    ours, theirs = tensors_of(folder), tensors_of(source)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


class PlainAdamW(GPTModel):
    """The optimizer of the recorded runs."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(
            self.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
        )


class Batches:
    """Given batches, the same for every data rank. Not a DataLoader, so Lightning leaves it
    alone.
    """

    def __init__(self, *batches: dict[str, Tensor]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.batches)


class Watch(L.Callback):
    """Keeps the input of each layer that is here, the output of the final norm, and losses."""

    def __init__(self) -> None:
        self.hidden: dict[int, list[Tensor]] = defaultdict(list)
        self.routers: dict[int, list[Tensor]] = defaultdict(list)
        self.losses: list[float] = []
        self._handles: list[Any] = []

    def on_predict_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if batch_idx:
            self.remove()
            return
        for network in trainer.strategy.parallel_model.networks:
            for number, layer in network.get_submodule("decoder.layers").named_children():
                self._handles.append(layer.register_forward_pre_hook(self._keep(int(number))))
                if isinstance(layer.mlp, MoELayer):
                    self._handles.append(WatchedRouter(layer.mlp.router, self.routers[int(number)]))
            norm = getattr(network.decoder, "final_layernorm", None)
            if norm is not None:
                self._handles.append(norm.register_forward_hook(self._keep_last(module.config)))

    def _keep(self, number: int) -> Any:
        return lambda _, args: self.hidden[number].append(args[0].detach())

    def _keep_last(self, config: Any) -> Any:
        return lambda _, args, out: self.hidden[config.num_layers].append(out.detach())

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(float(outputs["loss"]))

    def states(self) -> dict[int, Tensor]:
        """Number of the layer -> (B, S, H)."""
        return by_layer(self.hidden)

    def router_logits(self) -> dict[int, Tensor]:
        """Number of the layer -> (B, S, E)."""
        return by_layer(self.routers)


class WatchedRouter:
    """Keeps the logits that a router makes, (S, B, E), until it is removed."""

    def __init__(self, router: Any, kept: list[Tensor]) -> None:
        self.router, logits = router, router.logits

        def watched(hidden: Tensor) -> Tensor:
            found = logits(hidden)
            kept.append(found.detach().unflatten(0, hidden.shape[:2]))
            return found

        router.logits = watched

    def remove(self) -> None:
        del self.router.logits


def by_layer(parts: dict[int, list[Tensor]]) -> dict[int, Tensor]:
    return {n: torch.cat(some, dim=1).transpose(0, 1) for n, some in parts.items()}


def use(
    rank: int, world_size: int, layout: dict[str, Any], folders: list[str], out: str
) -> dict[str, dict[str, Any]]:
    """Import each model in this layout, predict, export, train, export again."""
    return {folder: use_one(world_size, layout, Path(folder), Path(out)) for folder in folders}


def use_one(world_size: int, layout: dict[str, Any], folder: Path, out: Path) -> dict[str, Any]:
    recorded, watch = Recorded.read(folder), Watch()
    steps = len(recorded.losses)
    model = from_hf(folder, model_class=PlainAdamW)
    trainer = L.Trainer(
        strategy=make_strategy(layout),
        accelerator="cpu",
        devices=world_size,
        max_steps=steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[watch],
    )
    logits, greedy = trainer.predict(model, Batches(recorded.batch(), recorded.greedy()))  # type: ignore[misc]
    found = {"logits": logits, "greedy": greedy[0, :-1].argmax(-1), "hidden": watch.states()}
    found["routers"] = watch.router_logits()
    model.save_hf(out / folder.name / "imported", max_shard_bytes=20_000)
    trainer.fit(model, Batches(*[recorded.batch()] * steps))
    found["losses"] = watch.losses
    model.save_hf(out / folder.name / "trained")
    (found["trained"],) = trainer.predict(model, Batches(recorded.batch()))  # type: ignore[misc]
    return found
