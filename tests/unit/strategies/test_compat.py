"""Each touch point with Lightning that is not quite public: fails when Lightning changes it."""

import inspect
import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.fabric.utilities import cloud_io
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core import saving
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.utilities.exceptions import SIGTERMException

from megatron_lightning.strategies import _compat


def make_trainer(**changes: Any) -> L.Trainer:
    options: dict[str, Any] = dict(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_steps=3,
        limit_val_batches=0,
    )
    return L.Trainer(**options | changes)


class AtBatchEnd(L.Callback):
    def __init__(self, action: Any) -> None:
        self.action, self.batches = action, 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches += 1
        self.action()


def test_replaced_sigterm_handler_is_registered_and_taken_back() -> None:
    trainer, seen = make_trainer(), []
    _compat.replace_signal_handlers(
        trainer, sigterm=lambda signum, frame: seen.append(signum), requeue=lambda *_: None
    )
    before = signal.getsignal(signal.SIGTERM)
    trainer.callbacks.append(AtBatchEnd(lambda: os.kill(os.getpid(), signal.SIGTERM)))
    trainer.fit(BoringModel())
    assert seen == [signal.SIGTERM] * 3
    assert not trainer.received_sigterm
    assert signal.getsignal(signal.SIGTERM) is before


def test_replaced_requeue_handler_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in dict(NTASKS=1, PROCID=0, LOCALID=0, NODEID=0, JOB_ID=4711).items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    trainer, seen = make_trainer(plugins=[SLURMEnvironment()]), []
    _compat.replace_signal_handlers(
        trainer, sigterm=None, requeue=lambda signum, frame: seen.append(signum)
    )
    trainer.callbacks.append(AtBatchEnd(lambda: os.kill(os.getpid(), signal.SIGUSR1)))
    trainer.fit(BoringModel())
    assert seen == [signal.SIGUSR1] * 3


def test_handler_that_comes_back_can_be_exchanged() -> None:
    trainer, before = make_trainer(), signal.getsignal(signal.SIGTERM)
    exchange = AtBatchEnd(
        lambda: _compat.set_handler_from_before(trainer, signal.SIGTERM, signal.SIG_IGN)
    )
    trainer.callbacks.append(exchange)
    try:
        trainer.fit(BoringModel())
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_validation_to_be_done_is_done_whole_when_resumed(tmp_path: Any) -> None:
    class Stop(L.Callback):
        def on_validation_start(self, trainer: L.Trainer, module: Any) -> None:
            self.progress = _compat.validation_to_be_done(trainer)

        def on_validation_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            trainer.save_checkpoint(tmp_path / "mid.ckpt")
            raise SIGTERMException

        def on_save_checkpoint(self, trainer: L.Trainer, module: Any, checkpoint: Any) -> None:
            _compat.set_validation_progress(checkpoint, self.progress)

    options = dict(limit_val_batches=3, val_check_interval=2, num_sanity_val_steps=0, max_steps=4)
    stopped = make_trainer(**options)
    stopped.callbacks.append(Stop())
    with pytest.raises(SIGTERMException):
        stopped.fit(BoringModel())

    class Count(L.Callback):
        def __init__(self) -> None:
            self.at: list[int] = []

        def on_validation_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            self.at.append(trainer.global_step)

    resumed, count = make_trainer(**options), Count()
    resumed.callbacks.append(count)
    resumed.fit(BoringModel(), ckpt_path=tmp_path / "mid.ckpt", weights_only=False)
    assert count.at == [2] * 3 + [4] * 3


def test_noted_sigterm_ends_the_run_after_the_batch() -> None:
    trainer = make_trainer()
    count = AtBatchEnd(lambda: _compat.note_sigterm(trainer))
    trainer.callbacks.append(count)
    with pytest.raises(SIGTERMException) as raised:
        trainer.fit(BoringModel())
    assert raised.value.code is None  # so that `set_exit_status` may set it
    assert count.batches == 1
    assert trainer.global_step == 1


