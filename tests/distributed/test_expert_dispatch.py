"""Token dispatchers on several ranks against all experts in one process: outputs and gradients.

The experts are plain matrices, so that what is compared is where rows went and what came back.
"""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lightning.config.expert import ExpertConfig
from megatron_lightning.layers.moe.dispatcher import LocalDispatcher
from megatron_lightning.layers.moe.remote import apply_expert_parallel
from megatron_lightning.layers.moe.routing import Routing
from megatron_lightning.parallel.mesh import ParallelMesh
from tests.harness import run_ranks

HIDDEN, WIDTH, EXPERTS, TOPK, TOKENS = 6, 8, 4, 2, 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """How the ranks share experts and tokens."""

    dispatcher: str = "all_to_all"
    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence_parallel: bool = True
    routing: str = "random"
    uneven: bool = False
    """Ranks have different numbers of tokens."""


class Layer(torch.nn.Module):
    """Experts that are y = fc2 tanh(fc1 x), with whole weights of the same seed on every rank."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.fc1 = torch.randn(EXPERTS, WIDTH, HIDDEN, generator=generator, dtype=torch.float64)
        self.fc2 = torch.randn(EXPERTS, HIDDEN, WIDTH, generator=generator, dtype=torch.float64)
        self.dispatcher: Any = LocalDispatcher(EXPERTS)

    def cut(self, mesh: ParallelMesh) -> None:
        for name, dim in (("fc1", 1), ("fc2", 2)):
            part = getattr(self, name).chunk(mesh.sizes["ep"], 0)[mesh.axis("ep").rank]
            part = part.chunk(mesh.sizes["etp"], dim)[mesh.axis("etp").rank]
            setattr(self, name, part.contiguous())

    def to_device(self, device: str) -> None:
        self.fc1, self.fc2 = self.fc1.to(device), self.fc2.to(device)

    def run(self, hidden: Tensor, routing: Routing) -> Tensor:
        sent = self.dispatcher.dispatch(hidden, routing)
        counts = sent.counts.tolist()
        assert len(counts) == len(self.fc1)
        parts = sent.tokens.split([*counts, len(sent.tokens) - sum(counts)])
        done = [
            torch.tanh(x @ a.t()) @ b.t()
            for x, a, b in zip(parts, self.fc1, self.fc2, strict=False)
        ]
        rows = torch.cat([*done, torch.full_like(parts[-1], float("nan"))])  # is not read
        weighted = rows.nan_to_num() * sent.probs.unsqueeze(1)
        return self.dispatcher.combine(weighted, sent)


def tokens_of(case: Case, index: int, device: str = "cpu") -> tuple[Tensor, Routing]:
    """Hidden rows and routing of the rank (or group of ranks with equal tokens) `index`."""
    generator = torch.Generator().manual_seed(100 + index)
    length = TOKENS - (index * 3 % 5 if case.uneven else 0)
    hidden = torch.randn(length, HIDDEN, generator=generator, dtype=torch.float64)
    scores = torch.rand(length, EXPERTS, generator=generator, dtype=torch.float64)
    if case.routing == "one_rank":  # only experts of the first half
        scores[:, EXPERTS // 2 :] = -1.0
    probs, experts = scores.topk(TOPK, dim=-1)
    dropped = torch.rand(length, TOPK, generator=generator) < 0.3
    return hidden.to(device).requires_grad_(), Routing(
        probs=probs.detach().to(device).requires_grad_(),
        experts=experts.to(device),
        dropped=dropped.to(device) if case.routing == "dropped" else None,
        capacity=length if case.routing == "padded" else None,
    )


def results(layer: Layer, hidden: Tensor, routing: Routing) -> tuple[Tensor, ...]:
    for weight in (layer.fc1, layer.fc2):
        weight.requires_grad_()
    output = layer.run(hidden, routing)
    (output.sin().sum()).backward()
    grads = (hidden.grad, routing.probs.grad, layer.fc1.grad, layer.fc2.grad)
    assert all(grad is not None for grad in grads)
    return (output.detach().cpu(), *(grad.cpu() for grad in grads if grad is not None))


def run_case(rank: int, world_size: int, case: Case, device: str = "cpu") -> dict[str, Any]:
    mesh = ParallelMesh.build(
        device=torch.device(device),
        tensor=case.tensor,
        expert=case.expert,
        expert_tensor=case.expert_tensor,
    )
    layer = Layer()
    layer.cut(mesh)
    layer.to_device(device)
    config = ExpertConfig(dispatcher=case.dispatcher)  # type: ignore[arg-type]
    apply_expert_parallel(layer, mesh, config, sequence_parallel=case.sequence_parallel)
    shared = case.tensor > 1 and not case.sequence_parallel
    index = mesh.dp.rank if shared else rank
    got = results(layer, *tokens_of(case, index, device))
    return {"index": index, "ep": mesh.axis("ep").rank, "etp": mesh.axis("etp").rank, "got": got}


CASES = {
    "ep2": (2, Case(expert=2)),
    "ep4": (4, Case(expert=4)),
    "ep2_edp2": (4, Case(expert=2)),
    "etp2": (2, Case(expert_tensor=2)),
    "ep2_etp2": (4, Case(expert=2, expert_tensor=2)),
    "ep2_tp2": (2, Case(expert=2, tensor=2, sequence_parallel=False)),
    "ep2_tp2_etp2": (4, Case(expert=2, tensor=2, expert_tensor=2, sequence_parallel=False)),
    "tp2": (2, Case(tensor=2, sequence_parallel=False)),
    "one_rank": (2, Case(expert=2, routing="one_rank")),
    "one_rank_etp2": (4, Case(expert=2, expert_tensor=2, routing="one_rank")),
    "dropped": (2, Case(expert=2, routing="dropped")),
    "dropped_tp2": (2, Case(expert=2, tensor=2, sequence_parallel=False, routing="dropped")),
    "padded": (2, Case(expert=2, routing="padded")),
    "padded_etp2": (4, Case(expert=2, expert_tensor=2, routing="padded")),
    "padded_tp2": (2, Case(expert=2, tensor=2, sequence_parallel=False, routing="padded")),
    "uneven": (4, Case(expert=4, uneven=True)),
    "uneven_tp2": (4, Case(expert=4, tensor=2, sequence_parallel=False, uneven=True)),
}


@pytest.mark.parametrize("dispatcher", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("name", CASES)
def test_dispatch_equals_one_process(name: str, dispatcher: str) -> None:
    world_size, case = CASES[name]
    case = dataclasses.replace(case, dispatcher=dispatcher)
    compare(case, run_ranks(run_case, world_size, case))


def refused(rank: int, world_size: int, case: Case) -> str:
    with pytest.raises(ValueError, match="pad_to_capacity=True: ranks fill up to") as error:
        run_case(rank, world_size, case)
    return str(error.value)


def test_padded_batches_of_other_lengths_are_refused() -> None:
    case = Case(expert=2, routing="padded", uneven=True)
    assert all("[14, 20] rows" in text for text in run_ranks(refused, 2, case))


def compare(case: Case, ranks: list[dict[str, Any]], tolerance: float = 1e-12) -> None:
    """Every rank's outputs and gradients with those of whole layers on its tokens."""
    indices = sorted({rank["index"] for rank in ranks})
    whole = {index: results(Layer(), *tokens_of(case, index)) for index in indices}
    for rank in ranks:
        for got, want in zip(rank["got"][:3], whole[rank["index"]][:3], strict=True):
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    # The experts' gradients, summed over the ranks that hold equal ones, are those of all tokens.
    for number, dim in ((3, 1), (4, 2)):
        want = torch.stack([whole[index][number] for index in indices]).sum(0)
        got = torch.zeros_like(want)
        for rank in ranks:
            view = got.chunk(case.expert, 0)[rank["ep"]]
            view = view.chunk(case.expert_tensor, dim)[rank["etp"]]
            view += rank["got"][number]
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
