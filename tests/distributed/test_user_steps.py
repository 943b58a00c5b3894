"""What a user's training step may do and give: under a pipeline, and on ranks that differ."""

import logging
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed.test_cases_loss import MaskedBatches, second_replica
from tests.harness import RankError, run_ranks_fresh
from tests.layout_runs import Batches, Recorder, assemble, results
from tests.user_modules import Classifier, OwnTransformer, decoder_plan
from tests.user_runs import LAYOUTS, fit_module, fit_pairs, quiet_trainer, user_run

SLOW = pytest.mark.slow

# ---------------------------------------------------------------- steps that can't be pipelined


class Twice(OwnTransformer):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net(batch["tokens"])
        return super().training_step(batch, batch_idx)


class Never(OwnTransformer):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": torch.zeros((), requires_grad=True), "num_tokens": 1}


@pytest.mark.parametrize(("make", "times"), [(Twice, 2), (Never, 0)])
def test_the_network_must_be_called_once(make: Any, times: int) -> None:
    run = user_run(layout=LAYOUTS["pp2"][1] | dict(plan=decoder_plan()))
    with pytest.raises(RankError, match=f"called the network {times} times"):
        run_ranks_fresh(fit_module, 2, make, run, timeout=60)


class OtherKeys(OwnTransformer):
    """Data ranks log different names."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log(f"of_rank_{self.global_rank % 2}", 1.0)
        return super().training_step(batch, batch_idx)


def test_ranks_that_log_different_names() -> None:
    run = user_run(layout=dict(plan=decoder_plan()))
    with pytest.raises(RankError, match="ranks logged different keys") as caught:
        run_ranks_fresh(fit_module, 2, OtherKeys, run, timeout=60)
    assert str(caught.value).count("of_rank_1") >= 2  # every rank gets the message


class Raises(OwnTransformer):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("before", 1.0)
        result = super().training_step(batch, batch_idx)
        if self.trainer.global_step == 2:
            raise KeyError("from the last stage")
        return result


def test_an_exception_in_a_step_under_pipeline() -> None:
    run = user_run(layout=LAYOUTS["pp2"][1] | dict(plan=decoder_plan()))
    with pytest.raises(RankError, match="from the last stage") as caught:
        run_ranks_fresh(fit_module, 2, Raises, run, timeout=60)
    assert caught.value.rank == 1


class Gathers(OwnTransformer):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        self.all_gather(result["loss"])
        return result


def test_collectives_inside_a_pipelined_step_are_refused() -> None:
    """Stages that unwind before would never take part."""
    run = user_run(layout=LAYOUTS["pp2"][1] | dict(plan=decoder_plan()))
    with pytest.raises(RankError, match="all_gather.*pipeline_parallel_size > 1"):
        run_ranks_fresh(fit_module, 2, Gathers, run, timeout=60)


# ---------------------------------------------------------------- steps that give nothing


class SometimesNone(OwnTransformer):
    """Skips the second batch on data rank 1, everywhere the third; a mean over micro-batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, _ = self.losses(batch)
        self.log("train_loss", loss)
        rank = self.trainer.distributed_sampler_kwargs["rank"]
        return None if batch_idx == 2 or (batch_idx == 1 and rank == 1) else loss


@pytest.mark.parametrize(
    ("size", "layout"), [(2, {}), pytest.param(4, dict(pipeline_parallel_size=2), marks=SLOW)]
)
def test_a_step_may_give_none_on_some_ranks(size: int, layout: dict[str, Any]) -> None:
    run = user_run(layout=layout | dict(plan=decoder_plan()), keep_gradients=(1, 2))
    ranks = run_ranks_fresh(fit_module, size, SometimesNone, run, timeout=60)
    for rank in ranks:
        assert rank["losses"] == ranks[0]["losses"]
        assert rank["losses"][2] == 0.0  # nothing, so nothing was learnt
        assert rank["norms"][1] > 0.0
        assert rank["norms"][2] == 0.0
        assert all(math.isfinite(loss) for loss in rank["losses"])
    assemble([rank["final"] for rank in ranks])  # replicas are still equal


class Branch(Classifier):
    """A part of the network that only one data rank uses in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.body[0](x)[:, :4]
        if (batch_idx + self.global_rank) % 2:
            logits = logits + self.extra(x)
        loss = F.cross_entropy(logits, y)
        self.log("train_loss", loss)
        return loss


def test_a_part_that_one_replica_does_not_use() -> None:
    """Its gradient is the other's share, as with DDP(find_unused_parameters=True)."""
    run = user_run(steps=3)
    first, second = run_ranks_fresh(fit_pairs, 2, Branch, run, 24, 4, timeout=60)
    for name, value in first["final"].items():
        assert torch.equal(value, second["final"][name]), name
    untrained = dict(Branch().named_parameters())
    assert not torch.equal(first["final"]["body.0.weight"], untrained["body.0.weight"])


def fit_masked(rank: int, world_size: int, layout: dict[str, Any], only: int | None) -> Any:
    run = user_run(layout=layout | dict(plan=decoder_plan()), keep_gradients=(0,))
    recorder = Recorder(run)
    trainer = quiet_trainer(run, world_size, [recorder])
    trainer.fit(OwnTransformer(), MaskedBatches(run, second_replica, only))
    return results(trainer, recorder)


@pytest.mark.parametrize(
    ("size", "layout"), [(2, {}), pytest.param(4, dict(pipeline_parallel_size=2), marks=SLOW)]
)
def test_a_mean_over_no_tokens_is_left_out(size: int, layout: dict[str, Any]) -> None:
    """0/0 on data rank 1: its gradient would not be a number, and no token of it counts."""
    [single] = run_ranks_fresh(fit_masked, 1, {}, 0)
    for rank in run_ranks_fresh(fit_masked, size, layout, None):
        assert rank["losses"] == pytest.approx(single["losses"], rel=1e-5)


def fit_detached(rank: int, world_size: int) -> list[str]:
    class Detached(OwnTransformer):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx)["loss"].detach()

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron_lightning").addHandler(handler)
    run = user_run(layout=dict(plan=decoder_plan()), steps=2)
    quiet_trainer(run, world_size, []).fit(Detached(), Batches(run))
    return [message for message in messages if "does not depend on any trainable" in message]


def test_a_loss_without_a_gradient_is_said() -> None:
    assert len(run_ranks_fresh(fit_detached, 1)[0]) == 1
