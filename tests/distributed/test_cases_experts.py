"""The reported case C26: experts keep their numbers, orientation and halves through import and
export, whichever ranks hold them.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_lightning.bridge import from_hf
from tests.distributed.test_hf_layouts import make_trainer
from tests.harness import run_ranks_fresh
from tests.hf_models import LOCAL, Batches, assert_same_tensors, tensors_of

EXPERTS, HIDDEN, TOKENS = 4, 16, 7


def matrix(expert: int, kind: int) -> Tensor:
    """Square, so that a transposed one would fit too; filled with the expert's number and a ramp
    that is no symmetric matrix, and other for gate, up and down.
    """
    ramp = torch.arange(HIDDEN * HIDDEN, dtype=torch.float32).view(HIDDEN, HIDDEN)
    return 0.02 * (expert + 1) + (-1) ** kind * (kind + 1) * ramp / (20 * HIDDEN * HIDDEN)


@pytest.fixture(scope="module")
def ramps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral of 4 square experts."""
    folder = tmp_path_factory.mktemp("hf") / "ramps"
    folder.mkdir()
    config = json.loads((LOCAL / "mixtral" / "config.json").read_text())
    config |= {"intermediate_size": HIDDEN, "num_local_experts": EXPERTS}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = tensors_of(LOCAL / "mixtral")
    for name in tensors:
        if ".experts." in name:
            *_, number, which, _ = name.split(".")
            tensors[name] = matrix(int(number), ("w1", "w3", "w2").index(which))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tokens() -> Tensor:
    return torch.arange(2 * TOKENS).view(2, TOKENS) * 5 % 35


def go_through(
    rank: int, world_size: int, folder: str, out: str, layout: dict[str, Any]
) -> tuple[Tensor, dict[str, tuple[tuple[int, ...], Tensor]]]:
    """Import, predict, export; logits, and this rank's boxes of the first layer's experts."""
    model = from_hf(folder)
    batch = {"tokens": tokens(), "labels": tokens(), "loss_mask": torch.ones(2, TOKENS)}
    trainer = make_trainer(world_size, layout)
    (logits,) = trainer.predict(model, Batches(batch))  # type: ignore[misc,arg-type]
    model.save_hf(out)
    held: Any = trainer.strategy
    prefix = "network.decoder.layers.0.mlp.experts."
    return logits, {
        name.removeprefix(prefix): (held.parallel_model.table[name].offsets, value.detach())
        for name, value in held.parallel_model.parameters.items()
        if name.startswith(prefix)
    }


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (1, {}),
        (2, dict(expert_parallel_size=2)),
        pytest.param(
            4,
            dict(tensor_parallel_size=2, expert_parallel_size=2),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["ep1", "ep2", "tp2_ep2_etp2"],
)
def test_experts_keep_number_orientation_and_halves(
    world_size: int, layout: dict[str, Any], ramps: Path, tmp_path: Path
) -> None:
    """C26: where each expert lies, the forward pass of the reference model, and all bytes back."""
    transformers = pytest.importorskip("transformers")
    reference = transformers.MixtralForCausalLM.from_pretrained(ramps)
    with torch.no_grad():
        expected = reference(tokens()).logits
    out = tmp_path / "out"
    ranks = run_ranks_fresh(go_through, world_size, str(ramps), str(out), layout)
    seen = set()
    for logits, held in ranks:
        torch.testing.assert_close(logits[-len(expected) :], expected, rtol=1e-4, atol=1e-4)
        (first, _, column, _), gate_up = held["linear_fc1.weight"]
        for expert, halves in enumerate(gate_up, start=first):
            columns = slice(column, column + halves.shape[1])
            assert torch.equal(halves[0], matrix(expert, 0)[columns])
            assert torch.equal(halves[1], matrix(expert, 1)[columns])
            seen.add((expert, column))
        (first, _, column), down = held["linear_fc2.weight"]
        for expert, weight in enumerate(down, start=first):
            assert torch.equal(weight, matrix(expert, 2)[:, column : column + weight.shape[1]])
    assert {expert for expert, _ in seen} == set(range(EXPERTS))
    assert_same_tensors(out, ramps)
