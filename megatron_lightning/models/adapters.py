"""`HoldsAdapters`: what a MegatronModule knows of low-rank adapters (see `layers/lora.py`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Self

from torch import nn

from megatron_lightning.config.lora import LoraConfig, is_adapter
from megatron_lightning.config.parallel import ParallelConfig
from megatron_lightning.config.plan import ParallelPlan, Role, Split, canonical_name
from megatron_lightning.layers.given import ValueSource
from megatron_lightning.layers.lora import Parts, attach

ADAPTER_RECORD = "lora"
"""Entry of a checkpoint: the LoraConfig, and whether the base is left out."""


class HoldsAdapters:
    """Mixed into `MegatronModule`."""

    lora: LoraConfig | None
    """The adapters that the network has or will have; None for none."""
    adapter_values: ValueSource | None
    """Where the adapters' values come from; None: they are drawn, and begin without an effect."""
    _adapter_rows: tuple[object, Mapping[str, Split]]
    """Rows of the split table, and for which adapters they are."""

    def _begin_adapters(self) -> None:
        self.lora, self.adapter_values, self._adapter_rows = None, None, (None, {})

    def add_lora(self, config: LoraConfig | None = None, **fields: Any) -> Self:
        """Add adapters to the linear layers and freeze all else: `add_lora(rank=8,
        targets=["linear_qkv", "linear_proj"], alpha=16)`, the fields of a `LoraConfig`, or one.

        Costs nothing before the network is built. ValueError names fields and targets that can't
        be followed.
        """
        if config is not None and fields:
            raise ValueError(f"add_lora: give a LoraConfig or fields {sorted(fields)}, not both")
        config = LoraConfig(**_tuples(fields)) if config is None else config
        if self.lora is not None:
            raise ValueError(f"add_lora: there are adapters already, {self.lora}")
        module: Any = self
        if module.network is not None and module._trainer is not None:
            raise ValueError(
                "add_lora: the network was built for a Trainer already; call it before the module"
                " is given to one, or on the module that load_from_checkpoint returns"
            )
        plan = module.parallel_plan()
        self.lora = config
        try:
            module.build_network("meta")
            if self._adapter_rows[0] != self._adapter_key():
                raise ValueError(
                    f"{type(self).__name__}.build_network: returns a network without adapters; let"
                    " it return self.adapted(network, plan), and parallel_plan"
                    " self.adapted_plan(plan)"
                )
        except ValueError:
            self.lora = None
            raise
        if module.network is not None:
            self.adapted(module.network, plan)
            module.fill_network()
        return self

    # ------------------------------------------------------------------ for subclasses

    def adapter_parts(self) -> Mapping[str, Parts]:
        """Layers that pack several projections, by the end of their path."""
        return {}

    def adapted(self, network: nn.Module, plan: ParallelPlan) -> nn.Module:
        """`network` with its adapters, if there are to be some; `plan` is the one without."""
        if self.lora is not None:
            joined = self._joined_layers()
            parts = {end: p for end, p in self.adapter_parts().items() if end not in joined}
            self._adapter_rows = self._adapter_key(), attach(network, plan, self.lora, parts)
        return network

    def adapted_plan(self, plan: ParallelPlan) -> ParallelPlan:
        """`plan` with the rows of the adapters."""
        if self.lora is None:
            return plan
        if self._adapter_rows[0] != self._adapter_key():
            module: Any = self
            module.build_network("meta")
        return replace(plan, splits={**plan.splits, **self._adapter_rows[1]})

    def _adapter_key(self) -> object:
        return self.lora, tuple(self._joined_layers())

    def _joined_layers(self) -> Collection[str]:
        """Packed layers with one adapter for all of their output."""
        assert self.lora is not None
        if self.lora.joined is not None:
            return tuple(self.adapter_parts()) if self.lora.joined else ()
        record = self.source_record  # type: ignore[attr-defined]
        return () if record is None else record.get("joined", ())

    def adapter_problems(self, config: ParallelConfig) -> list[str]:
        """What the layout can't do with the adapters, as explained sentences."""
        if self.lora is None:
            return []
        try:
            rows = self.adapted_plan(ParallelPlan()).splits
        except ValueError:
            return []  # told where the network is built
        if not any(split.role is Role.EXPERT for split in rows.values()):
            return []
        problems = []
        if config.expert_tensor_size > 1:
            problems.append(
                f"expert_tensor_parallel_size={config.expert_tensor_size}: adapters of experts are"
                " not split; set it to 1, or leave the experts out of lora.targets"
            )
        if config.runtime.exact_dropout and self.lora.dropout > 0:
            problems.append(
                f"runtime.exact_dropout=True with lora.dropout={self.lora.dropout}: rows of experts"
                " have no place in a sequence; leave the experts out of lora.targets, or set one"
                " to 0"
            )
        return problems

    # ------------------------------------------------------------------ checkpoints

    def record_adapters(self, checkpoint: dict[str, Any]) -> None:
        """Note the adapters in a checkpoint, and take the frozen base out if asked for."""
        if self.lora is None:
            return
        alone = self.lora.checkpoint == "adapters"
        checkpoint[ADAPTER_RECORD] = {
            "config": self.lora,
            "without_base": alone,
        }
        if alone and "state_dict" in checkpoint:
            frozen = self._frozen_names()
            checkpoint["state_dict"] = {
                n: v for n, v in checkpoint["state_dict"].items() if n not in frozen
            }

    def names_elsewhere(self, objects: Mapping[str, Any]) -> frozenset[str]:
        """Canonical names of parameters that a checkpoint with these objects leaves to the base.

        ValueError where it holds adapters alone and this module has no base.
        """
        record = objects.get(ADAPTER_RECORD)
        if record is None or not record["without_base"]:
            return frozenset()
        module: Any = self
        if module.initial_values is None and not module.holds_weights:
            source = (objects.get("source_record") or {}).get("folder")
            raise ValueError(
                "the checkpoint holds adapters alone, and this module has no base: make it by"
                f" {type(self).__name__}.from_hf({source or 'the base'!r}) before add_lora, or"
                " load_from_checkpoint(..., base=...)"
            )
        # A subclass may train more than adapters; that is in the checkpoint.
        network, prefix = module.build_network("meta"), module.network_attribute
        return frozenset(
            f"{prefix}.{name}"
            for name, parameter in network.named_parameters()
            if not is_adapter(name) and (self.lora is None or not parameter.requires_grad)
        )

    def _frozen_names(self) -> frozenset[str]:
        module: Any = self
        held = module.named_parameters(remove_duplicate=False)
        frozen = ((n, p) for n, p in held if not (is_adapter(n) or p.requires_grad))
        return frozenset(canonical_name(name) for name, _ in frozen)


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
