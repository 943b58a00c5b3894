"""The part of the strategy that knows processes: launching them, the mesh over them, Trainer's
collectives.
"""

from __future__ import annotations

import signal
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from typing_extensions import override

from megatron_lightning.config.field_types import wrong_kind
from megatron_lightning.config.parallel import ParallelConfig
from megatron_lightning.config.plan import ParallelPlan
from megatron_lightning.config.validate import check_layout, raise_if_any
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.strategies import _compat, failure
from megatron_lightning.strategies.fork_launcher import ForkLauncher
from megatron_lightning.strategies.guard import RunGuard
from megatron_lightning.strategies.launchers import ScriptLauncher
from megatron_lightning.strategies.process_group import abort_groups, init_process_group
from megatron_lightning.strategies.targets import has_experts


def _plan_problems(plan: object) -> list[str]:
    if plan is None or isinstance(plan, ParallelPlan):
        return []
    return ["plan" + wrong_kind(plan, ParallelPlan, or_none=True)]


class MeshStrategy(ParallelStrategy):
    """A Lightning strategy over a `ParallelMesh`. Abstract: `MegatronStrategy` adds the model and
    its steps.
    """

    def __init__(self, config: ParallelConfig, plan: ParallelPlan | None) -> None:
        super().__init__()
        raise_if_any(check_layout(config) + _plan_problems(plan))
        self.config = config
        self.num_nodes = 1
        self._plan = plan
        self._mesh: ParallelMesh | None = None
        self._guard: RunGuard | None = None
        self._interrupted = False
        self._failed = False

    # ------------------------------------------------------------------ processes and mesh

    @property
    def mesh(self) -> ParallelMesh:
        """The mesh; RuntimeError before the processes exist."""
        if self._mesh is None:
            raise RuntimeError(
                "strategy.mesh: there is none before Trainer.fit (or validate, ...) has started "
                "the processes"
            )
        return self._mesh

    @property
    def user_plan(self) -> ParallelPlan | None:
        """The plan that was given to the strategy."""
        return self._plan

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def window_is_open(self) -> bool:
        """Whether gradients of some batches wait for the optimizer step."""
        return False

    def choose_start(self, path: Any) -> Any:
        """What to resume from where the newest is wanted; `path` is the newest checkpoint, if
        any.
        """
        return path

    def at_step_boundary(self, complete: int) -> None:
        """After a batch and the hooks of all callbacks; `complete` is the newest step that all
        ranks have copied.
        """

    @property
    def num_processes(self) -> int:
        """Ranks on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def is_distributed(self) -> bool:
        """Whether samples are dealt to several data-parallel ranks. Lightning's connector asks: it
        then puts a DistributedSampler into every plain DataLoader.
        """
        return self.num_processes * self.num_nodes > self.config.model_parallel_size

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.mesh.dp.size, "rank": self.mesh.dp.rank}

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return False

    def set_world_ranks(self) -> None:
        """Tell the cluster environment who this process is (Lightning's connector calls it)."""
        _compat.set_world_ranks(self)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        assert self.lightning_module is not None
        for_experts = has_experts(self.lightning_module, self._plan)
        if self._mesh is None or (for_experts and not self._mesh.for_experts):
            timeout = timedelta(seconds=self.config.runtime.timeout_seconds)
            if self.world_size > 1 and not dist.is_initialized():
                init_process_group(self, timeout)
            self._mesh = ParallelMesh.build(
                device=self.root_device,
                tensor=self.config.tensor_parallel_size,
                pipeline=self.config.pipeline_parallel_size,
                data_replicas=self.config.data_parallel.replicas,
                context=self.config.context_parallel_size,
                expert=self.config.expert_parallel_size,
                expert_tensor=self.config.expert_tensor_size,
                context_inner=self.config.context.inner_of(self.config.context_parallel_size),
                order=tuple(self.config.runtime.axis_order),
                timeout=timeout,
                for_experts=for_experts,
                side_by_side=self.config.expert.overlap_all_to_all,
                stage_ctas=self.config.pipeline.message_ctas,
            )
        self._interrupted = False
        self._guard = RunGuard(self, self.lightning_module.trainer)
        if isinstance(self._launcher, (ScriptLauncher, ForkLauncher)):
            self._launcher.joined()

    def give_up_if_alone(self) -> None:
        """The beginning of `teardown`: after a failure that other ranks don't have, end collectives
        that wait for them, since freeing memory would wait too.
        """
        if self.fails_alone:
            abort_groups(self.mesh)

    @override
    def teardown(self) -> None:
        """Free what a call of the Trainer held. The watch ends last: freeing may hang."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        if self._guard is not None:
            self._guard.close()

    def end_started_ranks(self) -> None:
        """Let no rank that this process has started outlive it."""
        if isinstance(self._launcher, ScriptLauncher):
            self._launcher.kill(signal.SIGKILL)

    # ------------------------------------------------------------------ failures

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._interrupted = isinstance(exception, KeyboardInterrupt)
        self._failed = True
        if isinstance(self._launcher, ForkLauncher) and not self._launcher.is_rank:
            self._launcher.restore_callbacks()
        elif self._guard is not None:
            self._guard.report(exception)
        elif self.world_size > 1:
            failure.show(exception, self.global_rank)

    @property
    def shown_elsewhere(self) -> bool:
        """Whether the process that forked this rank raises, and so shows, what happens here."""
        return isinstance(self._launcher, ForkLauncher)

    @property
    def store_file(self) -> str:
        """File through which forked ranks find each other; empty where they use an address."""
        return self._launcher.store_file if isinstance(self._launcher, ForkLauncher) else ""

    @property
    def failed_after_another(self) -> bool:
        """Whether this rank failed only because another had."""
        return self._guard is not None and self._guard.secondary

    @property
    def has_failed(self) -> bool:
        """Whether an exception, or a signal, ended a run in this process."""
        return self._failed

    @property
    def was_interrupted(self) -> bool:
        """Whether Ctrl-C ended the run."""
        return self._interrupted

    @property
    def fails_alone(self) -> bool:
        """Whether this rank is in hooks on an exception that other ranks don't have: a collective
        would wait for them in vain.
        """
        return self._guard is not None and self._guard.fails_alone

    def may_save(self, path: Any) -> bool:
        """Whether all ranks save this checkpoint together. RuntimeError where there are no ranks
        any more.
        """
        if isinstance(self._launcher, ForkLauncher) and not self._launcher.is_rank:
            raise RuntimeError(
                f"trainer.save_checkpoint({str(path)!r}): the ranks that held model and optimizer "
                f"have ended with the run; save with ModelCheckpoint(save_last=True) or in a "
                f"callback"
            )
        if self.fails_alone:
            failure.say(
                f"[rank {self.global_rank}] {path} is not saved: the other ranks, which hold parts "
                f"of it, did not fail with this one"
            )
        return not self.fails_alone

    # ------------------------------------------------------------------ collectives

    @override
    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized() and self._mesh is not None and not self.fails_alone:
            dist.barrier(group=self.mesh.control_group)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not dist.is_initialized() or self._mesh is None or self.fails_alone:
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src, group=self.mesh.control_group)
        return box[0]

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As Lightning's; an operation given by its name is over the data-parallel ranks, since
        the ranks of one model copy hold the same number.
        """
        if not isinstance(tensor, Tensor) or not dist.is_initialized() or self.fails_alone:
            return tensor
        if group is None and isinstance(reduce_op, str):
            group = self.mesh.dp.group
            if group is None:
                return tensor
        return _compat.reduce_tensor(tensor, group, reduce_op)
