"""ExpertHealth: the numbers of one process in every layout, and warnings of what is so."""

import csv
import functools
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from megatron_lightning.callbacks import ExpertHealth
from megatron_lightning.config import ExpertConfig, MoEConfig
from megatron_lightning.layers.moe.router import Router
from megatron_lightning.models import GPTModel
from tests.harness import run_ranks_fresh
from tests.layout_runs import Batches, Run, make_strategy, tiny_config

EXPERTS = MoEConfig(
    num_experts=4,
    router_topk=2,
    ffn_hidden_size=32,
    load_balancing="seq_aux_loss",
    aux_loss_coeff=0.01,
    z_loss_coeff=0.001,
)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, dict(expert_parallel_size=2)),
    "pp2": (2, dict(pipeline_parallel_size=2)),
    "tp2": (
        2,
        dict(tensor_parallel_size=2, expert_parallel_size=2, expert_tensor_parallel_size=1),
    ),
    "tp2_sp": (2, dict(tensor_parallel_size=2, sequence_parallel=True)),
    "ep2_gather": (2, dict(expert_parallel_size=2, expert=ExpertConfig(dispatcher="all_gather"))),
}


def fit(
    rank: int, world_size: int, layout: dict[str, Any], folder: str, favour: float = 0.0, **health
) -> dict[str, Any]:
    run = Run(config=tiny_config(moe=EXPERTS), steps=4, layout={"micro_batch_size": 1} | layout)
    callback = ExpertHealth(**{"every_n_steps": 2, "directory": folder, **health})

    class Favour(L.Callback):
        """Makes routers send every token to expert 2, and none to expert 0."""

        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if favour:
                for part in pl_module.modules():
                    if isinstance(part, Router):
                        part.logits = functools.partial(_favouring, part, favour)

    trainer = L.Trainer(
        strategy=make_strategy(run.layout),
        accelerator="cpu",
        devices=world_size,
        max_steps=run.steps,
        logger=CSVLogger(folder, name="", version="log"),
        callbacks=[Favour(), callback],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(GPTModel(run.config), Batches(run))
    return {
        "readings": callback.readings,
        "warnings": [str(one.message) for one in caught if "layer" in str(one.message)],
    }


def _favouring(router: Router, favour: float, hidden: torch.Tensor) -> torch.Tensor:
    logits = Router.logits(router, hidden)
    return logits + favour * torch.tensor([-1.0, 0.0, 1.0, 0.0])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("alone")
    return run_ranks_fresh(fit, 1, {}, str(folder))[0], folder


def test_counts_are_whole_and_files_say_so(alone: tuple[dict[str, Any], Path]) -> None:
    found, folder = alone
    assert [reading.step for reading in found["readings"]] == [2, 4]
    last = found["readings"][-1]
    assert list(last.layers) == [str(i) for i in range(len(last.layers))]
    for load in last.layers.values():
        assert load.tokens.sum() == 2 * load.num_tokens
        assert 0 < load.entropy <= np.log(4)
        assert load.relative.mean() == pytest.approx(1)
        assert 0.009 < load.aux_loss < 0.02  # 1 when even, times its coefficient
        assert load.dropped_share == 0
        assert load.z_loss > 0
    assert (folder / "expert_load.png").read_bytes()[:4] == b"\x89PNG"
    rows = list(csv.DictReader((folder / "expert_load.csv").open()))
    assert [row["step"] for row in rows] == ["2"] * len(last.layers) + ["4"] * len(last.layers)
    assert rows[-1]["tokens_of_experts"].split() == [str(n) for n in load.tokens]
    logged = list(csv.DictReader((folder / "log" / "metrics.csv").open()))
    assert any(row.get("moe/max_over_mean/0") for row in logged)
    assert not last.exchanges


@pytest.mark.parametrize(
    "layout",
    [pytest.param(n, marks=[] if n in ("ep2", "tp2") else pytest.mark.slow) for n in LAYOUTS],
)
def test_every_layout_reads_the_same(
    layout: str, alone: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    size, options = LAYOUTS[layout]
    ranks = run_ranks_fresh(fit, size, options, str(tmp_path))
    for found in ranks:
        for one, other in zip(alone[0]["readings"], found["readings"], strict=True):
            assert one.layers.keys() == other.layers.keys()
            for name, load in one.layers.items():
                assert np.array_equal(other.layers[name].tokens, load.tokens)
                for field in ("entropy", "aux_loss", "z_loss"):
                    wanted = pytest.approx(getattr(load, field), rel=1e-4)
                    assert getattr(other.layers[name], field) == wanted
    exchanges = ranks[0]["readings"][-1].exchanges
    if layout in ("ep2", "tp2", "tp2_sp"):  # the last has expert tensor ranks
        assert [times.rank for times in exchanges] == [0, 1]
        assert all(0 < times.median <= times.p95 <= times.total for times in exchanges)
        assert ranks[0]["readings"][-1].slowest_rank == ranks[1]["readings"][-1].slowest_rank
    else:
        assert not exchanges


def test_it_warns_of_starving_and_overloaded_experts(tmp_path: Path) -> None:
    options = dict(every_n_steps=1, overloaded=1.5, patience=2)
    found = run_ranks_fresh(functools.partial(fit, favour=50.0, **options), 1, {}, str(tmp_path))[0]
    said = found["warnings"]
    assert len([line for line in said if "layer 0: expert 0 is starving, at 0.00" in line]) == 1
    assert len([line for line in said if "layer 0: expert 2 is overloaded, at 2.00" in line]) == 1
    assert all(line.startswith("step 2,") for line in said)


def test_wrong_use_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="starving=2.0, overloaded=5.0"):
        ExpertHealth(starving=2.0)
    with pytest.raises(ValueError, match="every_n_steps=0"):
        ExpertHealth(0)
    trainer = L.Trainer(
        strategy=make_strategy({}),
        accelerator="cpu",
        devices=1,
        max_steps=1,
        logger=False,
        callbacks=[ExpertHealth(directory=tmp_path)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(ValueError, match="GPTModel has no experts"):
        trainer.fit(GPTModel(tiny_config()), Batches(Run(config=tiny_config(), steps=1)))
