"""The cut model of one rank: what `parallelize` returns and the strategy works with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from megatron_lightning.config.parallel import ParallelConfig
from megatron_lightning.config.plan import ParallelPlan, ParameterInfo
from megatron_lightning.layers.moe.experts import ExpertLinear
from megatron_lightning.layers.moe.layer import MoELayer
from megatron_lightning.parallel.data import GradientBuckets
from megatron_lightning.parallel.frozen_units import FrozenUnits
from megatron_lightning.parallel.fsdp import reshard
from megatron_lightning.parallel.lanes import hold_accumulators
from megatron_lightning.parallel.main_gradient import AddsAtOnce
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.parallel.quantized.quantization import Quantization
from megatron_lightning.parallel.schedules.actions import Action, Kind, Placement
from megatron_lightning.parallel.sequence import HeldTokens
from megatron_lightning.parallel.sharded_gradients import ShardedGradients
from megatron_lightning.parallel.streams import Streams
from megatron_lightning.parallel.weight_gradient import WeightGradients
from megatron_lightning.runtime.expert_balance import ExpertBalance
from megatron_lightning.runtime.layer_graphs import LayerGraphs
from megatron_lightning.runtime.stages import Carried, PipelinedNetwork


@dataclass(kw_only=True)
class ParallelModel:
    """This rank's part of the model, with the table that says what each parameter is."""

    plan: ParallelPlan | None
    """None: a user's module without a plan, under data parallelism only."""
    pipelined: PipelinedNetwork | None
    """None when one stage holds the whole network."""
    placement: Placement
    """Where the pipeline's stages lie."""
    holds_last: bool
    """True where the loss is computed: on the rank of the last pipeline stage."""
    table: Mapping[str, ParameterInfo]
    """Canonical name -> what the parameter is and which box of it this rank holds."""
    parameters: Mapping[str, nn.Parameter]
    """Canonical name -> the local parameter."""
    chunk_of: Mapping[str, int]
    """Canonical name -> the chunk that holds it."""
    tied: tuple[str, ...]
    """Canonical names of parameters of which the first and the last stage hold a copy each, on two
    ranks, in an order equal on both."""
    tied_within_rank: bool = False
    """True when they are on one rank, which holds such parameters once."""
    streams: Streams | None
    networks: tuple[nn.Module, ...] = field(default=(), init=False)
    """The cut network: one for each chunk of this rank. Empty without a plan."""
    has_remote_experts: bool = field(default=False, init=False)
    """Whether tokens of other data ranks pass through experts here, and the other way round."""
    sharded_roots: tuple[tuple[FSDPModule, ...], ...] = field(default=(), init=False)
    """Fully sharded modules of each chunk; empty when parameters aren't sharded."""
    frozen_units: FrozenUnits | None = field(default=None, init=False, repr=False)
    """Which units of them are not trained; None when parameters aren't sharded."""
    compute_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict, init=False)
    """Dtype in which the network reads parameters that are kept in another, by canonical name."""
    initial_values: Mapping[nn.Parameter, Callable[[], Tensor]] = field(
        default_factory=dict, init=False, repr=False
    )
    """How to draw parameters again as they were before their values were rounded, of fully sharded
    ones this rank's shard."""
    buckets: GradientBuckets | ShardedGradients | None = field(default=None, init=False)
    """None when not training, or under manual optimization."""
    expert_balance: ExpertBalance | None = field(default=None, init=False)
    """The routers of this rank; None without any."""
    quantization: Quantization | None = field(default=None, init=False)
    """Linear layers in low precision; None without any."""
    graphs: LayerGraphs | None = field(default=None, init=False)
    """CUDA graphs of layers; None without."""
    weight_gradients: WeightGradients | None = field(default=None, init=False)
    """Weight gradients that wait, when the schedule splits backwards."""
    _accumulators: list[Any] = field(default_factory=list, init=False, repr=False)
    """What keeps gradients on the main stream where micro-batches have streams of their own."""

    @property
    def num_chunks(self) -> int:
        """Chunks (virtual stages) of this rank."""
        return self.placement.num_chunks

    def look_for_unfrozen(self) -> None:
        """Before the passes of a batch: fully sharded modules may be trained since the last one."""
        if self.frozen_units is not None:
            self.frozen_units.refresh()

    def begin_forward(
        self,
        batch_index: int,
        micro_batch: int,
        first_sample: int,
        chunk: int,
        held: HeldTokens | None = None,
    ) -> None:
        """Set dropout streams to the position of this forward."""
        if self.graphs is not None:
            self.graphs.begin_forward()
        if self.streams is not None:
            self.streams.begin(
                batch_index,
                micro_batch,
                first_sample,
                chunk,
                held=held,
            )

    def begin_evaluation(self, held: HeldTokens | None = None) -> None:
        """Say which tokens of the sequence the forward of a step without training sees."""
        if self.graphs is not None:
            self.graphs.end_forward()
        if self.streams is not None:
            self.streams.held = held

    def run_chunk(
        self, chunk: int, carried: Carried | None, step: Callable[[], Any]
    ) -> tuple[bool, Any]:
        """Run `step` with one chunk active; see `PipelinedNetwork.run_stage`."""
        if self.pipelined is None:
            return True, step()
        return self.pipelined.run_stage(chunk, carried, step)

    def set_buckets(
        self,
        mesh: ParallelMesh,
        config: ParallelConfig,
        *,
        enabled: bool,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Make gradient buckets of `dtype` for what is trainable now, or remove them."""
        self.release_buckets()
        self.reshard()  # a run that failed may have left whole parameters in the modules
        if not enabled:
            return
        chunks: list[dict[str, nn.Parameter]] = [{} for _ in range(self.num_chunks)]
        for name, parameter in self.parameters.items():
            chunks[self.chunk_of[name]][name] = parameter
        if self.sharded_roots:
            self.buckets = ShardedGradients(
                self.sharded_roots,
                self.parameters,
                self.table,
                mesh,
                sequence_parallel=config.sequence_parallel,
                tied=self.tied,
                reduce_each=config.data_parallel.reduce_each_micro_batch,
            )
            return
        self.buckets = GradientBuckets(
            chunks,
            self.table,
            mesh,
            sequence_parallel=config.sequence_parallel,
            sharded=config.data_parallel.sharding == "optimizer",
            tied=self.tied,
            bucket_size=config.data_parallel.bucket_size,
            overlap=config.data_parallel.overlap_grad_reduce,
            dtype=dtype,
            streams=self._side_streams() if mesh.lanes is None else mesh.lanes.streams,
        )
        if self.graphs is not None:
            self.graphs.set_buckets(self.buckets)
        if mesh.lanes is not None:
            trained = (p for p in self.parameters.values() if p.requires_grad)
            self._accumulators = hold_accumulators(trained)
        split = self.weight_gradients is not None
        if self.weight_gradients is not None:
            self.weight_gradients.target = self.buckets
        if config.data_parallel.fuse_weight_gradients:
            modules = [module for network in self.networks for module in network.modules()]
            served: list[Any] = [m for m in modules if hasattr(m, "sums_weight_gradient")]
            if split:  # the others go to the same sums when their turn comes
                served = [m for m in served if m.weight_sink is None or m.weight_sink.in_regions]
            if mesh.lanes is not None:  # else gradients of experts cross streams, which holds them
                served += [_add_at_once(m) for m in modules if isinstance(m, ExpertLinear)]
            self.buckets.serve(served)

    @property
    def backward_is_shared(self) -> bool:
        """Whether data ranks wait for one another in each backward pass, so that none may leave it
        out.
        """
        return self.has_remote_experts or any(self.sharded_roots)

    def _side_streams(self) -> list[Any]:
        """Streams beside the main one on which layers run a part of their work."""
        modules = (module for network in self.networks for module in network.modules())
        sides = [module.side for module in modules if isinstance(module, MoELayer)]
        return list({id(side): side.stream for side in sides if side is not None}.values())

    def arming(self) -> Callable[[Action], None] | None:
        """What to call before the last B or W of each chunk in the run that ends a window, so that
        buckets are reduced as they fill. None without buckets.
        """
        buckets, weights = self.buckets, self.weight_gradients
        if buckets is None:
            return None
        contributors = {chunk: {chunk} for chunk in range(self.num_chunks)}
        if self.tied_within_rank:  # the head's chunk adds to the embedding's parameters
            contributors[0].add(self.num_chunks - 1)

        def arm(action: Action) -> None:
            coming = None
            if action.kind is Kind.W:
                assert weights is not None
                coming = weights.names((action.micro_batch, action.chunk))
            for chunk, missing in contributors.items():
                if action.chunk in missing:
                    missing.discard(action.chunk)
                    if not missing:
                        buckets.arm(chunk, coming)

        return arm

    def end_backward(self) -> None:
        """After the passes that `arming` was for: what is left of the reductions starts."""
        if isinstance(self.buckets, GradientBuckets):
            self.buckets.launch_rest()

    def reshard(self) -> None:
        """Free what fully sharded modules have gathered; their shards are what counts then."""
        for root in (root for chunk in self.sharded_roots for root in chunk):
            reshard(root)

    def release_buckets(self) -> None:
        """Remove the buckets with their hooks, so that autograd works on the parameters as usual
        again.
        """
        self._accumulators = []
        if self.graphs is not None:
            self.graphs.set_buckets(None)
        if self.buckets is not None:
            self.buckets.release()
            self.buckets = None
        if self.weight_gradients is not None:
            self.weight_gradients.target = None

    def average_gradients(self, mesh: ParallelMesh) -> None:
        """Average what is in `p.grad` over the data axis (manual optimization: as DDP, after each
        backward). Experts have got gradients of all tokens that were sent to them.
        """
        if mesh.dp_cp.size == 1:
            return
        for name in sorted(self.parameters):
            parameter = self.parameters[name]
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            axis = mesh.axis("edp") if self.table[name].expert else mesh.dp_cp
            if axis.size > 1:
                dist.all_reduce(parameter.grad, group=axis.group)
            parameter.grad /= mesh.dp_cp.size


def _add_at_once(experts: ExpertLinear) -> AddsAtOnce:
    experts.weight_sink = sink = AddsAtOnce(experts.weight)
    return sink


Buffers = Sequence[tuple[nn.Module, str]]
"""(module, attribute) of each; the tensors themselves may be replaced."""


def stateful_buffers(module: nn.Module) -> Buffers:
    """Buffers that are saved with the module: what training changes, as batch norm's statistics."""
    return [
        (part, name)
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
        if buffer is not None and name not in part._non_persistent_buffers_set
    ]


def share_buffers(buffers: Buffers, mesh: ParallelMesh) -> None:
    """Give every data-parallel replica the values of the first, as DDP does before a forward."""
    axis = mesh.dp_cp
    if axis.size == 1 or not buffers:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for module, name in buffers:
        tensor = module.get_buffer(name)
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for tensors in by_dtype.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.broadcast(flat, src=axis.ranks[0], group=axis.group)
        values = flat.split([tensor.numel() for tensor in tensors])
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value.view(tensor.shape))
