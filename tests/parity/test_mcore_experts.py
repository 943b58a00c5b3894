"""Checkpoints with experts and an optimizer that Megatron-Core has written, read by `convert`."""

import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_lightning.checkpoint import list_tensors, load_objects
from megatron_lightning.checkpoint.config_codec import CODEC
from megatron_lightning.checkpoint.convert import Conversion, convert
from megatron_lightning.checkpoint.convert.convert import kind_of
from megatron_lightning.checkpoint.convert.megatron_core import weights_of
from megatron_lightning.checkpoint.convert.megatron_state import training_state
from megatron_lightning.checkpoint.convert.torch_dcp import read_dcp
from megatron_lightning.config import GPTConfig, MoEConfig
from megatron_lightning.models import GPTModel

DATA = Path(__file__).parents[1] / "data" / "mcore_experts"
FORMS = ("fully_reshardable", "fully_sharded_model_space")
CONFIG = GPTConfig(
    vocab_size=16,
    num_layers=1,
    hidden_size=8,
    num_attention_heads=2,
    num_query_groups=1,
    ffn_hidden_size=8,
    max_position_embeddings=16,
    moe=MoEConfig(
        num_experts=4,
        ffn_hidden_size=4,
        shared_expert_ffn_hidden_size=4,
        router_score_function="sigmoid",
        expert_bias=True,
        load_balancing="none",
    ),
)


@pytest.fixture(params=FORMS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, torch.Tensor]:
    """The folder, and logits of Megatron-Core."""
    folder = tmp_path / "theirs"
    with tarfile.open(DATA / f"{request.param}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder, torch.from_numpy(np.load(DATA / f"{request.param}.npz")["logits"])


def test_logits(checkpoint: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    folder, wanted = checkpoint
    model = GPTModel(CONFIG)
    shapes = {**model.global_shapes(), **model.buffer_shapes()}
    how = Conversion(allow_pickle=True, hyper_parameters={"config": CONFIG}, shapes=shapes)
    assert kind_of(folder) == "megatron-core"
    convert(folder, tmp_path / "ours", how=how)
    model = GPTModel.load_from_checkpoint(tmp_path / "ours")
    with torch.no_grad():
        logits = model(torch.arange(32).view(2, 16) % 16)
    torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-6)
    objects = load_objects(tmp_path / "ours", codec=CODEC)
    assert objects["global_step"] == 2
    assert objects["lr_schedulers"] == [{"last_epoch": 2, "step_count": 3}]
    kinds = {name.rpartition(".network.")[0] for name in list_tensors(tmp_path / "ours")}
    assert kinds == {
        "model",
        "master",
        *(f"optimizer.0.{kind}" for kind in ("exp_avg", "exp_avg_sq", "step")),
    }


def test_masters_are_the_weights(checkpoint: tuple[Path, torch.Tensor]) -> None:
    """In float32 they must be, element by element, whichever form they are kept in."""
    found = read_dcp(checkpoint[0])
    weights, state = weights_of(found, CONFIG).tensors, training_state(found, CONFIG)
    names = {n.removeprefix("network.") for n in GPTModel(CONFIG).global_shapes()}
    assert state.masters.keys() == names
    for name, master in state.masters.items():
        assert torch.equal(master.whole(), weights[name].whole()), name
        first, second = (state.moments[kind][name].whole() for kind in ("exp_avg", "exp_avg_sq"))
        assert first.shape == second.shape == master.shape
        assert (second >= 0).all()
        # two steps of Adam: the mean's square is at most 1 - b1 over 1 - b2 of the mean square
        assert (first.square() <= 20 * second + 1e-12).all(), name
