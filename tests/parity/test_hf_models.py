"""Models of transformers: what it computes with them, computed after `from_hf` in several layouts
from both spellings of the config, and the files that come back out.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lightning.bridge import from_hf
from megatron_lightning.config import DataParallelConfig
from tests.harness import run_ranks_fresh
from tests.hf_models import (
    GOLDEN,
    GOLDEN_NAMES,
    LOCAL,
    LOCAL_NAMES,
    LOGITS,
    MOE_NAMES,
    TRAINING,
    Recorded,
    assert_same_tensors,
    legacy_copy,
    use,
)

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "tp2": (2, dict(tensor_parallel_size=2)),
    "pp2": (2, dict(pipeline_parallel_size=2)),
    "ep2": (2, dict(expert_parallel_size=2)),
    "tp2_sp_pp2": (
        4,
        dict(tensor_parallel_size=2, pipeline_parallel_size=2, sequence_parallel=True),
    ),
    "fsdp2": (2, dict(data_parallel=DataParallelConfig(sharding="fsdp"))),
}
SLOW = ("tp2_sp_pp2", "fsdp2")
OF_EXPERTS = ("ep2",)


def cases() -> list[Any]:
    found = [("local", name) for name in LOCAL_NAMES] + [("golden", n) for n in GOLDEN_NAMES]
    return [pytest.param(*case, id="-".join(case)) for case in found]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in LAYOUTS
    ],
)
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def run(layout: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """From a source to where the ranks wrote and what they found; each source is run once."""
    world_size, options = LAYOUTS[layout]
    done: dict[str, Any] = {}

    def of(source: str) -> Any:
        if source not in done:
            base, names = {"local": (LOCAL, LOCAL_NAMES), "golden": (GOLDEN, GOLDEN_NAMES)}[source]
            if not base.is_dir():
                pytest.skip(f"{base} is not there")
            names = [name for name in names if layout not in OF_EXPERTS or name in MOE_NAMES]
            out = tmp_path_factory.mktemp(f"{source}_{layout}")
            folders = [str(legacy_copy(base / n, out / "legacy" / n)) for n in names]
            for folder, name in zip(folders, names, strict=True):
                for file in ("golden.npz", "meta.json"):
                    (Path(folder) / file).symlink_to(base / name / file)
            results = run_ranks_fresh(use, world_size, options, folders, str(out), timeout=280)
            done[source] = (out, [{Path(f).name: s for f, s in r.items()} for r in results])
        return done[source]

    return of


def assert_states(wanted: dict[int, torch.Tensor], seen: list[dict[int, torch.Tensor]]) -> None:
    """(B, S, ...) by layer; ranks hold the whole, or parts of the sequence."""
    for number, state in wanted.items():
        parts = [held[number] for held in seen if number in held]
        whole = parts[0] if parts[0].shape == state.shape else torch.cat(parts, dim=1)
        torch.testing.assert_close(whole, state, rtol=LOGITS, atol=LOGITS)


@pytest.mark.parametrize(("source", "name"), cases())
def test_as_transformers(run: Callable[[str], Any], layout: str, source: str, name: str) -> None:
    if layout in OF_EXPERTS and name not in MOE_NAMES:
        pytest.skip(f"{name} has no experts")
    out, seen = run(source)
    folder = {"local": LOCAL, "golden": GOLDEN}[source] / name
    recorded = Recorded.read(folder)
    for found in (result[name] for result in seen):
        torch.testing.assert_close(
            found["logits"], recorded.arrays["logits"], rtol=LOGITS, atol=LOGITS
        )
        assert found["losses"] == pytest.approx(recorded.losses, abs=TRAINING)
        new = 12 if source == "golden" else 8
        greedy = recorded.arrays["greedy_ids"][0, -new:]
        assert found["greedy"][-new:].tolist() == greedy.tolist()
    states = recorded.arrays["hidden_states"]
    assert_states(dict(enumerate(states)), [r[name]["hidden"] for r in seen])
    if "router_logits" in recorded.arrays:
        routers = recorded.arrays["router_logits"].unflatten(1, states.shape[1:3])
        sparse = sorted({number for r in seen for number in r[name]["routers"]})
        wanted = dict(zip(sparse, routers, strict=True))
        assert_states(wanted, [r[name]["routers"] for r in seen])
    assert_same_tensors(out / name / "imported", folder)
    trained = from_hf(out / name / "trained")
    with torch.no_grad():
        logits = trained(recorded.arrays["input_ids"])
    torch.testing.assert_close(logits, seen[0][name]["trained"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("source", "name"), cases())
def test_both_spellings_of_the_config(tmp_path: Path, source: str, name: str) -> None:
    folder = {"local": LOCAL, "golden": GOLDEN}[source] / name
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    new, old = from_hf(folder), from_hf(legacy_copy(folder, tmp_path / "legacy"))
    assert new.config == old.config
    tokens = Recorded.read(folder).arrays["input_ids"]
    with torch.no_grad():
        assert torch.equal(new(tokens), old(tokens))
