"""Parallelism: one file per dimension, over the axes of one `ParallelMesh`."""

from megatron_lightning.parallel.axes import MeshAxis
from megatron_lightning.parallel.checks import (
    ReplicasDifferError,
    check_replicas,
    replicated_tensors,
)
from megatron_lightning.parallel.context.apply import apply_context_parallel, check_context_parallel
from megatron_lightning.parallel.core_attention import CoreAttention
from megatron_lightning.parallel.exact_dropout import ExactDropout
from megatron_lightning.parallel.materialise import materialise, unknown_values
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.random import Constant, Initial, Normal, Uniform
from megatron_lightning.parallel.ranks import mesh_sizes, rank_lists
from megatron_lightning.parallel.streams import DropoutStreams, Layout, Streams
from megatron_lightning.parallel.tensor import apply_tensor_parallel, padded_size
from megatron_lightning.parallel.tensor_checks import check_tensor_plan

__all__ = [
    "Constant",
    "CoreAttention",
    "DropoutStreams",
    "ExactDropout",
    "Initial",
    "Layout",
    "MeshAxis",
    "Normal",
    "ParallelMesh",
    "ReplicasDifferError",
    "Streams",
    "Uniform",
    "apply_context_parallel",
    "apply_tensor_parallel",
    "check_context_parallel",
    "check_replicas",
    "check_tensor_plan",
    "materialise",
    "mesh_sizes",
    "padded_size",
    "rank_lists",
    "replicated_tensors",
    "unknown_values",
]
