"""Megatron-Core checkpoints of networks with experts, latent attention and further predictions, and
the optimizer's state in them: written by torch's own writer, under the names and in the shapes that
Megatron-Core's sources give.
"""

import argparse
import enum
import json
import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from megatron_lightning.checkpoint import CheckpointError, list_tensors
from megatron_lightning.checkpoint.convert import Conversion, convert
from megatron_lightning.checkpoint.convert.inert_pickle import Record, read_values
from megatron_lightning.checkpoint.convert.lazy import LazyTensor
from megatron_lightning.config import (
    GPTConfig,
    LatentAttentionConfig,
    MoEConfig,
    MultiTokenPredictionConfig,
)
from megatron_lightning.models import GPTModel
from tests.layout_runs import Batches, Run, make_strategy

SIZES: dict[str, Any] = dict(
    vocab_size=37,
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=24,
)
EXPERTS = MoEConfig(
    num_experts=4,
    ffn_hidden_size=12,
    shared_expert_ffn_hidden_size=8,
    shared_expert_gate=True,
    router_score_function="sigmoid",
    expert_bias=True,
)
CONFIGS = {
    "gated": GPTConfig(**SIZES, moe=EXPERTS),
    "plain_biases": GPTConfig(
        **SIZES, moe=EXPERTS, gated_linear_unit=False, activation="gelu", add_bias_linear=True
    ),
}
DEEPSEEK = GPTConfig(
    **{**SIZES, "num_query_groups": 4, "num_layers": 3},
    moe=MoEConfig(num_experts=4, ffn_hidden_size=12, first_dense_layers=1),
    latent_attention=LatentAttentionConfig(
        q_lora_rank=8, kv_lora_rank=6, qk_head_dim=4, qk_pos_emb_head_dim=2, v_head_dim=5
    ),
    multi_token_prediction=MultiTokenPredictionConfig(num_layers=1),
)
NORMS_WITH_LINEARS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}


def network_state(config: GPTConfig) -> dict[str, Tensor]:
    """Random values for everything that is saved of a network."""
    torch.manual_seed(3)
    model = GPTModel(config)
    shapes = {**model.global_shapes(), **model.buffer_shapes()}
    return {n.removeprefix("network."): torch.randn(shape) for n, shape in shapes.items()}


def in_megatron(config: GPTConfig, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of Megatron-Core's GPTModel, layer by layer."""
    found = {}
    for ours, tensor in state.items():
        name = ours.replace("mlp.experts.", "mlp.experts.experts.")
        name = name.replace("shared_expert_gate.weight", "shared_experts.gate_weight")
        name = name.replace("mtp_model_layer", "transformer_layer")
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            tensor = torch.cat([tensor, torch.randn(11, tensor.shape[1])])  # padding
        if ".linear_fc1." in name and config.gated_linear_unit:
            first = 1 if "experts.experts" in name else 0
            tensor = tensor.flatten(first, first + 1)
        found[name] = tensor
    return found


def fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As with Transformer Engine, some norms kept with the linear layer that follows."""
    latent = any("linear_kv_up_proj" in name for name in tensors)
    found = {}
    for name, tensor in tensors.items():
        for norm, linear in NORMS_WITH_LINEARS.items():
            if norm in name and latent == (norm != "input_layernorm."):
                name = name.replace(norm, linear)
        found[name] = tensor
    return found


def stacked(tensors: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Equal layers as one tensor."""
    first = "decoder.layers.0."
    found = {n: t for n, t in tensors.items() if "decoder.layers." not in n}
    for name in [n for n in tensors if n.startswith(first)]:
        parts = [tensors[name.replace(first, f"decoder.layers.{i}.")] for i in range(layers)]
        found[name.replace(first, "decoder.layers.")] = torch.stack(parts)
    return found


def singleton(tensors: dict[str, Tensor], gated: bool) -> dict[str, Tensor]:
    """Each expert by itself, gate and up apart."""
    found = {}
    for name, tensor in tensors.items():
        before, part, after = name.partition("experts.experts.")
        entries = enumerate(tensor) if part else [(-1, tensor)]
        for number, one in entries:
            full = f"{before}{part}{number}.{after}" if part else name
            if gated and ".linear_fc1." in name and "layer_norm" not in name:
                found[f"{full}_w"], found[f"{full}_v"] = one.chunk(2)
            else:
                found[full] = one
    return found


def write(folder: Path, tensors: dict[str, Tensor], common: Any = None) -> Path:
    """As `dist_checkpointing.save` leaves a folder."""
    state = {"decoder.layers.0.mlp._extra_state/shard_0_1": "x", **tensors}
    dcp.save(state, checkpoint_id=str(folder))
    about = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(about))
    torch.save({} if common is None else common, folder / "common.pt")
    return folder


