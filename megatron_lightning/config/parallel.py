"""What the user says about the layout: degrees of parallelism, pipeline, data parallelism,
processes. Pure data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_lightning.config.checkpoint import CheckpointConfig
from megatron_lightning.config.context import ContextConfig
from megatron_lightning.config.expert import ExpertConfig
from megatron_lightning.config.loss_scale import LossScaleConfig
from megatron_lightning.config.names import NamesFields
from megatron_lightning.config.quantization import QuantizationConfig
from megatron_lightning.config.recompute import RecomputeConfig

ScheduleName = Literal["1f1b", "gpipe", "zb-h1", "zb-v"]
ShardingName = Literal["none", "optimizer", "fsdp"]
MomentsName = Literal["float32", "bfloat16"]
LauncherName = Literal["auto", "script", "fork"]
CudaGraphsName = Literal["none", "layers"]


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(NamesFields):
    """How layers are dealt to pipeline stages, and in which order micro-batches run."""

    virtual_pipeline_size: int = 1
    """Chunks of layers that each pipeline rank holds; above 1, schedule "1f1b" is interleaved."""
    schedule: ScheduleName = "1f1b"
    """Order of forwards and backwards: one-forward-one-backward, all forwards first (gpipe), or
    zero bubble, which computes weight gradients when a rank would wait (zb-h1; zb-v with two chunks
    a rank)."""
    layout: str | Sequence[Sequence[str]] | None = None
    """Explicit stages, e.g. "Et*3|t*4|t*4|t*2L" (E embedding, t layer, L head, | cut); None:
    balanced by cost."""
    embedding_cost: float = 0.0
    """Cost of the embedding in units of one layer, for the balanced split (a look-up costs next to
    nothing)."""
    head_cost: float = 1.0
    """Cost of final norm, head and loss in units of one layer, for the balanced split."""
    message_ctas: int | None = None
    """NCCL: multiprocessors (thread blocks) that a message between stages holds at most, by a
    communicator of its own (docs/pipeline.md). None: NCCL's choice, and no further communicator."""
    defer_head_gradient: bool = True
    """zb-h1, zb-v: put off the weight gradient of the head like that of the layers; False: take it
    at once, so that the logits' gradient is not kept for it, which may cost some bubble."""


