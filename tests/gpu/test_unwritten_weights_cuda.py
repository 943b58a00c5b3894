"""Where user code writes to no weight, none is found written on GPUs either: by Adam's kernel,
graphs, and parameters that are gathered meanwhile.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_lightning.config import QuantizationConfig, RuntimeConfig
from tests.distributed.test_unwritten_weights import Reads, fit
from tests.distributed.test_user_writes import RUN, SHARDED
from tests.harness import run_ranks_fresh
from tests.layout_runs import Recorder

pytestmark = pytest.mark.gpu

COMPILED = RuntimeConfig(compile_layers=True)
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "one_compiled": (1, dict(runtime=COMPILED)),
    "one_graphs": (1, dict(runtime=RuntimeConfig(cuda_graphs="layers"))),
    "dp2_sharded": (2, dict(data_parallel=SHARDED)),
    "dp2_offload": (2, dict(data_parallel=replace(SHARDED, offload_optimizer=True))),
    "dp2_sharded_compiled": (2, dict(data_parallel=SHARDED, runtime=COMPILED)),
    "dp2_fp8_gather": (
        2,
        dict(
            data_parallel=SHARDED,
            quantization=QuantizationConfig(
                recipe="fp8_tensorwise", fp8_gather=True, keep_first=0, keep_last=0
            ),
        ),
    ),
}


@pytest.mark.parametrize("recorder", [Recorder, Reads])
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_found_where_nothing_was_written(case: str, recorder: type[Recorder]) -> None:
    size, layout = CASES[case]
    if torch.cuda.device_count() < size:
        pytest.skip("needs two CUDA devices")
    trainer = {**RUN.trainer, "accelerator": "gpu", "accumulate_grad_batches": 2}
    run = replace(RUN, layout=layout, trainer=trainer, steps=8)
    for rank in run_ranks_fresh(fit, size, run, recorder, timeout=120):
        assert rank["asked"] >= run.steps
        assert not rank["found"]
        assert not rank["said"]
