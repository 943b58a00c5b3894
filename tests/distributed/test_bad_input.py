"""Bad input gives one clear message (field, value, remedy) before any process is started."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint
from torch import nn

from megatron_lightning.config import (
    DataParallelConfig,
    PipelineConfig,
    QuantizationConfig,
    RuntimeConfig,
)
from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig
from megatron_lightning.config.validate import ConfigurationError
from megatron_lightning.data import PretrainingDataModule
from megatron_lightning.models.gpt import GPTModel
from megatron_lightning.strategies import MegatronStrategy, run_checks
from megatron_lightning.utils.ports import free_port
from tests.harness import run_ranks_fresh
from tests.launch_runs import forget_launcher
from tests.layout_runs import Batches, Run, tiny_config

CORPUS = str(Path(__file__).resolve().parents[1] / "data" / "corpora" / "gaps" / "items_int32")
QUIET: dict[str, Any] = dict(
    accelerator="cpu",
    max_steps=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    num_sanity_val_steps=0,
    limit_val_batches=0,
)


class Plain(L.LightningModule):
    """A user's module without a plan."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Manual(GPTModel):
    """Drives its optimizers itself."""

    def __init__(self) -> None:
        super().__init__(tiny_config())
        self.automatic_optimization = False


class Twice(GPTModel):
    """Calls the network a second time in a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self(batch["tokens"])
        return super().training_step(batch, batch_idx)


def trainer(devices: int, strategy: dict[str, Any], **changes: Any) -> L.Trainer:
    runtime = RuntimeConfig(launcher="fork")
    return L.Trainer(
        devices=devices, strategy=MegatronStrategy(**strategy, runtime=runtime), **QUIET | changes
    )


def gpt(**changes: Any) -> GPTModel:
    return GPTModel(tiny_config(**changes))


def corpus(path: str = CORPUS, seq: int = 8, micro: int = 2, batch: int = 8) -> Any:
    return PretrainingDataModule(path, seq, micro, batch)


def heads() -> None:
    trainer(4, dict(tensor_parallel_size=4)).fit(gpt(num_query_groups=2), Batches(Run()))


def three_devices() -> None:
    trainer(3, dict(tensor_parallel_size=2))


def too_few_devices() -> None:
    trainer(2, dict(tensor_parallel_size=2, pipeline_parallel_size=2))


def layers() -> None:
    trainer(4, dict(pipeline_parallel_size=4)).fit(gpt(num_layers=1), Batches(Run()))


def virtual_layers() -> None:
    pipeline = PipelineConfig(virtual_pipeline_size=4)
    trainer(2, dict(pipeline_parallel_size=2, pipeline=pipeline)).fit(gpt(), Batches(Run()))


def no_plan() -> None:
    trainer(2, dict(tensor_parallel_size=2)).fit(Plain(), Batches(Run()))


def global_batch() -> None:
    trainer(2, {}).fit(gpt(vocab_size=1000), corpus(batch=6))


def sequence() -> None:
    strategy = dict(tensor_parallel_size=2, sequence_parallel=True)
    trainer(2, strategy).fit(gpt(vocab_size=1000), corpus(seq=7))


def missing_file() -> None:
    trainer(2, {}).fit(gpt(), corpus("/no/such/corpus"))


def missing_checkpoint() -> None:
    trainer(2, {}).fit(gpt(), Batches(Run()), ckpt_path="/no/such/last.ckpt")


def foreign_checkpoint() -> None:
    trainer(2, {}).fit(gpt(), Batches(Run()), ckpt_path=__file__)


def validate_missing_checkpoint() -> None:
    trainer(2, {}).validate(gpt(), Batches(Run()), ckpt_path="/no/such/last.ckpt")


def predict_without_a_loader() -> None:
    trainer(2, {}).predict(gpt(vocab_size=1000), corpus())


def predict_without_data() -> None:
    trainer(2, {}).predict(Plain())


def no_test_loader() -> None:
    trainer(2, {}).test(gpt(), dataloaders=Batches(Run()))


def validate_without_data() -> None:
    trainer(2, {}, limit_val_batches=1).validate(gpt())


def fit_without_data() -> None:
    trainer(2, {}).fit(Plain())


def split_without_a_test() -> None:
    data = PretrainingDataModule(CORPUS, 8, 2, 8, split="90,10,0")
    trainer(2, {}).test(gpt(vocab_size=1000), data)


def half_precision_on_cpu() -> None:
    trainer(2, {}, precision="16-mixed").fit(gpt(), Batches(Run()))


def manual() -> None:
    trainer(2, dict(pipeline_parallel_size=2)).fit(Manual(), Batches(Run()))


def unknown_launcher() -> None:
    MegatronStrategy(runtime=RuntimeConfig(launcher="mpi"))  # type: ignore[arg-type]


def unknown_option() -> None:
    MegatronStrategy(tensor_paralel_size=2)  # type: ignore[call-arg]


def unknown_size() -> None:
    MegatronStrategy(tensor_parallel_size=0, pipeline_parallel_size=-1, sequence_parallel=True)


def unknown_backend() -> None:
    runtime = RuntimeConfig(launcher="fork", backend="nccl2")
    L.Trainer(devices=2, strategy=MegatronStrategy(runtime=runtime), **QUIET).fit(
        gpt(), Batches(Run())
    )


def nccl_on_cpu() -> None:
    runtime = RuntimeConfig(launcher="fork", backend="nccl")
    L.Trainer(devices=2, strategy=MegatronStrategy(runtime=runtime), **QUIET).fit(
        gpt(), Batches(Run())
    )


def no_accumulation() -> None:
    data = PretrainingDataModule(CORPUS, 16, 1, 2)
    trainer(2, {}, accumulate_grad_batches=0).fit(gpt(), data)


def no_experts() -> None:
    low = QuantizationConfig(simulate=True, experts=True)
    trainer(2, dict(quantization=low)).fit(gpt(), Batches(Run()))


def optimizer_numbers() -> None:
    model = GPTModel(
        tiny_config(), OptimizerConfig(lr=-1.0), SchedulerConfig(lr_warmup_steps=-1, min_lr=0.0)
    )
    trainer(2, {}).fit(model, Batches(Run()))


def finetuning_of_shards() -> None:
    sharded = dict(data_parallel=DataParallelConfig(sharding="optimizer"))
    trainer(2, sharded, callbacks=[BackboneFinetuning()]).fit(Plain(), Batches(Run()))


def finetuning_of_masters() -> None:
    trainer(2, {}, precision="bf16-mixed", callbacks=[BackboneFinetuning()]).fit(
        gpt(), Batches(Run())
    )


def several_nodes() -> None:
    trainer(2, {}, num_nodes=2)


CASES: dict[Callable[[], None], tuple[str, ...]] = {
    heads: ("num_query_groups", "2", "tensor_parallel_size=4"),
    three_devices: ("devices x num_nodes = 3", "tensor_parallel_size=2", "use 2 or 4 ranks"),
    too_few_devices: ("devices x num_nodes = 2", "pipeline_parallel_size=2", "use 4"),
    layers: ("num_layers=1", "pipeline_parallel_size=4", "at least 2 layers"),
    virtual_layers: ("num_layers=4", "virtual_pipeline_size=4", "at least 6 layers"),
    no_plan: ("Plain has no plan", "tensor_parallel_size=2", "MegatronStrategy(plan="),
    global_batch: ("global_batch_size=6", "micro_batch_size=2", "use 4 or 8"),
    sequence: ("seq_length=7", "tensor_parallel_size=2", "use 8"),
    missing_file: ("/no/such/corpus",),
    missing_checkpoint: ("ckpt_path='/no/such/last.ckpt'", "no such file", "None"),
    foreign_checkpoint: ("ckpt_path=", "not a complete checkpoint folder"),
    validate_missing_checkpoint: ("ckpt_path='/no/such/last.ckpt'", "no such file"),
    predict_without_a_loader: (
        "predict: PretrainingDataModule has no predict_dataloader; give data with one",
        "`--data my.module.Class`), or go on with prompts by `megatron-lightning generate`",
    ),
    predict_without_data: ("predict: Plain has no predict_dataloader; give data with one (on the",),
    no_test_loader: ("1 problem", "test: Batches has no test_dataloader; give data"),
    validate_without_data: ("1 problem", "validate: GPTModel has no val_dataloader; give data"),
    fit_without_data: ("1 problem", "fit: Plain has no train_dataloader; give data with one"),
    split_without_a_test: ("1 problem", "split='90,10,0' leaves nothing for testing", "test_paths"),
    half_precision_on_cpu: ("16-mixed", "bf16-mixed"),
    manual: ("automatic_optimization=False", "2 model-parallel ranks", "use automatic"),
    unknown_launcher: ("runtime.launcher='mpi'", "script"),
    unknown_option: ("tensor_paralel_size",),
    unknown_size: ("2 problems", "tensor_parallel_size=0", "pipeline_parallel_size=-1"),
    unknown_backend: ("runtime.backend='nccl2'", "gloo", "None"),
    nccl_on_cpu: ("runtime.backend='nccl'", "accelerator='cpu'", "gloo"),
    no_accumulation: ("1 problem", "accumulate_grad_batches=0", "at least 1"),
    no_experts: ("1 problem", "quantization.experts=True", "experts=False"),
    optimizer_numbers: ("optimizer.lr=-1.0", "scheduler.lr_warmup_steps=-1"),
    finetuning_of_shards: ("BackboneFinetuning", "sharding='optimizer'", "use sharding='none'"),
    finetuning_of_masters: ("BackboneFinetuning", "precision='bf16-mixed'", "masters"),
    several_nodes: ("num_nodes=2", "torchrun or srun"),
}


def message_of(rank: int, world_size: int, name: str) -> tuple[str, str, int]:
    forget_launcher()
    case = next(case for case in CASES if case.__name__ == name)
    started: list[int] = []
    fork = os.fork
    os.fork = lambda: started.append(fork()) or started[-1]  # type: ignore[assignment]
    try:
        case()
    except Exception as error:
        return type(error).__name__, str(error), len(started)
    return "nothing", "", len(started)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_refused_before_any_process(case: Callable[[], None]) -> None:
    ((kind, message, started),) = run_ranks_fresh(message_of, 1, case.__name__)
    assert kind in ("ConfigurationError", "ValueError", "TypeError"), (kind, message)
    for part in CASES[case]:
        assert part in message, message
    assert started == 0


def everything_wrong(rank: int, world_size: int) -> str:
    forget_launcher()
    strategy = dict(tensor_parallel_size=4, sequence_parallel=True)
    try:
        trainer(4, strategy).fit(
            gpt(vocab_size=1000), corpus(seq=7, batch=7, micro=7), ckpt_path="/no/such/last.ckpt"
        )
    except ConfigurationError as error:
        return str(error)
    return ""


def in_place_of_last(rank: int, world_size: int, folder: str, name: str) -> tuple[str, str, int]:
    """What a fit says to a checkpoint of another model that only a word leads to."""
    forget_launcher()
    saver = ModelCheckpoint(f"{folder}/regular", save_last=True)
    options = dict(callbacks=[saver], enable_checkpointing=True, default_root_dir=folder)
    forks: list[int] = []
    fork = os.fork
    os.fork = lambda: forks.append(fork()) or forks[-1]  # type: ignore[assignment]
    try:
        trainer(2, {}, **options).fit(gpt(num_layers=2), Batches(Run()), ckpt_path=name)
    except Exception as error:
        return type(error).__name__, str(error), len(forks)
    return "nothing", "", len(forks)


@pytest.mark.parametrize(
    ("name", "path"), [("last", "regular/last.ckpt"), ("hpc", "hpc_ckpt_1.ckpt")]
)
def test_checkpoint_of_another_model_behind_a_word(name: str, path: str, tmp_path: Path) -> None:
    ((kind, message, _),) = run_ranks_fresh(in_place_of_last, 1, str(tmp_path), "hpc")
    assert (kind, "ckpt_path='hpc'" in message) == ("ConfigurationError", True), message
    run_ranks_fresh(save_untrained, 1, str(tmp_path / path))
    ((kind, message, forks),) = run_ranks_fresh(in_place_of_last, 1, str(tmp_path), name)
    assert (kind, forks) == ("ConfigurationError", 0), message
    assert f"ckpt_path={name!r} ({tmp_path / path}): it holds another model: " in message
    assert "use the config that it was saved with" in message


def save_untrained(rank: int, world_size: int, path: str) -> None:
    forget_launcher()
    one = trainer(1, {}, max_steps=1)
    one.fit(gpt(num_layers=4), Batches(Run()))
    one.save_checkpoint(path)


def test_all_violations_at_once() -> None:
    (message,) = run_ranks_fresh(everything_wrong, 1)
    for part in ("num_query_groups", "seq_length=7", "ckpt_path="):
        assert part in message
    assert re.match(r"[345] problems", message)


# -------------------------------------------------------------------- found by the ranks


def run_fit(
    rank: int, world_size: int, module: type[GPTModel], layout: Mapping[str, Any]
) -> tuple[str, str, list[str]]:
    forget_launcher()
    try:
        trainer(2, dict(layout)).fit(module(tiny_config()), Batches(Run()))
    except Exception as error:
        left = [str(process) for process in psutil.Process().children(recursive=True)]
        return type(error).__name__, str(error), left
    return "nothing", "", []


def test_network_called_twice_in_a_pipeline() -> None:
    ((kind, message, left),) = run_ranks_fresh(run_fit, 1, Twice, dict(pipeline_parallel_size=2))
    assert kind in ("ValueError", "RuntimeError"), message
    assert "called the network 2 times" in message
    assert "pipeline_parallel_size=1" in message
    assert not left


def test_micro_batches_are_cut_as_far_as_the_batch_goes() -> None:
    """Batches of 4 in micro-batches of 3 and 1, or of 8: no sample is lost, nothing hangs."""
    for size in (3, 8):
        ((kind, message, _),) = run_ranks_fresh(run_fit, 1, GPTModel, dict(micro_batch_size=size))
        assert kind == "nothing", message


# -------------------------------------------------------------------- started from outside


def from_outside(rank: int, world_size: int) -> tuple[str, str, bool]:
    run_checks._FIRST_RANK_SECONDS = 0.5
    try:
        trainer(2, dict(tensor_parallel_size=2)).fit(gpt(num_query_groups=1), Batches(Run()))
    except BaseException as error:
        return type(error).__name__, str(error), torch.distributed.is_initialized()
    return "nothing", "", False


def test_message_of_the_first_rank_alone_before_the_process_group() -> None:
    first, second = run_ranks_fresh(from_outside, 2)
    assert first[0] == "ConfigurationError"
    assert "num_query_groups" in first[1]
    assert second[:2] == ("SystemExit", "1")
    assert not first[2]
    assert not second[2]


def wrong_number(rank: int, world_size: int) -> str:
    os.environ["LOCAL_RANK"], os.environ["RANK"] = "0", "0"
    os.environ["MASTER_PORT"] = str(free_port())
    try:
        trainer(1, {}).fit(gpt(), Batches(Run()))
    except ConfigurationError as error:
        return str(error)
    return ""


def test_other_number_of_processes_than_devices() -> None:
    message, _ = run_ranks_fresh(wrong_number, 2)
    assert "devices x num_nodes = 1 x 1 = 1, but 2 processes were started" in message
