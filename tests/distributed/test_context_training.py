"""The same training over context ranks: losses, norms, gradients, weights against one process."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from megatron_lightning.config import (
    ContextConfig,
    DataParallelConfig,
    GPTConfig,
    PipelineConfig,
    RecomputeConfig,
    RuntimeConfig,
)
from megatron_lightning.models import GPTModel
from tests import tolerances
from tests.distributed.test_resume import fit
from tests.harness import RankError, run_ranks_fresh
from tests.layout_runs import (
    SEQUENCE,
    Batches,
    Recorder,
    Run,
    assemble,
    assert_same_training,
    global_batch,
    make_strategy,
    tiny_config,
    train,
)

FORMS = {
    "ring": ContextConfig(form="ring"),
    "all_gather": ContextConfig(form="all_gather"),
    "all_to_all": ContextConfig(form="all_to_all"),
    "hierarchical": ContextConfig(form="hierarchical", inner_size=2),
    "by_layer": ContextConfig(layer_forms=("all_gather", "ring", "all_to_all")),
}
MODELS: dict[str, GPTConfig] = {
    "grouped": tiny_config(),
    "multi_head": tiny_config(num_query_groups=4),
    "tied_learned": tiny_config(
        num_query_groups=4,
        tie_word_embeddings=True,
        position_embedding="learned",
        max_position_embeddings=32,
        qk_layernorm=True,
        add_bias_linear=True,
    ),
    "windows": tiny_config(num_query_groups=4, window_size=5, window_pattern="SF"),
}


def random_batch(run: Run, index: int, length: int = SEQUENCE) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2000 + index)
    tokens = torch.randint(
        0, run.config.vocab_size, (run.global_batch_size, length + 1), generator=generator
    )
    mask = (torch.rand(run.global_batch_size, length, generator=generator) < 0.7).float()
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask}


def odd_batch(run: Run, index: int) -> dict[str, Tensor]:
    """A length that no context size divides."""
    return random_batch(run, index, 15)


def one_label(run: Run, index: int) -> dict[str, Tensor]:
    """One token of each sequence has a label, at another place in each sample (C04)."""
    batch = random_batch(run, index)
    place = torch.arange(run.global_batch_size) * 5 % SEQUENCE
    batch["loss_mask"] = torch.nn.functional.one_hot(place, SEQUENCE).float()
    return batch


def packed_batch(run: Run, index: int) -> dict[str, Tensor]:
    """Documents of many lengths, packed otherwise in every sample."""
    batch = random_batch(run, index)
    ends = [[4, 12, 16, 16], [1, 2, 9, 16], [16, 16, 16, 16], [7, 8, 15, 16]]
    rows = [[0, *ends[(index + i) % 4]] for i in range(run.global_batch_size)]
    return batch | {"cu_seqlens": torch.tensor(rows, dtype=torch.int32)}


def packed_alike(run: Run, index: int) -> dict[str, Tensor]:
    batch = random_batch(run, index)
    rows = [[0, 4, 12, 16]] * run.global_batch_size
    return batch | {"cu_seqlens": torch.tensor(rows, dtype=torch.int32)}


BATCHES = {"even": None, "odd": odd_batch, "packed": packed_batch, "packed_alike": packed_alike}


def run_of(model: str, batches: str = "even", **changes: Any) -> Run:
    options: dict[str, Any] = dict(steps=3, keep_gradients=(0, 1, 2))
    return Run(config=MODELS[model], make_batch=BATCHES[batches], **options, **changes)


@functools.cache
def single(model: str, batches: str = "even") -> dict[str, Any]:
    return run_ranks_fresh(train, 1, run_of(model, batches))[0]


def slow(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


def over_ranks(size: int, form: str, **others: Any) -> dict[str, Any]:
    return dict(context_parallel_size=size, context=FORMS[form]) | others


@pytest.mark.parametrize("form", ["ring", "all_gather", "all_to_all"])
def test_two_ranks(form: str) -> None:
    run = run_of("grouped", layout=over_ranks(2, form))
    assert_same_training(run_ranks_fresh(train, 2, run), single("grouped"))


@pytest.mark.parametrize("form", FORMS)
def test_four_ranks(form: str) -> None:
    run = run_of("multi_head", layout=over_ranks(4, form))
    assert_same_training(run_ranks_fresh(train, 4, run), single("multi_head"))


@pytest.mark.parametrize(
    ("model", "batches", "form"),
    [
        ("windows", "packed", "ring"),
        ("windows", "packed", "by_layer"),
        ("tied_learned", "odd", "ring"),
        ("tied_learned", "packed_alike", "all_gather"),
        slow("windows", "packed", "all_gather"),
        slow("windows", "packed", "hierarchical"),
        slow("tied_learned", "odd", "all_gather"),
        slow("tied_learned", "packed", "ring"),
    ],
)
def test_windows_packing_and_odd_lengths(model: str, batches: str, form: str) -> None:
    run = run_of(model, batches, layout=over_ranks(4, form))
    assert_same_training(run_ranks_fresh(train, 4, run), single(model, batches))


@pytest.mark.parametrize(
    ("size", "normalization", "form"),
    [
        (2, "token", "ring"),
        (2, "micro_batch", "ring"),
        (4, "micro_batch", "all_to_all"),
        slow(4, "token", "all_to_all"),
    ],
)
def test_one_label_in_a_sequence(size: int, normalization: str, form: str) -> None:
    """Loss and gradients as with one process, in both normalisations (C04)."""
    options = dict(
        config=MODELS["multi_head"],
        normalization=normalization,
        make_batch=one_label,
        steps=3,
        keep_gradients=(0, 1, 2),
    )
    alone = run_ranks_fresh(train, 1, Run(layout=dict(micro_batch_size=2), **options))[0]
    run = Run(layout=over_ranks(size, form, micro_batch_size=2), **options)
    assert_same_training(run_ranks_fresh(train, size, run), alone)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "batches"), [("tied_learned", "odd"), ("windows", "packed")])
def test_slices_of_neighbouring_tokens_in_compiled_layers(model: str, batches: str) -> None:
    """All-to-all alone: within the compiled layers' graph."""
    runtime = RuntimeConfig(compile_layers=True)
    run = run_of(model, batches, layout=over_ranks(2, "all_to_all", runtime=runtime))
    ranks = run_ranks_fresh(train, 2, run, timeout=280)
    assert_same_training(ranks, single(model, batches))