def test_broadcast_of_sigterm_is_where_it_is_skipped() -> None:
    source = inspect.getsource(_TrainingEpochLoop.advance)
    assert source.count("self._broadcast_sigterm_tensor()") == 1
    trainer = make_trainer()
    _compat.skip_sigterm_broadcast(trainer)
    assert trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor() is None


def test_handlers_that_are_replaced_exist() -> None:
    source = inspect.getsource(_SignalConnector.register_signal_handlers)
    for name in ("self._sigterm_notifier_fn", "self._slurm_sigusr_handler_fn"):
        assert name in source


def test_the_trainer_launches_with_all_arguments_by_position() -> None:
    seen: list[dict[str, Any]] = []

    class Spy(_Launcher):
        is_interactive_compatible = True

        def launch(self, function: Any, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
            seen.append(_compat.run_arguments(function, args, kwargs))

        def kill(self, signum: Any) -> None: ...

    trainer, model = make_trainer(), BoringModel()
    trainer.strategy._launcher = Spy()
    loader = model.train_dataloader()
    trainer.fit(model, loader, ckpt_path="a")
    trainer.validate(model, loader, ckpt_path="b")
    trainer.test(model, loader, ckpt_path="c")
    trainer.predict(model, loader, ckpt_path="d")
    assert [arguments["ckpt_path"] for arguments in seen] == ["a", "b", "c", "d"]
    assert all(arguments["model"] is model for arguments in seen)
    assert seen[0]["train_dataloaders"] is loader
    assert all(arguments["dataloaders"] is loader for arguments in seen[1:])


def test_hooks_on_an_exception_come_in_the_order_that_we_rely_on() -> None:
    """Callbacks first, in their order; then the strategy; the strategy's teardown after them."""
    source = inspect.getsource(call._interrupt)
    assert source.index('"on_exception"') < source.index("trainer.strategy.on_exception")
    handler = inspect.getsource(call._call_and_handle_interrupt)
    assert "trainer.strategy.launcher.launch(trainer_fn, *args, trainer=trainer" in handler
    last = handler[handler.index("except BaseException") :]
    assert last.index("_interrupt(") < last.index("trainer._teardown()")


def test_call_in_rank_runs_the_hooks_on_exceptions() -> None:
    class Hook(L.Callback):
        seen: BaseException | None = None

        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            self.seen = exception

    trainer, hook = make_trainer(), Hook()
    trainer.callbacks.append(hook)
    trainer.strategy._lightning_module = BoringModel()
    trainer.state.fn = L.pytorch.trainer.states.TrainerFn.FITTING

    def fails() -> None:
        raise LookupError

    with pytest.raises(LookupError):
        _compat.call_in_rank(trainer, fails, (), {})
    assert isinstance(hook.seen, LookupError)


def test_results_of_one_trainer_fit_into_another() -> None:
    ran, waited = make_trainer(), make_trainer(max_steps=5)
    ran.fit(BoringModel())
    _compat.restore_trainer_results(waited, _compat.trainer_results(ran))
    assert waited.global_step == ran.global_step == 3
    assert waited.state.finished
    assert waited.callback_metrics.keys() == ran.callback_metrics.keys()
    model = BoringModel()
    steps = AtBatchEnd(lambda: None)
    waited.callbacks.append(steps)
    waited.fit(model)  # goes on with the count, as a second fit of one Trainer does
    ran.fit_loop.epoch_loop.max_steps = 5
    ran.fit(BoringModel())
    assert waited.global_step == ran.global_step == 5
    assert steps.batches == 2


def test_number_of_predict_dataloaders() -> None:
    trainer, model = make_trainer(), BoringModel()
    assert _compat.num_predict_dataloaders(trainer) == 0
    trainer.predict(model, [model.train_dataloader()] * 2, return_predictions=False)
    assert _compat.num_predict_dataloaders(trainer) == 2


def test_world_ranks_of_the_default_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")

    class Strategy:
        cluster_environment = LightningEnvironment()
        node_rank, local_rank, num_processes, num_nodes = 2, 1, 4, 3
        global_rank = 9

    _compat.set_world_ranks(Strategy())  # type: ignore[arg-type]
    assert Strategy.cluster_environment.global_rank() == 9
    assert Strategy.cluster_environment.world_size() == 12
    L.pytorch.utilities.rank_zero.rank_zero_only.rank = 0


def test_optimizer_state_moves() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter])
    parameter.sum().backward()
    optimizer.step()
    _compat.optimizers_to_device([optimizer], torch.device("meta"))
    assert optimizer.state[parameter]["exp_avg"].is_meta


