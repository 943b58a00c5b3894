"""`verify` over two GPUs: layouts against one GPU, from the command line."""

import json
from pathlib import Path

import pytest
import torch

from megatron_lightning.cli import verify as command
from megatron_lightning.cli.errors import run_command
from tests.harness import run_ranks_fresh

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

CONFIG = """
trainer:
  accelerator: gpu
  devices: 1
  precision: bf16-mixed
  strategy:
    class_path: megatron_lightning.strategies.MegatronStrategy
    init_args:
      runtime: {compile_layers: true}
model:
  class_path: megatron_lightning.models.GPTModel
  init_args:
    backend: %s
    config:
      vocab_size: 512
      num_layers: 4
      hidden_size: 128
      ffn_hidden_size: 256
      num_attention_heads: 8
      num_query_groups: 4
      max_position_embeddings: 64
data:
  class_path: megatron_lightning.PretrainingDataModule
  init_args:
    seq_length: 64
    micro_batch_size: 1
    global_batch_size: 8
"""

LAYOUTS = "tp2 tp2+sp pp2 cp2 dp2 dp2+zero1 dp2+fsdp recompute"


def status(rank: int, world_size: int, arguments: str) -> int:
    try:
        return run_command(command.main, arguments.split(), "verify")
    except SystemExit as error:
        return int(error.code or 0)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_layouts_of_two_gpus(precision: str, tmp_path: Path) -> None:
    values = tmp_path / "report.json"
    arguments = (
        f"--preset tiny --layouts {LAYOUTS} --accelerator gpu --precision {precision}"
        f" --json {values}"
    )
    code = run_ranks_fresh(status, 1, arguments, timeout=500)[0]
    for candidate in json.loads(values.read_text())["candidates"]:
        print(candidate["name"], candidate["passed"], candidate["findings"][:1])
    assert code == 0


@pytest.mark.parametrize("layouts", ["tp2+sp pp2", "cp2 dp2+zero1"])
@pytest.mark.parametrize("backend", ["torch", "transformer_engine"])
def test_layouts_of_two_gpus_with_compiled_layers(
    backend: str, layouts: str, tmp_path: Path
) -> None:
    if backend == "transformer_engine":
        pytest.importorskip("transformer_engine")
    config, values = tmp_path / "config.yaml", tmp_path / "report.json"
    config.write_text(CONFIG % backend)
    arguments = (
        f"--config {config} --synthetic --layouts {layouts} --accelerator gpu --json {values}"
    )
    code = run_ranks_fresh(status, 1, arguments, timeout=500)[0]
    for candidate in json.loads(values.read_text())["candidates"]:
        print(backend, candidate["name"], candidate["passed"], candidate["findings"][:1])
    assert code == 0