@dataclass(frozen=True, kw_only=True)
class DataParallelConfig(NamesFields):
    """Gradients, optimizer state and parameters over the data axis (docs/data_parallel.md)."""

    bucket_size: int = 40_000_000
    """Elements of one flat gradient bucket; the reduction of a full bucket overlaps with the rest
    of backward."""
    overlap_grad_reduce: bool = True
    """Start a bucket's reduction as soon as its gradients are complete; False: all of them after
    backward."""
    fuse_weight_gradients: bool = True
    """Linear layers of this package add their weights' gradients to the float32 sums themselves,
    without a pass of its own. False: autograd hands them over, as `torch.autograd.grad` by weights
    or a second derivative in a step needs it. Without effect with sharding="fsdp"."""
    sharding: ShardingName = "none"
    """What the data ranks share out: nothing (each has all), "optimizer" (masters and optimizer
    state, ZeRO-1), or "fsdp" (parameters, gradients and optimizer state, FSDP2)."""
    replicas: int = 1
    """Copies of what is sharded: data ranks / replicas share one copy, so that its collectives stay
    among neighbouring ranks (HSDP). 1: one copy over all data (and context) ranks."""
    overlap_param_gather: bool = True
    """sharding="optimizer": let the next forward begin while updated parameters are still being
    gathered, where every reader is known to wait; False: gather all right after the step."""
    reshard_after_forward: bool = True
    """sharding="fsdp": free a layer's parameters after its forward and gather them again for its
    backward (ZeRO-3); False: keep them (ZeRO-2), less traffic for more memory."""
    reduce_each_micro_batch: bool = False
    """sharding="fsdp": reduce gradients after every micro-batch, so that only shards are kept;
    False: sum whole gradients and reduce them once a window."""
    moments_dtype: MomentsName = "float32"
    """With sharding: dtype in which optimizer state is kept between steps; "bfloat16" is
    rounded stochastically and halves it."""
    offload_optimizer: bool = False
    """sharding="optimizer": keep masters and optimizer state in host memory and step there."""


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig(NamesFields):
    """Processes, groups and random numbers."""

    launcher: LauncherName = "auto"
    """Who starts the ranks when nothing outside does: script (run the script again), fork, or auto
    (fork in notebooks)."""
    backend: str | None = None
    """torch.distributed backend; None: nccl on CUDA, gloo on CPU."""
    timeout_seconds: float = 600.0
    """A collective that takes longer ends the job."""
    save_on_preemption: bool = True
    """When SIGTERM or SIGUSR1 ends a fit: save `hpc_ckpt_N.ckpt` in the Trainer's default_root_dir,
    unless a callback saves on exceptions (docs/launching.md)."""
    seed: int | None = None
    """Seed of initial weights and dropout; None: the one of `seed_everything`, else 1234."""
    exact_dropout: bool = False
    """Draw dropout masks by global position, so that layouts can be compared with dropout on
    (slow, tests and verify)."""
    compile_layers: bool = False
    """torch.compile each of the plan's layers (about 15 % faster on one H200; compiling takes a
    minute).
    """
    cuda_graphs: CudaGraphsName = "none"
    """layers: run forward and backward of each layer as a CUDA graph, which saves the host's time
    where it is the limit: small models, short micro-batches, experts, FP8 (docs/speed.md)."""
    overlap_tensor_parallel: bool | None = None
    """sequence_parallel: multiply part by part, while other parts of the sequence are on their way
    between tensor ranks (docs/tensor_parallel.md). None: where GPUs write to each other's memory,
    but not with `quantization`; True: always, elsewhere by messages; False: one collective, then
    the whole product."""
    axis_order: Sequence[str] = ("pp", "dp", "cp", "tp")
    """Axes from slowest to fastest varying; the last holds neighbouring ranks."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(NamesFields):
    """All degrees of one layout, as the checks of `config.validate` see them."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_parallel_size: int = 1
    """Ranks that a layer's experts are dealt to; they may be those of the tensor, context and data
    axes (docs/expert_parallel.md)."""
    expert_tensor_parallel_size: int | None = None
    """Ranks that share the columns of one expert; None: tensor_parallel_size. 1 with tensor
    parallelism: experts stay whole, and tensor ranks may hold different ones."""
    sequence_parallel: bool = False
    micro_batch_size: int | None = None
    """Samples a data-parallel rank runs in one forward; None: the data module's, else derived from
    the batch."""
    pipeline: PipelineConfig = PipelineConfig()
    data_parallel: DataParallelConfig = DataParallelConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    recompute: RecomputeConfig = RecomputeConfig()
    context: ContextConfig = ContextConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    loss_scale: LossScaleConfig = LossScaleConfig()
    quantization: QuantizationConfig | None = None
    """Low precision of linear layers; None: none."""
    expert: ExpertConfig = ExpertConfig()

    @property
    def overlaps_tensor_parallel(self) -> bool | None:
        """What `runtime.overlap_tensor_parallel` comes to beside the other settings. In low
        precision products by parts are so many launches that the host is late with them.
        """
        if not self.sequence_parallel or self.runtime.cuda_graphs != "none":
            return False
        wanted = self.runtime.overlap_tensor_parallel
        return False if wanted is None and self.quantization is not None else wanted

    @property
    def expert_tensor_size(self) -> int:
        """`expert_tensor_parallel_size`, or what stands for None."""
        size = self.expert_tensor_parallel_size
        return self.tensor_parallel_size if size is None else size

    @property
    def expert_model_size(self) -> int:
        """Ranks that hold the experts of one model together: expert x expert tensor x pipeline."""
        return self.expert_parallel_size * self.expert_tensor_size * self.pipeline_parallel_size

    @property
    def folds_experts(self) -> bool:
        """Whether experts lie otherwise than the dense parameters do."""
        return self.expert_parallel_size > 1 or self.expert_tensor_size != self.tensor_parallel_size

    @property
    def model_parallel_size(self) -> int:
        """Ranks that work on one sample together: tensor x pipeline x context."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size