def test_script_launcher_has_what_ours_overrides() -> None:
    assert {"procs", "num_processes", "num_nodes", "cluster_environment"} <= vars(
        _SubprocessScriptLauncher(LightningEnvironment(), 2, 1)
    ).keys()
    assert "subprocess.Popen(command, env=env_copy" in inspect.getsource(
        _SubprocessScriptLauncher._call_children_scripts
    )
    abstract = _Launcher.__abstractmethods__
    assert abstract == {"is_interactive_compatible", "launch", "kill"}


def test_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    _compat.set_num_threads(2)
    assert torch.get_num_threads() == 1


def test_what_model_checkpoint_asks_about_files(tmp_path: Path) -> None:
    """It asks `file_exists` before it names a file, and links through `_link_checkpoint`."""
    source = inspect.getsource(ModelCheckpoint)
    for method in ("_get_metric_interpolated_filepath_name", "_save_last_checkpoint"):
        assert "self.file_exists(" in inspect.getsource(getattr(ModelCheckpoint, method))
    assert source.count("self._link_checkpoint(trainer, self._last_checkpoint_saved, filepath)")
    callback = ModelCheckpoint(tmp_path, save_weights_only=True)
    trainer = L.Trainer(callbacks=[callback], logger=False, accelerator="cpu")
    waiting: list[Any] = []
    [undo] = _compat.show_pending(trainer, lambda path: path == "pending", waiting.append)
    assert callback.file_exists("pending", trainer)
    assert not callback.file_exists(str(tmp_path / "none"), trainer)
    callback._link_checkpoint(trainer, "pending", str(tmp_path / "last.ckpt"))
    assert not (tmp_path / "last.ckpt").is_symlink()
    waiting.pop()()
    assert (tmp_path / "last.ckpt").is_symlink()
    undo()
    assert not callback.file_exists("pending", trainer)
    assert not _compat.saves_training_state(trainer)
    assert _compat.checkpoint_folders(trainer) == [str(tmp_path)]
    assert _compat.epochs_done(trainer) == (0, 0)


def test_folders_where_checkpoints_will_be(tmp_path: Path) -> None:
    def folders(logger: Any) -> list[str]:
        trainer = L.Trainer(
            callbacks=[ModelCheckpoint()],
            logger=logger,
            accelerator="cpu",
            default_root_dir=tmp_path,
        )
        return _compat.checkpoint_folders(trainer)

    assert folders(False) == [str(tmp_path / "checkpoints")]
    assert folders(CSVLogger(tmp_path)) == []  # a version that is new
    named = CSVLogger(tmp_path, name="n", version="v")
    assert folders(named) == [str(tmp_path / "n" / "v" / "checkpoints")]


def test_load_from_checkpoint_reads_through_one_name() -> None:
    """Lightning's function looks up `pl_load` in its own module, where ours stands."""
    assert "pl_load(checkpoint_path" in inspect.getsource(saving._load_from_checkpoint)
    before = saving.pl_load
    try:
        _compat.read_folders_in_load_from_checkpoint(lambda path: path == "x", lambda *_: {"a": 1})
        assert saving.pl_load("x") == {"a": 1}
        assert getattr(saving.pl_load, _compat._READS_FILES) is cloud_io._load
    finally:
        saving.pl_load = before
