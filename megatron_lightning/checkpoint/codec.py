"""Trees of Python objects as tagged JSON, so that a checkpoint needs no pickle.

None, bool, int, float, str, lists and dictionaries with text keys are themselves; everything else
is a JSON object with the key "$" (`encode_values.py` lists the plain kinds). Tensors and arrays of
4 KiB or more are taken out and stored with the other tensors. What cannot be written is refused
with its place in the tree. Reading never imports, calls or looks up anything by name: dataclasses
and enums must be handed to the `Codec`. Two references to one object become two objects.
"""

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron_lightning.checkpoint.decode import Decoder
from megatron_lightning.checkpoint.encode import Encoded, Encoder
from megatron_lightning.checkpoint.encode_values import class_name


@dataclass(frozen=True, kw_only=True)
class Codec:
    """What can be written and read besides the plain kinds."""

    classes: tuple[type, ...] = ()
    """Dataclasses and enums that may occur, each stored under its module and qualified name."""

    def __post_init__(self) -> None:
        """Refuse classes of other kinds and two classes of one name."""
        for cls in self.classes:
            if not (dataclasses.is_dataclass(cls) or issubclass(cls, enum.Enum)):
                raise ValueError(
                    f"classes: {cls!r} is neither a dataclass nor an enum; store dicts instead"
                )
        if len(self.by_name) != len(set(self.classes)):
            raise ValueError(f"classes: two of {list(self.classes)} have the same name; rename one")

    @property
    def by_name(self) -> dict[str, type]:
        """The classes by the name under which they are stored."""
        return {class_name(cls): cls for cls in self.classes}

    def encode(self, tree: Any) -> Encoded:
        """Raises ValueError naming the place of everything in `tree` that cannot be written."""
        encoder = Encoder(self.classes)
        result = encoder.encode(tree, ())
        if encoder.problems:
            raise ValueError(
                "cannot be stored in a checkpoint:\n  " + "\n  ".join(encoder.problems[:20])
            )
        return Encoded(result, encoder.tensors)

    def decode(
        self, tree: Any, tensors: Mapping[str, torch.Tensor] | None = None, where: str = "the tree"
    ) -> Any:
        """The inverse of `encode`; tensors are on the CPU. Raises CheckpointError naming `where`
        and the place in it.
        """
        return Decoder(self.by_name, tensors or {}, where).decode(tree, ())

    def dry_run(self, tree: Any) -> list[str]:
        """What `encode` would refuse, a sentence each, beginning with the owner (the first key) and
        the path of keys.
        """
        encoder = Encoder(self.classes)
        encoder.encode(tree, ())
        return encoder.problems
