"""Recompute and offload change what is kept, and not one bit of the training, dropout included."""

import functools
from typing import Any

import pytest
import torch

from megatron_lightning.config import (
    ContextConfig,
    DataParallelConfig,
    PipelineConfig,
    QuantizationConfig,
    RecomputeConfig,
)
from megatron_lightning.config.validate import ConfigurationError
from megatron_lightning.strategies import MegatronStrategy
from tests.harness import RankError, run_ranks_fresh
from tests.layout_runs import Run, tiny_config, train

FORMS: dict[str, RecomputeConfig] = {
    "full": RecomputeConfig(mode="full"),
    "full_groups_of_3": RecomputeConfig(mode="full", num_layers=3),
    "block_of_1": RecomputeConfig(mode="full", method="block", num_layers=1),
    "core_attention": RecomputeConfig(mode="selective"),
    "mlp_and_norms": RecomputeConfig(mode="selective", modules=["mlp", "*_layernorm"]),
    "activation": RecomputeConfig(mode="selective", modules=["layers.[02].mlp.activation"]),
    "offload": RecomputeConfig(offload=True, offload_min_bytes=0),
    "full_offload": RecomputeConfig(mode="full", offload=True, offload_min_bytes=0),
    "groups_offload": RecomputeConfig(mode="full", num_layers=2, offload=True, offload_min_bytes=0),
    "selective_offload": RecomputeConfig(
        mode="selective", modules=["mlp", "layers.1"], offload=True, offload_min_bytes=1024
    ),
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "tp2_sp": (2, dict(tensor_parallel_size=2, sequence_parallel=True)),
    "pp2_interleaved": (2, dict(pipeline_parallel_size=2, virtual=2, micro_batch_size=2)),
    "tp2_sp_pp2_dp2": (
        8,
        dict(
            tensor_parallel_size=2,
            pipeline_parallel_size=2,
            sequence_parallel=True,
            micro_batch_size=1,
        ),
    ),
}
OTHERS: dict[str, tuple[int, dict[str, Any]]] = {
    "cp2": (2, dict(context_parallel_size=2)),
    "cp2_all_to_all": (
        2,
        dict(context_parallel_size=2, context=ContextConfig(form="all_to_all")),
    ),
    "zb_h1": (
        2,
        dict(
            pipeline_parallel_size=2,
            micro_batch_size=2,
            pipeline=PipelineConfig(schedule="zb-h1"),
        ),
    ),
    "zb_v": (
        2,
        dict(
            pipeline_parallel_size=2,
            micro_batch_size=2,
            pipeline=PipelineConfig(schedule="zb-v", virtual_pipeline_size=2),
        ),
    ),
    "zero1": (2, dict(data_parallel=DataParallelConfig(sharding="optimizer"))),
    "fsdp": (2, dict(data_parallel=DataParallelConfig(sharding="fsdp"))),
}


def run_of(layout: str, form: RecomputeConfig | None) -> Run:
    options = (LAYOUTS | OTHERS)[layout][1]
    in_attention = 0.0 if "context_parallel_size" in options else 0.1  # a ring can't drop there
    return Run(
        config=tiny_config(hidden_dropout=0.1, attention_dropout=in_attention),
        layout=options if form is None else options | {"recompute": form},
        steps=3,
        keep_gradients=(0, 2),
    )


@functools.cache
def plain(layout: str) -> list[dict[str, Any]]:
    return run_ranks_fresh(train, (LAYOUTS | OTHERS)[layout][0], run_of(layout, None))


def assert_bitwise(got: list[dict[str, Any]], want: list[dict[str, Any]]) -> None:
    for mine, other in zip(got, want, strict=True):
        for key in ("losses", "norms", "metrics"):
            assert mine[key] == other[key], key
        pairs = [(mine["final"], other["final"])]
        pairs += [(mine["gradients"][step], other["gradients"][step]) for step in (0, 2)]
        for tensors, expected in pairs:
            assert tensors.keys() == expected.keys()
            for name, held in expected.items():
                for (*_, got), (*_, want) in zip(
                    boxes_of(tensors[name]), boxes_of(held), strict=True
                ):
                    assert torch.equal(got, want), name


