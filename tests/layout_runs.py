"""Whole Lightning runs of a small GPT in any layout, and their comparison with one process."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch import Tensor

from megatron_lightning.checkpoint import BoxedTensor
from megatron_lightning.config import GPTConfig, LoraConfig, PipelineConfig
from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.models.gpt import GPTModel
from megatron_lightning.runtime.boxes import box_of
from megatron_lightning.strategies import MegatronStrategy
from tests import tolerances

SEQUENCE, VOCABULARY = 16, 257


def tiny_config(**changes: Any) -> GPTConfig:
    """The tiny decoder of the reported cases: hidden 64, 4 query and 2 key/value heads, 4 layers,
    vocabulary 257.
    """
    values = dict(
        vocab_size=VOCABULARY,
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
    )
    return GPTConfig(
        **{**values, "ffn_hidden_size": 128, "make_vocab_size_divisible_by": 8, **changes}
    )


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run: a layout, a model, and how the Trainer is set. Travels to the ranks by
    pickle.
    """

    config: GPTConfig = field(default_factory=tiny_config)
    layout: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    steps: int = 10
    global_batch_size: int = 8
    learning_rate: float = 1e-3
    normalization: str = "token"
    attention: str = "fused"
    backend: str = "torch"
    keep_gradients: tuple[int, ...] = (0, 1, 9)
    """Steps whose gradients are compared."""
    make_batch: Callable[["Run", int], dict[str, Tensor]] | None = None
    """Module-level function in place of `global_batch`."""
    make_data: Callable[["Run"], L.LightningDataModule] | None = None
    """Module-level function in place of `Batches`."""
    lora: LoraConfig | None = None
    """Adapters, which alone are trained then."""


class TokenBatches:
    """This data rank's slice of deterministic global batches. Not a DataLoader, so Lightning
    leaves it alone.
    """

    def __init__(self, run: Run, batches: int, rank: int, size: int) -> None:
        self.run, self.batches, self.rank, self.size = run, batches, rank, size
        self.position = 0

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        start, self.position = self.position % self.batches, 0
        for index in range(start, self.batches):
            self.position = index + 1
            batch = global_batch(self.run, index)
            yield {key: value.chunk(self.size)[self.rank] for key, value in batch.items()}

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def global_batch(run: Run, index: int) -> dict[str, Tensor]:
    """Random tokens with unequal loss masks: (global_batch_size, S)."""
    if run.make_batch is not None:
        return run.make_batch(run, index)
    generator = torch.Generator().manual_seed(1000 + index)
    shape = (run.global_batch_size, SEQUENCE + 1)
    tokens = torch.randint(0, run.config.vocab_size, shape, generator=generator)
    mask = (torch.rand(shape[0], SEQUENCE, generator=generator) < 0.8).float()
    mask[::3, SEQUENCE // 2 :] = 0.0
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask}


class Batches(L.LightningDataModule):
    """`TokenBatches` for the data axis of whatever strategy runs."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def _loader(self, batches: int) -> TokenBatches:
        assert self.trainer is not None
        place = self.trainer.strategy.distributed_sampler_kwargs
        return TokenBatches(self.run, batches, place["rank"], place["num_replicas"])

    def train_dataloader(self) -> TokenBatches:
        return self._loader(self.run.steps * self.run.trainer.get("accumulate_grad_batches", 1))

    def val_dataloader(self) -> TokenBatches:
        return self._loader(2)


class Recorder(L.Callback):
    """Keeps losses, gradients (as boxes), norms and learning rates of every step."""

    reads_parameters = False  # between a step and the next forward pass

    def __init__(self, run: Run) -> None:
        self.run = run
        self.losses: list[float] = []
        self.logged: list[float] = []
        self.norms: list[float] = []
        self.rates: list[float] = []
        self.gradients: dict[int, dict[str, Any]] = {}
        self.initial: dict[str, Any] = {}
        self.initial_masters: dict[str, Any] = {}

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.initial = boxes(trainer, "value")
        self.initial_masters = boxes(trainer, "master")

    def on_before_optimizer_step(
        self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any
    ) -> None:
        step = len(self.norms)
        self.norms.append(float(trainer.strategy.grad_norm()))
        self.rates.append(optimizer.param_groups[0]["lr"])
        if step in self.run.keep_gradients:
            self.gradients[step] = boxes(trainer, "grad")

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        self.losses.append(float(outputs["loss"]))
        self.logged.append(float(trainer.callback_metrics["train_loss"]))


def boxes(trainer: L.Trainer, what: str) -> dict[str, Any]:
    """{name: (global shape, offsets, sizes, local box)} of parameters ("value"), of what the
    optimizers update ("master") or of its gradients ("grad"), as this rank holds them; a list of
    such where it holds several boxes of one.
    """
    update = trainer.strategy.update
    if what == "grad":
        boxed = update.gradient_boxes()
    elif what == "master":
        held = trainer.strategy.parallel_model.parameters
        trained = {n: value for n, value in update.updated().items() if held[n].requires_grad}
        boxed = {name: update.box(name, value) for name, value in trained.items()}
    else:
        model = trainer.strategy.parallel_model
        dtypes = model.compute_dtypes
        read = {n: p.detach().to(dtypes.get(n, p.dtype)) for n, p in model.parameters.items()}
        boxed = {name: box_of(value, model.table[name]) for name, value in read.items()}
    found: dict[str, Any] = {}
    for name, value in ((n, BoxedTensor.of(v)) for n, v in boxed.items()):
        pairs = zip(value.boxes, value.views, strict=True)
        parts = [(tuple(value.shape), b.offsets, b.sizes, _plain(v)) for b, v in pairs]
        found[name] = parts[0] if len(parts) == 1 else parts
    return found


def _plain(tensor: Tensor) -> Tensor:
    return tensor.float().cpu().clone()


def make_strategy(layout: dict[str, Any]) -> MegatronStrategy:
    """A strategy from its keyword arguments, where `virtual` stands for the virtual pipeline
    size.
    """
    layout = dict(layout)
    if "virtual" in layout:
        layout["pipeline"] = PipelineConfig(virtual_pipeline_size=layout.pop("virtual"))
    return MegatronStrategy(**layout)


def train(rank: int, world_size: int, run: Run) -> dict[str, Any]:
    """Fit in this rank; what it saw, as plain objects."""
    model = GPTModel(
        run.config,
        OptimizerConfig(lr=run.learning_rate, weight_decay=0.1),
        SchedulerConfig(lr_decay_style="cosine", lr_warmup_steps=3, min_lr=run.learning_rate / 10),
        loss_normalization=run.normalization,
        attention=run.attention,
        lora=run.lora,
        backend=run.backend,
    )
    recorder = Recorder(run)
    options = dict(
        accelerator="cpu",
        devices=world_size,
        max_steps=run.steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1,
        val_check_interval=run.steps * run.trainer.get("accumulate_grad_batches", 1),
    )
    trainer = L.Trainer(
        strategy=make_strategy(run.layout), callbacks=[recorder], **{**options, **run.trainer}
    )
    trainer.fit(model, Batches(run) if run.make_data is None else run.make_data(run))
    return results(trainer, recorder)


def results(trainer: L.Trainer, recorder: Recorder) -> dict[str, Any]:
    """What `assert_same_training` compares, of a rank's run."""
    return {
        "losses": recorder.losses,
        "logged": recorder.logged,
        "norms": recorder.norms,
        "rates": recorder.rates,
        "gradients": recorder.gradients,
        "initial": recorder.initial,
        "final": boxes(trainer, "value"),
        "masters": (recorder.initial_masters, boxes(trainer, "master")),
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
    }


