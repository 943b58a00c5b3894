"""`MegatronModule`: a LightningModule whose network is built late and described by a plan.

Construction is free: it keeps configs. The network is built on the meta device in
`configure_model` when the strategy gives it its values (each rank only its part), and as a whole,
with the same values, under any other strategy or at the first call outside of a Trainer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

import megatron_lightning.checkpoint as store
from megatron_lightning.checkpoint.config_codec import CODEC
from megatron_lightning.checkpoint.ranks import ALONE
from megatron_lightning.config.lora import is_adapter
from megatron_lightning.config.plan import ParallelPlan, canonical_name
from megatron_lightning.layers.given import ValueSource, give_values
from megatron_lightning.layers.whole import materialise_whole
from megatron_lightning.models.adapters import ADAPTER_RECORD, HoldsAdapters
from megatron_lightning.utils.env import global_seed

DEFAULT_SEED = 1234
TOKENIZER_DIGEST = "tokenizer_digest"
"""Attribute of a data module, and entry of a checkpoint: identity of the tokenizer."""
SOURCE_RECORD = "source_record"
"""Entry of a checkpoint: `MegatronModule.source_record`."""


class MegatronModule(HoldsAdapters, LightningModule, ABC):
    """Base of the zoo's modules. Subclasses say how the network is built and how it may be cut."""

    network_attribute: ClassVar[str] = "network"
    """Attribute that the strategy cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.network: nn.Module | None = None
        self.initial_values: ValueSource | None = None
        """Where the weights come from; None: they are drawn. Read when the network is built, each
        rank its part."""
        self.source_record: dict[str, Any] | None = None
        """What an imported model was, for its export; kept in checkpoints. See `bridge`."""
        self.holds_weights = False
        """Whether `load_weights` has brought real weights."""
        self._begin_adapters()

    @abstractmethod
    def build_network(self, device: str | None = None) -> nn.Module:
        """Make the network with uninitialised weights; "meta" must cost nothing."""

    @abstractmethod
    def parallel_plan(self) -> ParallelPlan:
        """How tensor and pipeline parallelism may cut the network."""

    def configure_model(self) -> None:
        """Build the network if it isn't there."""
        if self.network is not None:
            return
        with torch.inference_mode(False):  # parameters made under it could never be trained
            self.network = self.build_network("meta").train(self.training)
            self._give_values(self.network)
            if not (
                self._trainer is not None
                and getattr(self.trainer.strategy, "materialises_networks", False)
            ):
                self.fill_network()

    def _give_values(self, network: nn.Module) -> None:
        """Note where values come from that are not drawn."""
        prefix = f"{self.network_attribute}."
        if self.initial_values is not None:
            give_values(network, self.initial_values, prefix, lambda path: not is_adapter(path))
        if self.adapter_values is not None:
            give_values(network, self.adapter_values, prefix, is_adapter)

    def fill_network(self) -> None:
        """Give the parameters that are on the meta device their values, whole in this process."""
        assert self.network is not None
        seed = global_seed()
        real = (p.device for p in self.network.parameters() if not p.is_meta)
        materialise_whole(
            self.network,
            self.parallel_plan(),
            seed=DEFAULT_SEED if seed is None else seed,
            prefix=f"{self.network_attribute}.",
            device=next(real, torch.device("cpu")),
        )

    def built_network(self) -> Any:
        """The network, built as a whole in this process if that hasn't happened yet."""
        if self.network is None:
            self.configure_model()
        return self.network

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the network."""
        return self.built_network()(*args, **kwargs)

    def global_shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name -> global shape of every parameter of the whole network, whatever this
        rank holds.
        """
        whole = self.build_network("meta")
        return {
            f"{self.network_attribute}.{name}": tuple(p.shape)
            for name, p in whole.named_parameters()
        }

    def buffer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name -> shape of every buffer of the whole network that is saved with it."""
        whole = self.build_network("meta")
        kept = whole.state_dict().keys()
        return {
            f"{self.network_attribute}.{name}": tuple(buffer.shape)
            for name, buffer in whole.named_buffers()
            if name in kept
        }

    def canonical_buffers(self) -> dict[str, Tensor]:
        """Canonical name -> buffer, for those that are saved and that this rank holds."""
        prefix = f"{self.network_attribute}."
        kept = {canonical_name(name) for name in self.state_dict()}
        buffers = {canonical_name(name): buffer for name, buffer in self.named_buffers()}
        return {n: b for n, b in buffers.items() if n in kept and n.startswith(prefix)}

    def canonical_parameters(self) -> dict[str, nn.Parameter]:
        """Canonical name -> parameter, for those that this rank holds."""
        tied = {user: owner for owner, user in self.parallel_plan().tied}
        prefix = f"{self.network_attribute}."
        found: dict[str, nn.Parameter] = {}
        for name, parameter in self.named_parameters():
            canonical = canonical_name(name)
            owner = tied.get(canonical.removeprefix(prefix))
            found.setdefault(canonical if owner is None else prefix + owner, parameter)
        return found

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Note the tokenizer of the training data, so that no other one is used by mistake."""
        digest = getattr(self.trainer.datamodule, TOKENIZER_DIGEST, None)  # type: ignore[attr-defined]
        if digest is not None:
            checkpoint[TOKENIZER_DIGEST] = digest
        if self.source_record is not None:
            checkpoint[SOURCE_RECORD] = self.source_record
        self.record_adapters(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Remember what an imported model was."""
        self.source_record = checkpoint.get(SOURCE_RECORD, self.source_record)

    @classmethod
    def from_hf(cls, path: str | Path, **options: Any) -> Self:
        """Make the module of a Hugging Face model; see `bridge.from_hf`."""
        from megatron_lightning.bridge import from_hf  # the one import upwards

        return from_hf(path, model_class=cls, **options)

    def save_hf(self, path: str | Path, **options: Any) -> None:
        """Write the model as a folder that transformers loads; see `bridge.to_hf`. All ranks of a
        layout call it.
        """
        from megatron_lightning.bridge import to_hf

        to_hf(self, path, **options)

    def save_adapters(self, path: str | Path, **options: Any) -> None:
        """Write the adapters as a folder of `peft`; see `bridge.save_adapters`. All ranks of a
        layout call it.
        """
        from megatron_lightning.bridge import save_adapters

        save_adapters(self, path, **options)

    def load_adapters(self, path: str | Path) -> Self:
        """Take the adapters of a folder of `peft`; see `bridge.load_adapters`."""
        from megatron_lightning.bridge import load_adapters

        load_adapters(self, path)
        return self

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls,
        checkpoint_path: str | Path,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | store.Strictness | None = None,
        weights_only: bool | None = None,
        base: str | Path | None = None,
        **kwargs: Any,
    ) -> Self:
        """Make the module of a checkpoint folder, whole in this process, whatever layout it was
        saved in.

        Constructor arguments come from the checkpoint; `kwargs` replace them. `weights_only` has no
        meaning: nothing is unpickled in any case. `base`: the Hugging Face model below a
        checkpoint that holds adapters alone; by default the one that the run began from. Raises
        CheckpointError when the folder is no valid checkpoint or its tensors don't fit.
        """
        if hparams_file is not None:
            raise ValueError(
                "hparams_file=...: hyper-parameters are in the checkpoint itself; leave it out"
            )
        objects = store.load_objects(checkpoint_path, codec=CODEC)
        module = cls(**{**_constructor_arguments(objects), **kwargs})
        module.source_record = objects.get(SOURCE_RECORD)
        module._adapt_to(objects, base)
        module.configure_model()
        module.load_weights(checkpoint_path, strict=True if strict is None else strict)
        return module if map_location is None else module.to(map_location)

    def _adapt_to(self, objects: Mapping[str, Any], base: str | Path | None) -> None:
        """Have the adapters of a checkpoint, and the base that it may lack."""
        record = objects.get(ADAPTER_RECORD)
        if record is None:
            return
        if self.lora is None:
            self.add_lora(record["config"])
        if record["without_base"]:
            folder = (self.source_record or {}).get("folder") if base is None else base
            if folder is None:
                raise ValueError(
                    "the checkpoint holds adapters alone, over a base that came from nowhere; give"
                    " the Hugging Face model below them: load_from_checkpoint(..., base=...)"
                )
            self.initial_values = type(self).from_hf(folder).initial_values

    def load_weights(
        self, checkpoint_path: str | Path, *, strict: bool | store.Strictness = True
    ) -> store.LoadReport:
        """Load the weights of a checkpoint folder into this whole module.

        `strict`: True ("all"), "missing_ok" leaves parameters that the checkpoint hasn't as they
        are, "unexpected_ok" ignores those that only it has, False ("none") both and other shapes.
        The report names all of them.
        """
        if isinstance(strict, bool):
            strict = "all" if strict else "none"
        self.configure_model()
        tensors: dict[str, Tensor] = {}
        shapes = self.global_shapes()
        elsewhere = self.names_elsewhere(store.load_objects(checkpoint_path, codec=CODEC))
        for name, parameter in self.canonical_parameters().items():
            if name in elsewhere:
                continue
            shape = shapes[name]
            tensors[f"model.{name}"] = store.BoxedTensor.from_local(
                parameter, shape, (0,) * len(shape), shape
            )
        tensors |= {f"model.{name}": buffer for name, buffer in self.canonical_buffers().items()}
        with torch.no_grad():
            report = store.load(
                checkpoint_path, tensors, strict=strict, scope="model.", process_group=ALONE
            )
        self.holds_weights = True
        return report


def _constructor_arguments(objects: Mapping[str, Any]) -> dict[str, Any]:
    arguments = dict(objects.get("hyper_parameters") or {})
    return {key: value for key, value in arguments.items() if not key.startswith("_")}
