"""What one rank saw of a run, as tensors: the raw material of `verify`.

A callback hooks the modules that the plan names (embedding, layers and their parts, head) during
the first batch, and keeps what every rank holds of batches, activations, losses, gradients and
weights, each with its place in the whole: sample numbers, token positions, boxes. It computes
nothing across ranks, so a broken collective can't hide itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from megatron_lightning.cli.verify_probes import (
    CORE,
    FEATURE_BLOCK,
    SKETCH_WIDTH,
    block_sketch,
    boxes,
    masters,
    sample_hashes,
    sketch,
    watched_modules,
    weights,
)
from megatron_lightning.layers.embedding import VocabularyHead
from megatron_lightning.layers.loss import CrossEntropy
from megatron_lightning.parallel.streams import Streams
from megatron_lightning.strategies import MegatronStrategy

LOGIT_TOKENS = 8
"""Positions of each sample whose logits are kept whole."""
FIELDS = ("tokens", "labels", "loss_mask", "position_ids", "input_ids")

Part = dict[str, Any]
"""{"samples": (B,), "positions": (S,) or (B, S), "values": (B, S, K)}: rows of one micro-batch."""


class Recorder(L.Callback):
    """Writes `rank{n}.pt` into a folder at the end of training."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._batch_rows = 0
        self._handles: list[Any] = []
        self._recording = False
        self._called: set[str] = set()
        self._calls = 0
        self._losses: list[float] = []
        self._seen: Mapping[str, Any] = {}
        self.record: dict[str, Any] = {
            "batches": [],
            "counts_tokens": False,
            "steps": [],
            "fields": {},
            "forward": {},
            "gradients": {},
            "initial": {},
            "first_weights": {},
            "final_weights": {},
            "dtypes": {},
            "initial_masters": {},
            "first_masters": {},
            "final_masters": {},
        }

    # ------------------------------------------------------------------ hooks of the Trainer

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep initial weights, and watch the first batch."""
        strategy = cast(MegatronStrategy, trainer.strategy)
        mesh = strategy.mesh
        self.record["place"] = {
            "rank": mesh.rank,
            "world_size": mesh.world_size,
            **{name: mesh.axis(name).rank for name in ("pp", "dp", "cp", "tp")},
        }
        parameters = strategy.parallel_model.parameters
        self.record["dtypes"] = {n: str(p.dtype).split(".")[1] for n, p in parameters.items()}
        self._keep_weights(strategy, "initial", "initial_masters")
        self._watch(strategy, pl_module)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Keep a hash of every sample's fields."""
        hashes = sample_hashes(batch)
        self._batch_rows = max((len(value) for value in hashes.values()), default=0)
        self.record["batches"].append(hashes)
        self._recording = len(self.record["batches"]) == 1
        self._calls = 0

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        """Keep norm, learning rate and token count, and of the first step the gradients."""
        strategy = cast(MegatronStrategy, trainer.strategy)
        assert strategy.update is not None
        self.record["steps"].append(
            {
                "gradient_norm": float(strategy.grad_norm()),
                "learning_rate": float(optimizer.param_groups[0]["lr"]),
                "tokens": float(strategy.window_weight),
                "losses": [],
            }
        )
        if len(self.record["steps"]) == 1:
            self.record["gradients"] = boxes(strategy.update.gradient_boxes())

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the loss, and the weights after the first step."""
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        self._losses.append(float(loss))
        if len(self.record["steps"]) == trainer.global_step:  # the window's last batch
            self.record["steps"][-1]["losses"], self._losses = self._losses, []
        if trainer.global_step == 1 and not self.record["first_weights"]:
            strategy = cast(MegatronStrategy, trainer.strategy)
            self._keep_weights(strategy, "first_weights", "first_masters")
            self._unwatch(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write everything."""
        strategy = cast(MegatronStrategy, trainer.strategy)
        self._keep_weights(strategy, "final_weights", "final_masters")
        self._unwatch(pl_module)
        torch.save(self.record, self._folder / f"rank{strategy.mesh.rank}.pt")

    def _keep_weights(self, strategy: MegatronStrategy, kind: str, kind_of_masters: str) -> None:
        self.record[kind], self.record[kind_of_masters] = weights(strategy), masters(strategy)

    # ------------------------------------------------------------------ watching modules

    def _watch(self, strategy: MegatronStrategy, module: LightningModule) -> None:
        self._strategy = strategy
        for name, watched in watched_modules(strategy, module):
            self._handles.append(watched.register_forward_hook(self._hook(name)))
        step: Callable[..., Any] = module.training_step

        def training_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._recording:
                return step(batch, *args, **kwargs)
            self._seen = batch if isinstance(batch, Mapping) else {}
            self._called = set()
            self._keep_fields()
            try:
                result = step(batch, *args, **kwargs)
                self.record["counts_tokens"] |= _counts_tokens(result)
                return result
            finally:
                self._seen = {}
                self._calls += 1

        module.training_step = training_step  # type: ignore[method-assign]

    def _unwatch(self, module: LightningModule) -> None:
        self._recording = False
        for handle in self._handles:
            handle.remove()
        if self._handles:
            del module.training_step
        self._handles = []

    def _hook(self, name: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            # During a recomputation in the backward pass no batch is set. Of a module that a step
            # calls again (a head that further predictions share) the first call counts.
            if self._recording and self._seen and isinstance(output, Tensor):
                if name not in self._called:
                    self._keep(name, module, output.detach())
                self._called.add(name)

        return keep

    def _keep(self, name: str, module: nn.Module, output: Tensor) -> None:
        place = self._place()
        if place is None or output.dim() < 2:
            return
        samples, positions = place
        if isinstance(module, CrossEntropy):
            values = output.unsqueeze(-1)  # (B, S, 1)
        elif output.dim() == 3:
            values = output.transpose(0, 1) if self._sequence_dim == 0 else output
        else:
            return
        if isinstance(module, VocabularyHead):
            self._keep_logits(name, module, values, samples, positions)
            return
        positions = self._own_positions(positions, values.shape[1])
        if positions is None or values.shape[0] != len(samples):
            return
        if name.endswith(CORE):  # its features are split by heads
            if values.shape[-1] % FEATURE_BLOCK:
                return
            numbers = block_sketch(values)
            offset = self._strategy.mesh.tp.rank * numbers.shape[-1]
            self._add("forward", name, samples, positions, numbers, offset=offset)
            return
        kept = values if values.shape[-1] <= SKETCH_WIDTH else sketch(values)
        self._add("forward", name, samples, positions, kept)

    def _keep_logits(
        self, name: str, module: VocabularyHead, logits: Tensor, samples: Tensor, positions: Tensor
    ) -> None:
        """Whole rows of this rank's columns, at a few positions that all layouts agree on."""
        if logits.shape[1] != len(positions):
            return
        length = self._length()
        chosen = torch.arange(0, length, max(1, length // LOGIT_TOKENS))
        rows = torch.isin(positions, chosen).nonzero().flatten()
        columns = logits.shape[-1]
        offset = self._strategy.mesh.tp.rank * columns if columns < module.vocab_size else 0
        true = max(0, min(columns, module.vocab_size - offset))
        values = logits[:, rows.to(logits.device), :true].float().cpu()
        self._add("forward", name, samples, positions[rows], values, offset=offset)

    def _keep_fields(self) -> None:
        """What `training_step` gets: this rank's part of every known field, exactly."""
        place = self._place()
        if place is None:
            return
        samples, positions = place
        for name in FIELDS:
            value = self._seen.get(name)
            if isinstance(value, Tensor) and value.shape == (len(samples), len(positions)):
                exact = value.to(torch.float64).unsqueeze(-1)
                self._add("fields", name, samples, positions, exact)

    def _add(
        self,
        kind: str,
        name: str,
        samples: Tensor,
        positions: Tensor,
        values: Tensor,
        *,
        offset: int = 0,
    ) -> None:
        part = {
            "samples": samples,
            "positions": positions,
            "values": values.detach().cpu().clone(),
            "offset": offset,
        }
        self.record[kind].setdefault(name, []).append(part)

    # ------------------------------------------------------------------ places

    @property
    def _sequence_dim(self) -> int:
        plan = self._strategy.parallel_model.plan
        return 0 if plan is None else plan.sequence_dim

    def _streams(self) -> Streams | None:
        return self._strategy.parallel_model.streams

    def _length(self) -> int:
        """Tokens of the longest field, of the whole sequence where context ranks share it."""
        lengths = [v.shape[1] for v in self._seen.values() if isinstance(v, Tensor) and v.dim() > 1]
        return max(lengths, default=0) * self._strategy.mesh.cp.size

    def _place(self) -> tuple[Tensor, Tensor] | None:
        """(numbers of the micro-batch's samples in the global batch, positions of its tokens in
        their sequences); None where that isn't known (packed documents over context ranks).
        """
        rows = next((len(v) for v in self._seen.values() if isinstance(v, Tensor) and v.dim()), 0)
        length, streams, mesh = self._length(), self._streams(), self._strategy.mesh
        if not rows or not length:
            return None
        first = mesh.dp.rank * self._batch_rows + self._calls * rows
        positions: Tensor | None = torch.arange(length)
        if streams is not None:
            first = streams.position.sample_offset
            positions = positions if mesh.cp.size == 1 else streams.sequence_positions
        if positions is None or "cu_seqlens" in self._seen:
            return None
        return torch.arange(first, first + rows), positions.cpu()

    def _own_positions(self, positions: Tensor, held: int) -> Tensor | None:
        """Those of an output that may be a part of the sequence (sequence parallelism)."""
        axis = self._strategy.mesh.tp
        if held == len(positions):
            return positions
        if held * axis.size == len(positions):
            return positions[axis.rank * held : (axis.rank + 1) * held]
        return None


def _counts_tokens(result: Any) -> bool:
    """Whether the window's weight is a number of tokens; else it is one of batches."""
    return isinstance(result, Mapping) and "num_tokens" in result
