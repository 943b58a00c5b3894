"""A recorded Megatron-Core run with experts, reproduced under the strategy in one process and in
parallel.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lightning.models import GPTNetwork
from tests import tolerances
from tests.harness import run_ranks_fresh
from tests.layout_runs import assemble
from tests.parity.mcore_cases import load_case
from tests.parity.test_mcore_strategy import replay
from tests.router_margins import assert_margins, smallest_margins

NAME = "gpt_moe"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "ep2": (2, dict(expert_parallel_size=2)),
    "tp2_sp_ep2": (
        2,
        dict(
            tensor_parallel_size=2,
            expert_parallel_size=2,
            expert_tensor_parallel_size=1,
            sequence_parallel=True,
        ),
    ),
    "cp2_ep2": (2, dict(context_parallel_size=2, expert_parallel_size=2)),
    "tp2_ep2_etp2": (4, dict(tensor_parallel_size=2, expert_parallel_size=2)),
}


@pytest.fixture
def folder(golden: Path) -> Path:
    """Where the recorded runs are."""
    return golden / "models" / "mcore"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_recorded_training_with_experts(folder: Path, layout: str) -> None:
    """Losses, norms and the first gradients of all parameters."""
    case = load_case(NAME, folder)
    world_size, options = LAYOUTS[layout]
    ranks = run_ranks_fresh(replay, world_size, NAME, options, folder, (0,))
    for seen in ranks:
        assert seen["lr"] == pytest.approx(case.expected["lr"], rel=1e-12)
        assert seen["loss"] == pytest.approx(case.expected["loss"], rel=tolerances.RECORDED)
        norms = case.expected["grad_norm"]
        assert seen["grad_norm"] == pytest.approx(norms, rel=tolerances.RECORDED)
    gradients = assemble([seen["gradients"][0] for seen in ranks])
    assert gradients.keys() == {f"network.{name}" for name in case.gradients}
    for name, expected in case.gradients.items():
        error = (gradients[f"network.{name}"] - expected).norm() / expected.norm()
        assert error < 1e-5, name


def test_no_choice_of_the_first_step_is_within_rounding(folder: Path) -> None:
    """So the comparison above is not one of top-k flips."""
    case = load_case(NAME, folder)
    network = GPTNetwork(case.config)
    network.load_state_dict(case.state)
    with smallest_margins() as margins, torch.no_grad():
        for tokens in case.tokens[0]:
            network(tokens)
    assert_margins(margins)
