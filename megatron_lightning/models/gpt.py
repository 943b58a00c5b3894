"""`GPTModel`: decoder-only language model as a LightningModule, from a config, a preset or a
checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from megatron_lightning.config.lora import LoraConfig
from megatron_lightning.config.model import GPTConfig
from megatron_lightning.config.multi_token_prediction import MultiTokenPredictionConfig
from megatron_lightning.config.names import NamesArguments
from megatron_lightning.config.parallel import ParallelConfig
from megatron_lightning.config.plan import ParallelPlan
from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.config.validate import raise_if_any
from megatron_lightning.layers.attention import splits_sequence
from megatron_lightning.layers.lora import GroupedParts, Parts, StackedParts
from megatron_lightning.layers.loss import masked_mean
from megatron_lightning.layers.te import TransformerEngineBackend
from megatron_lightning.layers.torch_backend import AttentionKernel, TorchBackend
from megatron_lightning.models.arguments import choice_problems, config_problems
from megatron_lightning.models.generate import Sampling, generate
from megatron_lightning.models.gpt_network import GPTNetwork
from megatron_lightning.models.module import MegatronModule
from megatron_lightning.models.plans import check_context_heads, check_tensor_parallel, gpt_plan
from megatron_lightning.models.presets import preset_config
from megatron_lightning.optim.build import build_optimizer
from megatron_lightning.optim.schedules import UnitsAfter, build_schedule

LossNormalization = Literal["token", "micro_batch"]
BackendName = Literal["torch", "transformer_engine"]
_BACKENDS = {"torch": TorchBackend, "transformer_engine": TransformerEngineBackend}


class GPTModel(NamesArguments, MegatronModule):
    """Next-token prediction with AdamW and a warm-up schedule.

    Every hook may be overridden as in any LightningModule. Batches are dicts of `tokens`, `labels`
    (already shifted), `loss_mask` and optionally `position_ids`, each (B, S), and for packed
    documents `cu_seqlens` (B, documents + 1).

    Parameters
    ----------
    config
        The network.
    optimizer
        Optimizer and its numbers. None: AdamW with the defaults of `OptimizerConfig`.
    scheduler
        Learning rate and weight decay over the run. None: the defaults of `SchedulerConfig`.
    loss_normalization
        "token" divides the window's summed loss by all its tokens, whatever the micro-batches and
        ranks; "micro_batch" averages the means of micro-batches equally, as Megatron-Core does by
        default.
    attention
        "fused" uses torch's kernels; "reference" is written out, for exact dropout and as an
        oracle.
    lora
        Low-rank adapters are trained and nothing else, as after `add_lora`. None: all weights are.
    backend
        Whose kernels compute linear layers, norms and attention, "torch" or "transformer_engine";
        parameters and checkpoints are the same.

    """

    def __init__(
        self,
        config: GPTConfig,
        optimizer: OptimizerConfig | None = None,
        scheduler: SchedulerConfig | None = None,
        loss_normalization: LossNormalization = "token",
        attention: AttentionKernel = "fused",
        lora: LoraConfig | None = None,
        backend: BackendName = "torch",
    ) -> None:
        super().__init__()
        raise_if_any(
            config_problems(config, optimizer, scheduler, lora)
            + choice_problems(
                {
                    "loss_normalization": (loss_normalization, LossNormalization),
                    "attention": (attention, AttentionKernel),
                    "backend": (backend, BackendName),
                }
            )
        )
        self.save_hyperparameters()
        self.config = config
        self.optimizer_config = optimizer or OptimizerConfig()
        self.scheduler_config = scheduler or SchedulerConfig()
        self.loss_normalization = loss_normalization
        self.attention: AttentionKernel = attention
        self.backend: BackendName = backend
        self.lora = lora

    @classmethod
    def from_preset(cls, name: str, **kwargs: Any) -> Self:
        """Make a published architecture by name, e.g. `llama3-8b`; `kwargs` go to the
        constructor.
        """
        return cls(preset_config(name), **kwargs)

    def build_network(self, device: str | None = None) -> nn.Module:
        """Make the network with uninitialised weights."""
        backend = _BACKENDS[self.backend](attention=self.attention)
        network = GPTNetwork(self.config, backend, device=device)
        return self.adapted(network, gpt_plan(self.config))

    def parallel_plan(self) -> ParallelPlan:
        """The GPT family's split table."""
        return self.adapted_plan(gpt_plan(self.config))

    def adapter_parts(self) -> Mapping[str, Parts]:
        """What the packed projections hold."""
        config = self.config
        sizes = (config.queries_per_group * config.head_dim, config.head_dim, config.head_dim)
        parts: dict[str, Parts] = {
            "linear_qkv": GroupedParts(("query", "key", "value"), sizes),
        }
        if config.gated_linear_unit:
            parts["linear_fc1"] = StackedParts(("gate", "up"))
        return parts

    def check_parallel(self, config: ParallelConfig) -> list[str]:
        """What the layout can't do with this model, before anything is started."""
        problems = check_tensor_parallel(self.config, config.tensor_parallel_size)
        problems += check_context_heads(self.config, config)
        problems += self.adapter_problems(config)
        problems += self.optimizer_config.check()
        problems += self.scheduler_config.check(self.optimizer_config)
        dropout = self.config.attention_dropout
        if config.runtime.exact_dropout and dropout > 0 and self.attention != "reference":
            problems.append(
                f"runtime.exact_dropout=True with attention_dropout={dropout} and"
                f" attention={self.attention!r}: a fused kernel draws its own masks; use"
                " GPTModel(attention='reference')"
            )
        if config.runtime.cuda_graphs != "none" and self.backend == "transformer_engine":
            problems.append(
                f"runtime.cuda_graphs={config.runtime.cuda_graphs!r} with"
                " backend='transformer_engine': its layers were never tried in our graphs; use"
                " backend='torch', or cuda_graphs='none'"
            )
        return problems

    def check_data(self, data: Any) -> list[str]:
        """What doesn't fit between the model and a `PretrainingDataModule`, before anything is
        started.
        """
        problems = []
        vocab_size, seq_length = (
            getattr(data, "vocab_size", None),
            getattr(data, "seq_length", None),
        )
        if vocab_size is not None and vocab_size > self.config.vocab_size:
            problems.append(
                f"config.vocab_size={self.config.vocab_size}: the data have {vocab_size} token "
                f"ids; set it to {vocab_size}, or for a trained model take its own tokenizer"
            )
        limit = self.config.max_position_embeddings
        if (
            seq_length is not None
            and self.config.position_embedding == "learned"
            and seq_length > limit
        ):
            problems.append(
                f"seq_length={seq_length}: above config.max_position_embeddings={limit}, the "
                f"learned positions there are;"
                " shorten the samples or raise it"
            )
        return problems

    # ------------------------------------------------------------------ steps

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        """Lightning's hook. `cu_seqlens` stays on the host, which cuts attention by it: from the
        device it would be waited for.
        """
        if not isinstance(batch, Mapping) or not isinstance(batch.get("cu_seqlens"), Tensor):
            return super().transfer_batch_to_device(batch, device, dataloader_idx)
        others = {key: value for key, value in batch.items() if key != "cu_seqlens"}
        moved = super().transfer_batch_to_device(others, device, dataloader_idx)
        return {**moved, "cu_seqlens": batch["cu_seqlens"]}

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        **more: Tensor,
    ) -> Any:
        """Token ids (B, S) -> logits (B, S, V) of the true vocabulary, or with labels the losses
        (B, S) in float32; see `GPTNetwork`.
        """
        result = super().forward(tokens, position_ids, labels, cu_seqlens=cu_seqlens, **more)
        return result.transpose(0, 1) if labels is None else result  # (S, B, V) -> (B, S, V)

    def token_losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(mean loss over the tokens that count, number of these tokens) of one micro-batch."""
        losses = self(
            batch["tokens"],
            batch.get("position_ids"),
            batch["labels"],
            cu_seqlens=batch.get("cu_seqlens"),
        )  # (B, S)
        return masked_mean(losses, batch["loss_mask"])

    @property
    def _shows_progress(self) -> bool:
        """Whether there is a bar to show losses in: for one Lightning brings them to the host after
        every batch, which then waits for the device.
        """
        return self._trainer is not None and self._trainer.progress_bar_callback is not None

    def num_loss_tokens(self, batch: dict[str, Tensor]) -> Tensor | None:
        """Tokens over which `training_step`'s loss of a whole micro-batch is a mean; None: it is a
        plain mean. What weighs routers' losses, also on stages that don't compute the loss.
        """
        return batch["loss_mask"].sum() if self.loss_normalization == "token" else None

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        """Mean loss of a micro-batch and its number of tokens."""
        if self.config.multi_token_prediction is None:
            loss, num_tokens = self.token_losses(batch)
            self.log("train_loss", loss, prog_bar=self._shows_progress)
        else:
            loss, num_tokens = self._losses_of_depths(batch, self.config.multi_token_prediction)
        return (
            {"loss": loss, "num_tokens": num_tokens} if self.loss_normalization == "token" else loss
        )

    def _losses_of_depths(
        self, batch: dict[str, Tensor], prediction: MultiTokenPredictionConfig
    ) -> tuple[Tensor, Tensor]:
        """`token_losses` with the share of multi-token prediction in the loss. Logs `train_loss`
        without it, and `mtp_K_loss` of each depth K (from 1).
        """
        losses, further = self(
            batch["tokens"],
            batch.get("position_ids"),
            batch["labels"],
            cu_seqlens=batch.get("cu_seqlens"),
            loss_mask=batch["loss_mask"],
        )
        loss, num_tokens = masked_mean(losses, batch["loss_mask"])
        self.log("train_loss", loss, prog_bar=self._shows_progress)
        means = further.means(num_tokens)
        for depth, mean in enumerate(means, start=1):
            count: Any = further.counts[depth]
            self.log(f"mtp_{depth}_loss", mean, batch_size=count)
        # Of sums over a window each token counts alike; else the depths are means of their own.
        added = further.shares(num_tokens) if self.loss_normalization == "token" else means
        return loss + prediction.loss_scaling_factor * added.mean(), num_tokens

    def validation_step(
        self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> Any:
        """Log `val_loss`, the mean over all tokens of the validation set; of several sets that the
        data module names, `val_loss/NAME`.
        """
        return self._evaluate(batch, "val_loss", "valid", dataloader_idx)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Log `test_loss`, as `validation_step` does."""
        return self._evaluate(batch, "test_loss", "test", dataloader_idx)

    def _evaluate(
        self, batch: dict[str, Tensor], metric: str, part: str, dataloader_idx: int
    ) -> Any:
        loss, num_tokens = self.token_losses(batch)
        names = getattr(self.trainer.datamodule, "evaluation_names", None)  # type: ignore[attr-defined]
        name = None if names is None else names(part)[dataloader_idx]
        if name is None:
            self.log(metric, loss, prog_bar=self._shows_progress)
        else:
            self.log(
                f"{metric}/{name}", loss, prog_bar=self._shows_progress, add_dataloader_idx=False
            )
        return {"loss": loss, "num_tokens": num_tokens}

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Logits (B, S, V) of the true vocabulary."""
        cu_seqlens = batch.get("cu_seqlens")
        return self(batch["tokens"], batch.get("position_ids"), cu_seqlens=cu_seqlens)

    # ------------------------------------------------------------------ optimization

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW with and without weight decay, and the schedule by optimizer steps."""
        optimizer = build_optimizer(
            self.canonical_parameters(), self.optimizer_config, self.global_shapes()
        )
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        batch = getattr(data, "global_batch_size", None)
        schedule = build_schedule(
            optimizer,
            self.optimizer_config,
            self.scheduler_config,
            total_steps=self.trainer.estimated_stepping_batches,
            global_batch_size=None
            if batch is None
            else batch * self.trainer.accumulate_grad_batches,
            samples_after=_samples_after(data),
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    # ------------------------------------------------------------------ generation

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor | Sequence[int],
        max_new_tokens: int,
        sampling: Sampling | None = None,
        *,
        end_token: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue `tokens`, (B, S) or one sequence, by up to `max_new_tokens` ids; the whole
        model is in this process, or all ranks call it alike. ValueError under context parallelism,
        which needs every sequence cut.
        """
        prompt = torch.as_tensor(tokens)
        prompt = prompt.unsqueeze(0) if prompt.dim() == 1 else prompt
        network = self.built_network()
        if splits_sequence(network):
            raise ValueError(
                "generate: this network is cut by context_parallel_size, and each rank would take"
                " the prompt for its part of a sequence; generate from a checkpoint"
                " (GPTModel.load_from_checkpoint, or megatron-lightning generate)"
            )
        was_training = network.training
        network.eval()
        try:
            return generate(
                lambda ids: network(ids)[-1],  # logits (S, B, V) -> those of the next token
                prompt.to(next(network.parameters()).device),
                max_new_tokens=max_new_tokens,
                vocab_size=self.config.vocab_size,
                sampling=sampling,
                end_token=end_token,
                generator=generator,
            )
        finally:
            network.train(was_training)


def _samples_after(data: Any) -> UnitsAfter | None:
    """How many samples steps take, for data whose batch size changes during the run."""
    schedule = getattr(data, "batch_size_schedule", None)
    return None if schedule is None or schedule.is_constant else schedule.samples_after
