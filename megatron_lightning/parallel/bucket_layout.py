"""Which parameters share a flat buffer of gradients, and in which order they lie there."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_lightning.config.plan import ParameterInfo
from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.flat import Replicas, Slot, lay_out
from megatron_lightning.parallel.mesh import ParallelMesh


@dataclass(frozen=True, kw_only=True)
class BucketLayout:
    """Of this rank's trainable parameters; the arguments are those of `GradientBuckets`."""

    table: Mapping[str, ParameterInfo]
    mesh: ParallelMesh
    tied: Sequence[str]
    sharded: bool
    bucket_size: int
    dtype: torch.dtype

    def lay_out(
        self, chunks: Sequence[Mapping[str, Parameter]], laid_out: Collection[str]
    ) -> Iterator[tuple[Tensor, list[Slot]]]:
        """Zero buffers with the slots in them, for all parameters that require gradients but those
        in `laid_out`; it may grow between two buffers.
        """
        # Backward goes from the last chunk and parameter to the first, and buckets fill like that.
        for chunk in reversed(range(len(chunks))):
            groups: dict[tuple[bool, bool, torch.dtype], dict[str, Parameter]] = {}
            for name, parameter in reversed(list(chunks[chunk].items())):
                if parameter.requires_grad and name not in laid_out:
                    groups.setdefault(self._kind(name, parameter), {})[name] = parameter
            for (expert, _, _), parameters in groups.items():
                yield lay_out(
                    parameters,
                    self.table,
                    chunk,
                    self._replicas(expert=expert),
                    bucket_size=self.bucket_size,
                    dtype=self.dtype,
                )

    def _kind(self, name: str, parameter: Parameter) -> tuple[bool, bool, torch.dtype]:
        """Parameters of one kind share a buffer.

        Sharded parameters are gathered as they lie, so they are of one dtype. Tied copies lie alone
        and thereby alike on both edge stages, which sum them part by part.
        """
        edge = name in self.tied and self.mesh.axis("edges").size > 1
        return self.table[name].expert, edge, parameter.dtype

    def _replicas(self, *, expert: bool) -> Replicas:
        axis = "edp" if expert else "dp"
        if self.sharded:
            return Replicas(
                shard=self.mesh.axis(f"{axis}_shard"), replica=self.mesh.axis(f"{axis}_replica")
            )
        whole = self.mesh.axis("edp") if expert else self.mesh.dp_cp
        return Replicas(shard=MeshAxis(name="shard"), replica=whole)
