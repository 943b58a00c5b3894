"""On request: what must be equal or finite while a layout trains, checked every so many steps.

A wrong reduction, a weight that drifted on one replica or a sampler that feeds tensor ranks
differently trains on without a word. `SanityChecks` finds it in the step in which it happens, and
names the tensor and the ranks; every rank raises the same error. The idea is nanotron's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from megatron_lightning.config.validate import ConfigurationError
from megatron_lightning.parallel.checks import (
    ReplicasDifferError,
    check_replicas,
    replicated_tensors,
)
from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.strategies import MegatronStrategy


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One violated check, as one rank saw it."""

    check: str
    """replicas, tied, finite or batches."""
    name: str
    """Tensor at fault."""
    ranks: tuple[int, ...]
    """Global ranks that hold other values than most, or values that are not finite."""
    message: str


class SanityError(RuntimeError):
    """A check failed on some rank. The same error is raised on all ranks."""

    def __init__(self, step: int, findings: list[Finding]) -> None:
        self.step = step
        """Optimizer steps done when it was found."""
        self.findings = tuple(findings)
        lines = "\n".join(f"  - {finding.check}: {finding.message}" for finding in findings)
        super().__init__(f"sanity checks failed after {step} optimizer steps:\n{lines}")


class SanityChecks(L.Callback):
    """Checks a run with `MegatronStrategy`; add it to the Trainer's callbacks to switch it on.

    Cost of a checked step: `replicas` reads every parameter once through some eight passes of
    integer arithmetic, in slices of 16 MiB (512 MiB of temporaries), and sends 8 bytes a tensor;
    `finite` reads gradients and parameters once; `batches` reads the batch; each waits for the
    device once and adds one small CPU reduction. Steps in between cost nothing.

    Parameters
    ----------
    every_n_steps
        Optimizer steps between two checks; the first is when training starts.
    replicas
        Check that parameters are bitwise equal over data (and context) ranks, and those that tensor
        ranks hold as a whole are equal over these. FSDP2's shards are no replicas and are left out.
    tied
        Check that both copies of a parameter that the first and the last pipeline stage share are
        equal.
    finite
        Check that gradients before the step, and parameters after it, hold no NaN and no infinity.
        With precision="16-mixed" gradients are left out: loss scaling skips such steps itself.
    batches
        Check that ranks that work on one batch together (tensor, pipeline, context) got the same
        one.

    Raises
    ------
    SanityError
        In the hook that finds something.

    """

    def __init__(
        self,
        every_n_steps: int = 100,
        *,
        replicas: bool = True,
        tied: bool = True,
        finite: bool = True,
        batches: bool = True,
    ) -> None:
        if every_n_steps < 1:
            raise ConfigurationError(
                [f"SanityChecks(every_n_steps={every_n_steps}): give at least 1 step"]
            )
        self.every_n_steps = every_n_steps
        self.replicas, self.tied = replicas, tied
        self.finite, self.batches = finite, batches
        self._checked_step = -1

    # ------------------------------------------------------------------ hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse other strategies."""
        if not isinstance(trainer.strategy, MegatronStrategy):
            raise ConfigurationError(
                [
                    f"SanityChecks with {type(trainer.strategy).__name__}: it knows the replicas of"
                    " MegatronStrategy only; leave it out"
                ]
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check what training begins with: initial weights, or those of a checkpoint."""
        self._check_parameters(trainer)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Compare this batch over the ranks that share it."""
        if self.batches and trainer.global_step % self.every_n_steps == 0:
            mesh = _strategy(trainer).mesh
            self._raise_together(trainer, list(_batch_findings(batch, mesh)))

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        """Look for gradients that are not finite, before clipping."""
        if self.finite and trainer.global_step % self.every_n_steps == 0:
            strategy = _strategy(trainer)
            update = None if strategy.scales_loss else strategy.update
            gradients = {} if update is None else update.gradients()
            found = list(_finite_findings(gradients, strategy.mesh, "gradient"))
            self._raise_together(trainer, found)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Check parameters after an optimizer step."""
        step = trainer.global_step
        if step % self.every_n_steps == 0 and step != self._checked_step:
            self._check_parameters(trainer)

    # ------------------------------------------------------------------ checks

    def _check_parameters(self, trainer: Trainer) -> None:
        strategy = _strategy(trainer)
        self._checked_step = trainer.global_step
        model, mesh = strategy.parallel_model, strategy.mesh
        values = {name: p.detach() for name, p in model.parameters.items()}
        found: list[Finding] = []
        if self.replicas:
            whole = {name: v for name, v in values.items() if not isinstance(v, DTensor)}
            dense = {name: v for name, v in whole.items() if not model.table[name].expert}
            experts = {name: v for name, v in whole.items() if model.table[name].expert}
            found += _differing("replicas", dense, mesh, "dp_cp")
            found += _differing("replicas", experts, mesh, "edp")
            unsplit = {n: v for n, v in experts.items() if model.table[n].split.dim is None}
            found += _differing("replicas", unsplit, mesh, "etp")
            local = {name: _local(value) for name, value in values.items()}
            found += _differing("replicas", replicated_tensors(local, model.table), mesh, "tp")
        if self.tied:
            copies = {name: _local(values[name]) for name in model.tied if name in values}
            found += _differing("tied", copies, mesh, "edges")
        if self.finite:
            found += _finite_findings(values, mesh, "parameter")
        self._raise_together(trainer, found)

    def _raise_together(self, trainer: Trainer, found: list[Finding]) -> None:
        """Raise on every rank what any rank found."""
        mesh = _strategy(trainer).mesh
        if mesh.world_size > 1:
            votes = torch.tensor(len(found))
            dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=mesh.control_group)
            if int(votes) == 0:
                return
            everyone: list[list[Finding] | None] = [None] * mesh.world_size
            dist.all_gather_object(everyone, found, group=mesh.control_group)
            found = list(dict.fromkeys(one for rank in everyone for one in rank or []))
        if found:
            raise SanityError(trainer.global_step, found)


def _strategy(trainer: Trainer) -> MegatronStrategy:
    return cast(MegatronStrategy, trainer.strategy)


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _differing(
    check: str,
    tensors: Mapping[str, Tensor],
    mesh: ParallelMesh,
    axis: str,
    what: str = "parameter",
) -> list[Finding]:
    try:
        check_replicas(tensors, mesh.axis(axis), what=what)
    except ReplicasDifferError as error:
        return [Finding(check=check, name=error.name, ranks=error.ranks, message=str(error))]
    return []


def _finite_findings(
    tensors: Mapping[str, Tensor], mesh: ParallelMesh, what: str
) -> Iterator[Finding]:
    """The first tensor with a NaN or an infinity. Extremes are NaN as soon as one element is."""
    named = {name: _local(tensor) for name, tensor in tensors.items() if tensor.numel()}
    if not named:
        return
    extremes = torch.stack(
        [torch.stack(tuple(tensor.aminmax())).float() for tensor in named.values()]
    )
    bad = (~extremes.isfinite().all(dim=1)).nonzero().flatten().tolist()
    if bad:
        name = list(named)[bad[0]]
        count = int((~named[name].isfinite()).sum())
        yield Finding(
            check="finite",
            name=name,
            ranks=(mesh.rank,),
            message=(
                f"{what} {name} holds {count} of {named[name].numel()} elements that are NaN or"
                f" infinite on rank {mesh.rank}; {len(bad)} of {len(named)} tensors do in all"
            ),
        )


def _batch_findings(batch: Any, mesh: ParallelMesh) -> Iterator[Finding]:
    leaves, _ = pytree.tree_flatten_with_path(batch)
    tensors = {
        pytree.keystr(path) or "batch": leaf for path, leaf in leaves if isinstance(leaf, Tensor)
    }
    shapes = repr([(name, tuple(t.shape), str(t.dtype)) for name, t in tensors.items()])
    form = torch.tensor(list(shapes.encode()), dtype=torch.int64)
    # Forms first, as a tensor of one shape: ranks whose batches look different compare no content.
    digest = (form * (torch.arange(len(form)) * 2 + 1)).sum().to(mesh.device)
    for axis in ("tp", "pp", "cp"):
        differs = _differing("batches", {"batch": digest}, mesh, axis, "form of the")
        yield from differs or _differing("batches", tensors, mesh, axis, "field")