def assemble(parts: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Whole tensors from the boxes of all ranks; replicas must agree bitwise, and nothing may be
    missing.
    """
    whole: dict[str, Tensor] = {}
    for part in parts:
        boxes = [
            (name, *box)
            for name, held in part.items()
            for box in (held if isinstance(held, list) else [held])
        ]
        for name, shape, offsets, sizes, local in boxes:
            target = whole.setdefault(name, torch.full(shape, float("nan")))
            view = target[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
            if not torch.isnan(view).all():
                assert torch.equal(view, local), f"{name}: replicas differ"
            view.copy_(local)
    missing = [name for name, tensor in whole.items() if torch.isnan(tensor).any()]
    assert not missing, f"no rank holds all of {missing}"
    return whole


def assert_same_training(
    ranks: list[dict[str, Any]], single: dict[str, Any], dtype: torch.dtype = torch.float32
) -> None:
    """Losses, norms, gradients, weights of a parallel run against one process, by the tolerance
    table.
    """
    first = assemble([rank["initial"] for rank in ranks])
    expected = assemble([single["initial"]])
    assert first.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(first[name], tensor), f"initial {name} differs"
    for rank in ranks:
        assert rank["metrics"] == ranks[0]["metrics"]
        assert rank["losses"] == ranks[0]["losses"]
    assert len(ranks[0]["losses"]) == len(single["losses"])
    for step, (got, want) in enumerate(zip(ranks[0]["losses"], single["losses"], strict=True)):
        tolerances.assert_loss_close(got, want, step, dtype)
    for step, (got, want) in enumerate(zip(ranks[0]["norms"], single["norms"], strict=True)):
        tolerances.assert_gradient_norm_close(got, want, step, dtype)
    for step in single["gradients"]:
        gradients = assemble([rank["gradients"][step] for rank in ranks])
        for name, want in assemble([single["gradients"][step]]).items():
            tolerances.assert_gradient_close(
                name, gradients[name], want, single["norms"][step], step, dtype
            )
    _assert_same_updates(ranks, single, dtype)
    for key, value in single["metrics"].items():
        tolerances.assert_loss_close(ranks[0]["metrics"][key], value, 0, dtype)


def _assert_same_updates(
    ranks: list[dict[str, Any]], single: dict[str, Any], dtype: torch.dtype
) -> None:
    """Of what the optimizers update, which may be more exact than the network's parameters; those
    must be just that, rounded.
    """
    final = assemble([rank["final"] for rank in ranks])
    begun, updated = (assemble([rank["masters"][i] for rank in ranks]) for i in (0, 1))
    wanted_begun, wanted = (assemble([single["masters"][i]]) for i in (0, 1))
    assert final.keys() == assemble([single["final"]]).keys() >= updated.keys() == wanted.keys()
    for name, want in wanted.items():
        assert torch.equal(final[name], updated[name].to(dtype).float()), name
        start = wanted_begun[name]
        tolerances.assert_update_close(
            name,
            updated[name] - begun[name] + start,
            want,
            start,
            single["rates"],
            _zero_gradient(name, want),
            dtype,
        )


def _zero_gradient(name: str, like: Tensor) -> Tensor | None:
    """Biases added to every key alike (without rotation) have no true gradient: softmax cancels
    them.
    """
    if name.endswith("k_layernorm.bias"):
        return torch.ones_like(like, dtype=torch.bool)
    if not name.endswith("linear_qkv.bias"):
        return None
    groups = like.view(2, -1, 16)  # two groups of (2 query heads, key, value) x head size 16
    mask = torch.zeros_like(groups, dtype=torch.bool)
    mask[:, 2] = True
    return mask.view(-1)