def boxes_of(held: Any) -> list[Any]:
    """One box or several."""
    return held if isinstance(held, list) else [held]


@pytest.mark.parametrize("form", FORMS)
def test_bitwise_in_one_process(form: str) -> None:
    assert_bitwise(run_ranks_fresh(train, 1, run_of("single", FORMS[form])), plain("single"))


@pytest.mark.parametrize("form", ["full", "full_groups_of_3", "mlp_and_norms", "full_offload"])
@pytest.mark.parametrize("layout", ["tp2_sp", "pp2_interleaved"])
def test_bitwise_in_layouts(layout: str, form: str) -> None:
    ranks = run_ranks_fresh(train, LAYOUTS[layout][0], run_of(layout, FORMS[form]))
    assert_bitwise(ranks, plain(layout))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["full", "core_attention", "groups_offload"])
def test_bitwise_in_all_axes(form: str) -> None:
    ranks = run_ranks_fresh(train, 8, run_of("tp2_sp_pp2_dp2", FORMS[form]))
    assert_bitwise(ranks, plain("tp2_sp_pp2_dp2"))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["full_groups_of_3", "mlp_and_norms", "full_offload"])
@pytest.mark.parametrize("layout", OTHERS)
def test_bitwise_with_other_dimensions(layout: str, form: str) -> None:
    ranks = run_ranks_fresh(train, OTHERS[layout][0], run_of(layout, FORMS[form]))
    assert_bitwise(ranks, plain(layout))


@pytest.mark.parametrize(
    "layout",
    ["zb_v", *(pytest.param(one, marks=pytest.mark.slow) for one in ("tp2_sp", "zb_h1", "fsdp"))],
)
def test_bitwise_without_the_mlps_products(layout: str) -> None:
    ranks = run_ranks_fresh(
        train, (LAYOUTS | OTHERS)[layout][0], run_of(layout, FORMS["activation"])
    )
    assert_bitwise(ranks, plain(layout))


FP8 = QuantizationConfig(recipe="fp8_tensorwise", simulate=True, keep_first=1, keep_last=0)


@pytest.mark.parametrize("modules", [["mlp.activation"], ["mlp.*"]])
@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        (dict(gated_linear_unit=False, activation="gelu"), {}),
        ({}, dict(quantization=FP8)),
    ],
    ids=["gelu", "fp8"],
)
def test_bitwise_where_products_are_kept(
    changes: dict[str, Any], layout: dict[str, Any], modules: list[str]
) -> None:
    """What no layer behind can compute again is a region like any module."""
    form = RecomputeConfig(mode="selective", modules=modules)
    runs = [
        Run(config=tiny_config(num_layers=2, **changes), layout=layout | more, steps=2)
        for more in ({}, {"recompute": form})
    ]
    want, got = (run_ranks_fresh(train, 1, run) for run in runs)
    assert got[0]["losses"] == want[0]["losses"]
    assert got[0]["norms"] == want[0]["norms"]


def test_wrong_settings_are_explained_together() -> None:
    wrong = RecomputeConfig(mode="selective", method="block", num_layers=0, modules=[])
    with pytest.raises(ConfigurationError) as caught:
        MegatronStrategy(recompute=wrong)
    text = str(caught.value)
    for words in ("num_layers=0", "method='block'", "modules=[]"):
        assert words in text


def test_a_glob_that_matches_nothing_is_refused_with_the_names() -> None:
    form = RecomputeConfig(mode="selective", modules=["core_atention"])
    with pytest.raises(RankError, match="'core_atention' matches no module") as caught:
        run_ranks_fresh(train, 1, run_of("single", form))
    assert "core_attention" in str(caught.value)
