"""The same training over context ranks: losses, norms, gradients and weights against one process."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lightning.config import ContextConfig, GPTConfig, RuntimeConfig
from tests.harness import run_ranks_fresh
from tests.layout_runs import SEQUENCE, Run, assert_same_training, tiny_config, train

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
    return Run(config=MODELS[model], make_batch=BATCHES[batches], **changes)


@functools.cache
def single(model: str, batches: str = "even") -> dict[str, Any]:
    return run_ranks_fresh(train, 1, run_of(model, batches))[0]


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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("batches", ["odd", "packed", "packed_alike"])
@pytest.mark.parametrize("model", ["tied_learned", "windows"])
def test_windows_packing_and_odd_lengths(model: str, batches: str, form: str) -> None:
    run = run_of(model, batches, layout=over_ranks(4, form))
    assert_same_training(run_ranks_fresh(train, 4, run), single(model, batches))


@pytest.mark.parametrize("form", ["ring", "all_to_all"])
@pytest.mark.parametrize("normalization", ["token", "micro_batch"])
@pytest.mark.parametrize("size", [2, 4])
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
