"""Losses and logged numbers reach every rank, or every rank says why not."""

from typing import Any

import pytest
import torch

from megatron_lightning.parallel.mesh import ParallelMesh
from megatron_lightning.runtime.metrics import LogKey, value_of
from megatron_lightning.runtime.publish import Publisher
from tests.harness import run_ranks

MEAN, SUM = LogKey("mean", "mean", ()), LogKey("sum", "sum", ())
MAX, MIN = LogKey("max", "max", ()), LogKey("min", "min", (("prog_bar", True),))


def total(value: float, weight: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(value, dtype=torch.float64), torch.tensor(weight, dtype=torch.float64)


def logs(rank: int) -> dict[LogKey, Any]:
    weight = float(rank + 1)
    return {
        MEAN: total(weight * 10 * rank, weight),
        SUM: total(float(rank), weight),
        MAX: total(-float(rank), weight),
        MIN: total(float(rank), weight),
    }


def test_one_process_passes_through() -> None:
    published = Publisher(ParallelMesh.single()).publish(total(6.0, 3.0), logs(1))
    assert float(published.loss) == 2.0
    assert published.logs == logs(1)


def _publish(rank: int, size: int, pipeline: int, tensor: int) -> list[Any]:
    mesh = ParallelMesh.build(device=torch.device("cpu"), pipeline=pipeline, tensor=tensor)
    publisher = Publisher(mesh)
    found = []
    for keys in ([MEAN, SUM, MAX, MIN], [MEAN], [], [MEAN, SUM, MAX, MIN]):
        replica = mesh.dp.rank
        own = {key: logs(replica)[key] for key in keys} if mesh.pp.is_last else None
        loss = total(4.0 * (replica + 1), replica + 1.0) if mesh.pp.is_last else None
        published = publisher.publish(loss, own)
        values = {key.name: float(value_of(key, t)) for key, t in published.logs.items()}
        found.append((float(published.loss), float(published.weight), values))
    return found


@pytest.mark.parametrize(
    ("size", "pipeline", "tensor"), [(2, 1, 1), (4, 2, 1), (4, 1, 2), (4, 4, 1)]
)
def test_every_rank_knows_the_same(size: int, pipeline: int, tensor: int) -> None:
    replicas = size // pipeline // tensor
    weights = [replica + 1.0 for replica in range(replicas)]
    expected = {
        "mean": sum(w * 10 * r for r, w in enumerate(weights)) / sum(weights),
        "sum": float(sum(range(replicas))),
        "max": 0.0,
        "min": 0.0,
    }
    for found in run_ranks(_publish, size, pipeline, tensor):
        for loss, weight, _ in found:
            assert (loss, weight) == (4.0, sum(weights))
        assert found[0][2] == found[3][2] == pytest.approx(expected)
        assert found[1][2] == pytest.approx({"mean": expected["mean"]})
        assert found[2][2] == {}


def _mismatch(rank: int, size: int) -> str:
    """Two data ranks of a two-stage pipeline, of which one logs another name."""
    mesh = ParallelMesh.build(device=torch.device("cpu"), pipeline=2)
    key = LogKey("odd" if mesh.dp.rank == 1 else "even", "mean", ())
    own = {key: total(1.0, 1.0)} if mesh.pp.is_last else None
    try:
        Publisher(mesh).publish(total(1.0, 1.0) if mesh.pp.is_last else None, own)
    except ValueError as error:
        return str(error)
    return ""


def test_other_names_are_an_error_on_every_rank() -> None:
    messages = run_ranks(_mismatch, 4)
    assert len(set(messages)) == 1
    assert "'odd'" in messages[0]
    assert "'even'" in messages[0]
