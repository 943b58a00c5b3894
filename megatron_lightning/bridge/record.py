"""What an imported model was, so that it is exported as it came."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self


@dataclass(frozen=True, kw_only=True)
class SourceRecord:
    """Plain values, kept in checkpoints of the module."""

    folder: str
    """Where it was; tokenizer files are copied from there when it still exists."""
    config: Mapping[str, Any]
    """Its config.json, with the overrides of the import."""
    dtype: str
    """Dtype of its tensors, as safetensors files write it."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Tensors of another dtype."""
    bare: bool = False
    """Whether its names were those of the bare model, without a prefix."""
    name: str = ""
    """Its id on the hub; empty for a folder."""
    joined: tuple[str, ...] = ()
    """Layers here that pack projections, and are one tensor there as well; adapters then have one
    pair for all of them (`LoraConfig.joined`)."""

    def to_dict(self) -> dict[str, Any]:
        """As a plain dict."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """From `to_dict`'s form."""
        return cls(**values)
