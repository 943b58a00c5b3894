"""The sides of `checkpoint.py` that hold a network of this package: under `MegatronStrategy`, with
its own checkpoints, and under torch's FSDP2, with those of torch DCP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_measures import Side
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_lightning import MegatronStrategy
from megatron_lightning.cli.verify_source import SyntheticTokens
from megatron_lightning.config import CheckpointConfig, DataParallelConfig, GPTConfig
from megatron_lightning.models import GPTModel


def gpt_config(sizes: dict[str, int]) -> GPTConfig:
    return GPTConfig(
        **sizes,  # type: ignore[arg-type]
        max_position_embeddings=64,
        gated_linear_unit=False,
        activation="gelu",
        norm="layernorm",
        add_bias_linear=True,
        position_embedding="learned",
        tie_word_embeddings=True,
    )


class Fsdp2:
    """The same network under `fully_shard`, saved by torch's own functions."""

    def __init__(self, sizes: dict[str, int], ranks: int) -> None:
        network = GPTModel(gpt_config(sizes)).built_network()
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in network.decoder.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(network, mesh=mesh)
        self.network = network
        self.background = dist.new_group(backend="gloo")  # async_save talks from its own thread
        self.optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
        tokens = torch.randint(0, sizes["vocab_size"], (1, 16))
        network(tokens, labels=tokens).mean().backward()
        self.optimizer.step()

    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.network.parameters())

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.network, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, path: str) -> None:
        dcp.save(self._state(), checkpoint_id=path)

    def start(self, path: str) -> Callable[[], None]:
        done: Any = dcp.async_save(self._state(), checkpoint_id=path, process_group=self.background)
        return lambda: done.result() and None

    def load(self, path: str) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            self.network,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def with_ours(
    sizes: dict[str, int], ranks: int, tensor_size: int, measure: Callable[[Side], None]
) -> None:
    """One step under the Trainer, then the measurement inside of it."""

    class Measure(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            measure(Ours(trainer))

    sharding = "none" if ranks == tensor_size else "optimizer"
    trainer = L.Trainer(
        strategy=MegatronStrategy(
            tensor_parallel_size=tensor_size,
            data_parallel=DataParallelConfig(sharding=sharding, overlap_param_gather=False),
            checkpoint=CheckpointConfig(asynchronous=True),
        ),
        accelerator="cpu",
        devices=ranks,
        precision="bf16-mixed",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=[Measure()],
    )
    trainer.fit(GPTModel(gpt_config(sizes)), SyntheticTokens(sizes["vocab_size"], 16, 1, 4))


class Ours:
    """The state of a Trainer under `MegatronStrategy`."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.saves = trainer.strategy.saves

    def parameters(self) -> int:
        shapes = self.trainer.lightning_module.global_shapes()
        return sum(torch.Size(shape).numel() for shape in shapes.values())

    def save(self, path: str) -> None:
        self._save(path, background=False)

    def start(self, path: str) -> Callable[[], None]:
        self._save(path, background=True)
        return self.saves.finish

    def _save(self, path: str, *, background: bool) -> None:
        self.saves._config = replace(self.saves._config, asynchronous=background)
        self.saves.state_changes()  # else the second save of a state only gets another name
        self.trainer.save_checkpoint(path)

    def load(self, path: str) -> None:
        self.trainer.strategy.load_checkpoint(path)