@pytest.mark.parametrize("batches", ["packed", pytest.param("odd", marks=pytest.mark.slow)])
def test_slices_of_neighbouring_tokens(batches: str) -> None:
    """Which neither pads documents nor cuts them one by one."""
    run = run_of("windows", batches, layout=over_ranks(4, "all_to_all"))
    assert_same_training(run_ranks_fresh(train, 4, run), single("windows", batches))


JOINED: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2_sp_cp2": (4, dict(tensor_parallel_size=2, sequence_parallel=True)),
    "pp2_cp2": (4, dict(pipeline_parallel_size=2, micro_batch_size=2)),
    "pp2_interleaved_cp2": (4, dict(pipeline_parallel_size=2, virtual=2, micro_batch_size=2)),
    "cp2_dp2": (4, dict(micro_batch_size=2)),
    "tp2_sp_pp2_cp2": (
        8,
        dict(
            tensor_parallel_size=2,
            sequence_parallel=True,
            pipeline_parallel_size=2,
            micro_batch_size=2,
        ),
    ),
    "tp2_sp_cp2_dp2": (8, dict(tensor_parallel_size=2, sequence_parallel=True)),
    "pp2_cp2_dp2": (8, dict(pipeline_parallel_size=2, micro_batch_size=1)),
}


@pytest.mark.parametrize(
    ("layout", "form"),
    [
        ("tp2_sp_cp2", "ring"),
        ("tp2_sp_cp2", "all_gather"),
        ("pp2_cp2", "ring"),
        ("tp2_sp_pp2_cp2", "ring"),
        slow("pp2_interleaved_cp2", "ring"),
        slow("cp2_dp2", "all_gather"),
        slow("tp2_sp_cp2_dp2", "ring"),
        slow("tp2_sp_cp2", "all_to_all"),
        slow("pp2_interleaved_cp2", "all_to_all"),
        slow("pp2_cp2_dp2", "all_to_all"),
    ],
)
def test_with_other_axes(layout: str, form: str) -> None:
    world_size, options = JOINED[layout]
    run = run_of("tied_learned", layout=over_ranks(2, form, **options))
    assert_same_training(run_ranks_fresh(train, world_size, run), single("tied_learned"))


