"""How attention reaches the tokens of other context ranks. See `parallel/context/apply.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from megatron_lightning.config.names import NamesFields

ContextForm = Literal["ring", "all_gather", "all_to_all", "hierarchical"]


@dataclass(frozen=True, kw_only=True)
class ContextConfig(NamesFields):
    """The form of context-parallel attention."""

    form: ContextForm = "ring"
    """ring (keys and values travel hop by hop), all_gather (all of them at once), all_to_all (heads
    are exchanged for tokens) or hierarchical (all_to_all between neighbours, ring between
    groups).
    """
    layer_forms: Sequence[ContextForm] = ()
    """Form of each layer, repeated over the layers, e.g. ("all_gather", "ring") beside a window
    pattern "SF"; empty: `form` for all."""
    inner_size: int = 2
    """hierarchical: ranks of one group of neighbours, between which heads are exchanged; it divides
    context_parallel_size."""

    head_groups: int = 1
    """all_to_all alone: into how many groups, at most, a rank's key/value heads are dealt, whose
    exchanges hide behind attention of other groups; more are worth it where links are slow. More
    than one are exchanged by collectives, whatever `peer_memory` says."""
    peer_memory: bool = False
    """all_to_all alone, in one group: whether heads are written to the memory of the other GPUs of
    the host, where that can be; else collectives exchange them. Off by default until its numbers
    and the end of its processes have been seen on GPUs."""

    def form_of(self, layer: int | None) -> ContextForm:
        """Form of layer number `layer` (from 0); None: of a core outside of numbered layers."""
        if layer is None or not self.layer_forms:
            return self.form
        return self.layer_forms[layer % len(self.layer_forms)]

    @property
    def forms(self) -> set[ContextForm]:
        """All forms that are used."""
        return set(self.layer_forms) or {self.form}

    @property
    def contiguous(self) -> bool:
        """Whether a rank holds neighbouring tokens, a slice of each sample: with all_to_all alone,
        where ranks have whole sequences in attention and no cut need balance their work.
        """
        return self.forms == {"all_to_all"}

    def check(self, context_parallel_size: int) -> list[str]:
        """Every violated rule, as a sentence with field, value and remedy."""
        known = get_args(ContextForm)
        problems = [
            f"context.form={form!r}: choose one of {known}"
            for form in dict.fromkeys((self.form, *self.layer_forms))
            if form not in known
        ]
        if self.head_groups < 1:
            problems.append(f"context.head_groups={self.head_groups}: it must be at least 1")
        elif self.head_groups > 1 and not self.contiguous:
            problems.append(
                f"context.head_groups={self.head_groups} with forms {sorted(self.forms)}: only"
                " all_to_all alone deals heads; leave it at 1"
            )
        if self.peer_memory and not self.contiguous:
            problems.append(
                f"context.peer_memory=True with forms {sorted(self.forms)}: only all_to_all alone"
                " exchanges heads that way; leave it at False"
            )
        size, inner = context_parallel_size, self.inner_size
        if size > 1 and "hierarchical" in self.forms:
            fits = [n for n in range(2, size) if size % n == 0]
            if not fits:
                problems.append(
                    f"context.form='hierarchical' with context_parallel_size={size}: there are no"
                    " two factors above 1; use ring, all_gather or all_to_all"
                )
            elif inner not in fits:
                problems.append(
                    f"context.inner_size={inner}: with context_parallel_size={size} use one of"
                    f" {fits}"
                )
        return problems

    def inner_of(self, context_parallel_size: int) -> int:
        """Size of the inner axis of the mesh; 1 where nothing is hierarchical."""
        used = context_parallel_size > 1 and "hierarchical" in self.forms
        return self.inner_size if used else 1
