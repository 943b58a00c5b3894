"""A recorded Megatron-Core run with multi-token prediction, reproduced under the strategy in one
process and in parallel.
"""

from pathlib import Path
from typing import Any

import pytest

from tests import tolerances
from tests.harness import run_ranks_fresh
from tests.layout_runs import assemble
from tests.parity.mcore_cases import load_case
from tests.parity.test_mcore_strategy import replay

NAME = "gpt_mtp"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "pp2": (2, dict(pipeline_parallel_size=2)),
    "tp2": (2, dict(tensor_parallel_size=2)),
    "tp2_sp": (2, dict(tensor_parallel_size=2, sequence_parallel=True)),
    "cp2": (2, dict(context_parallel_size=2)),
}
SLOW = ("tp2_sp", "cp2")


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in LAYOUTS],
)
def test_recorded_training_with_further_predictions(golden: Path, layout: str) -> None:
    """Losses, norms, rates and the first gradients of all parameters. The recorded loss is that of
    the next token alone, which is what is logged.
    """
    folder = golden / "models" / "mcore"
    world_size, options = LAYOUTS[layout]
    case = load_case(NAME, folder)
    ranks = run_ranks_fresh(replay, world_size, NAME, options, folder, (0,))
    for seen in ranks:
        assert seen["lr"] == pytest.approx(case.expected["lr"], rel=1e-12)
        assert seen["logged"] == pytest.approx(case.expected["loss"], rel=tolerances.RECORDED)
        norms = case.expected["grad_norm"]
        assert seen["grad_norm"] == pytest.approx(norms, rel=tolerances.RECORDED)
    gradients = assemble([seen["gradients"][0] for seen in ranks])
    assert gradients.keys() == {f"network.{name}" for name in case.gradients}
    for name, expected in case.gradients.items():
        error = (gradients[f"network.{name}"] - expected).norm() / expected.norm()
        assert error < 1e-5, name
