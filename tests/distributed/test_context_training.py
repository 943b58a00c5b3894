"""The same training over context ranks: losses, norms, gradients and weights against one
process.
"""

import functools
from typing import Any

import pytest

from megatron_lightning.config import ContextConfig, GPTConfig
from tests.harness import run_ranks_fresh
from tests.layout_runs import Run, assert_same_training, tiny_config, train

FORMS = {
    "ring": ContextConfig(form="ring"),
    "all_gather": ContextConfig(form="all_gather"),
    "all_to_all": ContextConfig(form="all_to_all"),
    "hierarchical": ContextConfig(form="hierarchical", inner_size=2),
}
MODELS: dict[str, GPTConfig] = {
    "grouped": tiny_config(),
    "multi_head": tiny_config(num_query_groups=4, tie_word_embeddings=True),
}


@functools.cache
def single(model: str) -> dict[str, Any]:
    return run_ranks_fresh(train, 1, Run(config=MODELS[model]))[0]


def layout(size: int, form: str, **others: Any) -> dict[str, Any]:
    return dict(context_parallel_size=size, context=FORMS[form]) | others


@pytest.mark.parametrize("form", ["ring", "all_gather", "all_to_all"])
def test_two_ranks(form: str) -> None:
    run = Run(config=MODELS["grouped"], layout=layout(2, form))
    assert_same_training(run_ranks_fresh(train, 2, run), single("grouped"))


@pytest.mark.parametrize("form", FORMS)
def test_four_ranks(form: str) -> None:
    run = Run(config=MODELS["multi_head"], layout=layout(4, form))
    assert_same_training(run_ranks_fresh(train, 4, run), single("multi_head"))