def read(folder: Path, config: GPTConfig, target: Path, **options: Any) -> dict[str, Tensor]:
    """State of the model that `convert` makes."""
    model = GPTModel(config)
    shapes = {**model.global_shapes(), **model.buffer_shapes()}
    how = Conversion(
        allow_pickle=True, hyper_parameters={"config": config}, shapes=shapes, **options
    )
    convert(folder, target, how=how)
    return GPTModel.load_from_checkpoint(target).built_network().state_dict()


def assert_state(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, tensor in wanted.items():
        inside = found[name][tuple(slice(0, size) for size in tensor.shape)]
        assert torch.equal(inside, tensor), name


@pytest.mark.parametrize("form", ["layers", "stacked", "singleton", "transformer_engine"])
@pytest.mark.parametrize("name", CONFIGS)
def test_experts(tmp_path: Path, name: str, form: str) -> None:
    config = CONFIGS[name]
    state = network_state(config)
    tensors = in_megatron(config, state)
    if form == "stacked":
        tensors = stacked(tensors, config.num_layers)
    elif form == "singleton":
        tensors = singleton(tensors, config.gated_linear_unit)
    elif form == "transformer_engine":
        tensors = {f"module.{n}": t for n, t in fused(tensors).items()}
    folder = write(tmp_path / "theirs", tensors)
    assert_state(read(folder, config, tmp_path / "ours"), state)


@pytest.mark.parametrize("engine", [False, True])
def test_latent_attention_dense_layers_and_predictions(tmp_path: Path, engine: bool) -> None:
    state = network_state(DEEPSEEK)
    tensors = in_megatron(DEEPSEEK, state)
    folder = write(tmp_path / "theirs", fused(tensors) if engine else tensors)
    assert_state(read(folder, DEEPSEEK, tmp_path / "ours"), state)


def test_missing_and_unknown_parts_are_named(tmp_path: Path) -> None:
    config = CONFIGS["gated"]
    tensors = singleton(in_megatron(config, network_state(config)), gated=True)
    router = tensors.pop("decoder.layers.1.mlp.router.weight")
    folder = write(tmp_path / "theirs", tensors)
    with pytest.raises(CheckpointError, match=r"missing: network.decoder.layers.1.mlp.router"):
        read(folder, config, tmp_path / "ours")
    tensors["decoder.layers.1.mlp.router.weight"] = router
    tensors["decoder.layers.1.mlp.experts.experts.1.linear_fc1.lora"] = router
    folder = write(tmp_path / "more", tensors)
    with pytest.raises(CheckpointError, match=r"no rule for .*experts.1.linear_fc1.lora"):
        read(folder, config, tmp_path / "ours")
    gone = {n: t for n, t in tensors.items() if ".experts.2." not in n and "lora" not in n}
    folder = write(tmp_path / "fewer", gone)
    with pytest.raises(CheckpointError, match=r"there are only \[0, 1, 3\] of them"):
        read(folder, config, tmp_path / "ours")


# ---------------------------------------------------------------------- the optimizer


class Backend(enum.Enum):
    """An enum of a package that isn't there when it is read."""

    FLASH = 1


def common(step: int) -> dict[str, Any]:
    """As Megatron-LM writes it, with things that no restricted loader takes."""
    groups = [{"lr": 1e-4, "step": step, "wd_mult": 1.0}]
    return {
        "args": argparse.Namespace(attention=Backend.FLASH, lr=1e-4),
        "iteration": step,
        "optimizer": {0: {"optimizer": {"param_groups": groups}}},
    }


def flattened(tensor: Tensor, parts: tuple[int, ...]) -> Tensor:
    """Each rank's part of a parameter as one row: [X / x, Y / y, x * y]."""
    local = [size // count for size, count in zip(tensor.shape, parts, strict=True)]
    for dim, size in enumerate(local):
        tensor = tensor.unflatten(2 * dim, (-1, size))
    order = [2 * i for i in range(len(local))] + [2 * i + 1 for i in range(len(local))]
    return tensor.permute(order).flatten(len(local)).contiguous()


@pytest.mark.parametrize("form", ["whole", "flattened"])
def test_masters_and_moments(tmp_path: Path, form: str) -> None:
    """A Trainer goes on with them, from the step and schedule that were reached."""
    config = CONFIGS["gated"]
    state = network_state(config)
    tensors = in_megatron(config, state)
    trained = {n: t for n, t in tensors.items() if "expert_bias" not in n}
    saved = {n: t.bfloat16() for n, t in tensors.items()}
    saved |= {n: t for n, t in tensors.items() if "expert_bias" in n}
    for number, (kind, factor) in enumerate((("fp32_param", 1), ("exp_avg", 2), ("exp_avg_sq", 3))):
        for name, tensor in trained.items():
            value = (factor * tensor).abs() if number else tensor
            if form == "flattened":
                even = tuple(2 if size % 2 == 0 else 1 for size in value.shape)
                value = flattened(value, even)
            prefix = f"chained_{int('experts.experts' in name)}."
            saved[f"{prefix}optimizer.state.{kind}.{name}"] = value
    folder = write(tmp_path / "theirs", saved, common(7))
    read(folder, config, tmp_path / "ours")
    found = list_tensors(tmp_path / "ours")
    expert = "network.decoder.layers.0.mlp.experts.linear_fc1.weight"
    assert found[f"master.{expert}"].dtype == torch.float32
    assert found[f"optimizer.0.exp_avg.{expert}"].shape == (4, 2, 12, 16)

    model = GPTModel(config)
    run = Run(config=config, steps=9)
    seen = Loaded()
    trainer = L.Trainer(
        strategy=make_strategy({}),
        accelerator="cpu",
        devices=1,
        precision="bf16-mixed",
        max_steps=9,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[seen],
    )
    trainer.fit(model, Batches(run), ckpt_path=str(tmp_path / "ours"))
    assert trainer.global_step == 9
    assert seen.steps == [8, 9]
    assert seen.last_epoch == 7
    assert seen.state.keys() == {f"network.{n}" for n in state if "expert_bias" not in n}
    for name, (master, first, second, step) in seen.state.items():
        tensor = state[name.removeprefix("network.")]
        inside = tuple(slice(0, size) for size in tensor.shape)
        assert torch.equal(master[inside], tensor), name
        assert torch.equal(first[inside], (2 * tensor).abs()), name
        assert torch.equal(second[inside], (3 * tensor).abs()), name
        assert float(step) == 7


class Loaded(L.Callback):
    """What a fit starts from."""

    def __init__(self) -> None:
        self.state: dict[str, tuple[Tensor, ...]] = {}
        self.steps: list[int] = []
        self.last_epoch = -1

    def on_train_start(self, trainer: Any, module: Any) -> None:
        update = trainer.strategy.update
        (optimizer,) = update.optimizers
        self.last_epoch = trainer.lr_scheduler_configs[0].scheduler.last_epoch
        for name, master in update.updated().items():
            kept = optimizer.state[master]
            values = (master.detach(), kept["exp_avg"], kept["exp_avg_sq"], kept["step"])
            self.state[name] = tuple(value.clone() for value in values)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.steps.append(trainer.global_step)


def test_state_that_is_not_known(tmp_path: Path) -> None:
    config = CONFIGS["gated"]
    state = network_state(config)
    tensors = in_megatron(config, state)
    name = "decoder.layers.0.mlp.router.weight"
    buckets = {"optimizer.distributed.dp_group_idx_0.gbuf_idx_0.exp_avg": torch.ones(9)}
    odd = {f"optimizer.state.exp_avg.{name}": torch.ones(3, 5)}
    foreign = {"optimizer.state.exp_avg.decoder.other.weight": torch.ones(3)}
    for number, (more, message) in enumerate(
        (
            (buckets, "is in buckets of one layout"),
            (odd, r"\[3, 5\] is neither the parameter's \[4, 16\] nor"),
            (foreign, "is the state of no parameter"),
        )
    ):
        folder = write(tmp_path / f"theirs{number}", {**tensors, **more})
        with pytest.raises(CheckpointError, match=message):
            read(folder, config, tmp_path / "ours")
        target = tmp_path / f"weights{number}"
        assert_state(read(folder, config, target, weights_only=True), state)


def test_the_common_values_are_read_without_running_them(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"iteration": 3, "args": Evil(), "t": torch.ones(2)}, tmp_path / "common.pt")
    found = read_values(tmp_path / "common.pt")
    assert found["iteration"] == 3
    assert isinstance(found["args"], Record)
    assert not (tmp_path / "ran").exists()
    (tmp_path / "common.pt").write_bytes(b"no archive")
    with pytest.raises(CheckpointError, match="is damaged"):
        read_values(tmp_path / "common.pt")


# ---------------------------------------------------------------------- parts of tensors


def test_lazy_parts_are_those_of_the_whole() -> None:
    from megatron_lightning.checkpoint.boxes import Box

    tensor = torch.arange(5 * 6 * 4.0).view(5, 6, 4)
    asked: list[int] = []

    def part(box: Box) -> Tensor:
        asked.append(box.numel)
        return tensor[box.slices()].clone()

    lazy = LazyTensor(tuple(tensor.shape), tensor.dtype, part)
    for dim, count in ((1, 2), (1, 3), (2, 4)):
        other = lazy.unflatten(dim, count)
        wanted = tensor.unflatten(dim, (count, -1))
        assert torch.equal(other.whole(), wanted)
        box = Box((1, 0, 0, 0), (2, *wanted.shape[1:]))
        asked.clear()
        assert torch.equal(other.part(box), wanted[1:3])
        assert sum(asked) == box.numel
    joined = LazyTensor.stack([lazy.select(i) for i in (3, 1)])
    assert torch.equal(joined.whole(), tensor[[3, 1]])
    assert torch.equal(joined.part(Box((1, 2, 0), (1, 3, 4))), tensor[1:2, 2:5])