OTHERS: dict[str, tuple[int, dict[str, Any]]] = {
    "recompute_layers": (2, dict(recompute=RecomputeConfig(mode="full"))),
    "recompute_attention": (2, dict(recompute=RecomputeConfig(mode="selective"))),
    "sharded_optimizer": (4, dict(data_parallel=DataParallelConfig(sharding="optimizer"))),
    "zero_bubble": (
        4,
        dict(
            pipeline_parallel_size=2,
            micro_batch_size=2,
            pipeline=PipelineConfig(schedule="zb-h1"),
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("option", OTHERS)
def test_with_other_options(option: str) -> None:
    world_size, options = OTHERS[option]
    run = run_of("tied_learned", layout=over_ranks(2, "ring", **options))
    assert_same_training(run_ranks_fresh(train, world_size, run), single("tied_learned"))


@pytest.mark.slow
def test_bfloat16() -> None:
    trainer = dict(precision="bf16-mixed")
    alone = run_ranks_fresh(train, 1, run_of("windows", "packed", trainer=trainer))[0]
    run = run_of("windows", "packed", trainer=trainer, layout=over_ranks(2, "ring"))
    assert_same_training(run_ranks_fresh(train, 2, run), alone, torch.bfloat16)


@pytest.mark.slow
def test_all_axes_at_16_ranks() -> None:
    options = JOINED["tp2_sp_pp2_cp2"][1]
    run = run_of("tied_learned", "odd", layout=over_ranks(2, "ring", **options))
    ranks = run_ranks_fresh(train, 16, run, timeout=280)
    assert_same_training(ranks, single("tied_learned", "odd"))


@pytest.mark.parametrize(
    ("layout", "attention_dropout"),
    [("cp2", 0.1), ("tp2_sp_cp2", 0.0), slow("tp2_sp_pp2_cp2", 0.1)],
)
def test_exact_dropout(layout: str, attention_dropout: float) -> None:
    world_size, options = JOINED.get(layout, (2, {}))
    runtime = RuntimeConfig(exact_dropout=True)
    run = Run(
        config=tiny_config(hidden_dropout=0.1, attention_dropout=attention_dropout),
        layout=over_ranks(2, "all_gather" if attention_dropout else "ring", **options)
        | {"runtime": runtime},
        attention="reference",
        steps=3,
        keep_gradients=(0, 2),
    )
    alone = dataclasses.replace(run, layout={"runtime": runtime})
    assert_same_training(
        run_ranks_fresh(train, world_size, run), run_ranks_fresh(train, 1, alone)[0]
    )


def predict(rank: int, world_size: int, run: Run) -> list[Tensor]:
    trainer = L.Trainer(
        strategy=make_strategy(run.layout),
        accelerator="cpu",
        devices=world_size,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    batches = [global_batch(run, index) for index in range(2)]
    return trainer.predict(GPTModel(run.config), TokenList(batches))


class TokenList(list[Any]):
    """Batches that are there already; every rank reads all of them."""


@pytest.mark.parametrize("batches", ["odd", "packed"])
def test_predictions_are_those_of_whole_sequences(batches: str) -> None:
    alone = run_ranks_fresh(predict, 1, run_of("grouped", batches))[0]
    run = run_of("grouped", batches, layout=over_ranks(2, "ring", micro_batch_size=4))
    for rank in run_ranks_fresh(predict, 2, run):
        for got, want in zip(rank, alone, strict=True):
            assert got.shape == want.shape
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_checkpoints_move_between_context_sizes(tmp_path: Path) -> None:
    options = dict(config=MODELS["multi_head"], make_batch=odd_batch)
    run = Run(layout=over_ranks(2, "ring"), **options)
    whole = run_ranks_fresh(fit, 2, run, str(tmp_path / "whole"), 6, None)[0]
    saved = str(tmp_path / "whole" / "step=3.ckpt")
    for size in (1, 4):
        run = Run(layout=over_ranks(size, "hierarchical") if size > 1 else {}, **options)
        ranks = run_ranks_fresh(fit, size, run, str(tmp_path / str(size)), 6, saved)
        assert ranks[0]["rates"] == whole["rates"][3:]
        for step, (got, want) in enumerate(
            zip(ranks[0]["losses"], whole["losses"][3:], strict=True)
        ):
            tolerances.assert_loss_close(got, want, step)


class WithWeights(Batches):
    """Adds a field that the table doesn't know."""

    def _loader(self, batches: int) -> Any:
        return TokenList(
            global_batch(self.run, index) | {"quality": torch.rand(8, SEQUENCE)}
            for index in range(batches)
        )


def fit_unknown_field(rank: int, world_size: int, run: Run) -> None:
    trainer = L.Trainer(
        strategy=make_strategy(run.layout),
        accelerator="cpu",
        devices=world_size,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        max_steps=1,
    )
    trainer.fit(GPTModel(run.config), WithWeights(run))


def test_an_unknown_field_is_named() -> None:
    run = run_of("grouped", layout=over_ranks(2, "ring"))
    with pytest.raises(RankError, match=r"batch\['quality'\].*sequence_dims=\{'quality': 1\}"):
        run_ranks_fresh(fit_unknown_field, 2, run)
    known = over_ranks(2, "ring", sequence_dims={"quality": 1})
    run_ranks_fresh(fit_unknown_field, 2, run_of("grouped", layout=known))


class PlainLoss(GPTModel):
    """A user's step: the mean over labels that aren't ignored, not a number where there is none."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self(batch["tokens"], batch["position_ids"]).transpose(1, 2)  # (B, V, S)
        return torch.nn.functional.cross_entropy(logits, batch["labels"], ignore_index=-100)


def one_true_label(run: Run, index: int) -> dict[str, Tensor]:
    batch = one_label(run, index)
    batch["labels"] = batch["labels"].masked_fill(batch.pop("loss_mask") == 0, -100)
    batch["labels"][1:] = -100
    return batch | {"position_ids": torch.arange(SEQUENCE).repeat(len(batch["labels"]), 1)}


def fit_plain(rank: int, world_size: int, run: Run) -> dict[str, Any]:
    recorder = Recorder(dataclasses.replace(run, normalization="token"))
    trainer = L.Trainer(
        strategy=make_strategy(run.layout),
        accelerator="cpu",
        devices=world_size,
        max_steps=1,
        limit_val_batches=0,
        logger=False,
        callbacks=[recorder],
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    recorder.on_train_batch_end = lambda *_: None  # type: ignore[method-assign]
    trainer.fit(PlainLoss(run.config), Batches(run))
    return {"gradients": recorder.gradients[0], "norm": recorder.norms[0]}


def test_a_rank_whose_plain_mean_is_not_a_number() -> None:
    options = dict(config=MODELS["grouped"], make_batch=one_true_label, keep_gradients=(0,))
    alone = run_ranks_fresh(fit_plain, 1, Run(**options))[0]
    ranks = run_ranks_fresh(fit_plain, 2, Run(layout=over_ranks(2, "ring"), **options))
    found = assemble([rank["gradients"] for rank in ranks])
    for name, want in assemble([alone["gradients"]]).items():
        tolerances.assert_gradient_close(name, found[name], want, alone["norm"])


def generate_after_training(rank: int, world_size: int) -> str:
    run = run_of("grouped", layout=over_ranks(2, "ring"))
    model = GPTModel(run.config)
    options: dict[str, Any] = dict(accelerator="cpu", devices=world_size, max_steps=1)
    options |= dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    L.Trainer(strategy=make_strategy(run.layout), limit_val_batches=0, **options).fit(
        model, Batches(run)
    )
    with pytest.raises(ValueError, match="generate") as caught:
        model.generate([1, 2, 3, 4], max_new_tokens=1)
    return str(caught.value)


def test_a_network_of_parts_does_not_generate() -> None:
    """Its ranks would take the prompt for their parts of a sequence, and make up others."""
    for said in run_ranks_fresh(generate_after_training, 2):
        assert "cut by context_parallel_size" in said
