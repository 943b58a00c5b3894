"""Hugging Face folders written while training goes on."""

from __future__ import annotations

import re
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from typing_extensions import override

from megatron_lightning.bridge.background import ExportThread, HostCopy
from megatron_lightning.bridge.card import CARD, facts_of_trainer
from megatron_lightning.bridge.export import ExportOptions, begin_export, target_of
from megatron_lightning.bridge.folder import CONFIG
from megatron_lightning.bridge.held import held_for_export
from megatron_lightning.bridge.placing import DEFAULT_SHARD_BYTES
from megatron_lightning.bridge.writing import Export, Shares
from megatron_lightning.checkpoint.ranks import ALONE, RankGroup
from megatron_lightning.config.model import GPTConfig
from megatron_lightning.models import MegatronModule
from megatron_lightning.utils.logging import get_logger

_FOLDER = re.compile(r"step-(\d+)")
_LEFT = re.compile(r"\.step-\d+\.\w+\.partial(\.old)?")


@dataclass(frozen=True, kw_only=True)
class _Pending:
    export: Export
    thread: ExportThread
    ranks: RankGroup
    began: float
    stall_seconds: float


class HFExport(L.Callback):
    """Writes the model as a folder that transformers loads, `path/step-N`, while training goes on.

    Training waits for the copy of the weights to host memory. A thread of each rank writes from
    there the bytes of that rank, and the folder gets its name between two later steps, when all
    have finished; a failure is raised there, on all ranks. An export that is due while one is under
    way begins when that one has ended. A folder of the same step, as a resumed run writes it again,
    is replaced.

    Parameters
    ----------
    path
        Folder of the exports, on a file system that all ranks see.
    every_n_steps
        Optimizer steps between two exports; None: none but at the end.
    at_end
        Export when training ends, and wait for it.
    keep
        Exports to keep in the folder, the newest ones, whichever run wrote them; None: all.
    verify
        Read every tensor back and compare it.
    dtype
        Of the exported weights, as for `save_hf`.
    architecture
        `model_type` of transformers, as for `save_hf`. None: found from the config.
    max_shard_bytes
        Bytes of one weight file at most.
    tokenizer
        Tokenizer to put beside the weights, as for `save_hf`.
    merge_adapters
        Whether LoRA's products are added to the weights, as for `save_hf`.

    """

    reads_parameters = False  # but through the strategy, which waits
    """See `strategies/readers.py`."""

    def __init__(
        self,
        path: str | Path,
        *,
        every_n_steps: int | None = None,
        at_end: bool = True,
        keep: int | None = None,
        verify: bool = False,
        dtype: torch.dtype | None = None,
        architecture: str | None = None,
        max_shard_bytes: int = DEFAULT_SHARD_BYTES,
        tokenizer: str | Path | None = None,
        merge_adapters: bool | None = None,
    ) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("keep", keep)):
            if value is not None and value < 1:
                raise ValueError(f"HFExport: {name}={value}: give at least 1, or None")
        if every_n_steps is None and not at_end:
            raise ValueError("HFExport: every_n_steps=None and at_end=False would export nothing")
        self.path = Path(path).absolute()
        self.every_n_steps, self.at_end, self.keep = every_n_steps, at_end, keep
        self.exported: list[Path] = []
        """Folders that this fit has written, in order."""
        self._options = ExportOptions(
            dtype=dtype,
            architecture=architecture,
            max_shard_bytes=max_shard_bytes,
            tokenizer=tokenizer,
            verify=verify,
            replace=True,
        )
        self._merge_adapters = merge_adapters
        self._copy: HostCopy | None = None
        self._shares: Shares | None = None
        self._pending: _Pending | None = None
        self._due = False
        self._step = 0  # the last one at which an export was looked for
        self._deletion: threading.Thread | None = None

    # ------------------------------------------------------------------ hooks

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if not isinstance(pl_module, MegatronModule):
            raise ValueError(
                f"HFExport: {type(pl_module).__name__} is no module of this package, so that no"
                " architecture of transformers is known for it; leave the callback out"
            )
        target_of(pl_module, self._options.architecture)
        config = pl_module.config
        assert isinstance(config, GPTConfig), "others have no architecture"
        if trainer.is_global_zero:
            self._options.check_tokenizer(config.vocab_size)
        if pl_module.lora is not None and self._merge_adapters is None:
            raise ValueError(
                "HFExport: the module has adapters; give merge_adapters=True to write weights with"
                " the adapters in them, or False for the base alone"
            )

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step, self._due, self.exported = trainer.global_step, False, []
        self._copy, self._shares = HostCopy(pl_module.device), None
        if trainer.is_global_zero:
            for folder in self.path.glob(".step-*"):
                if _LEFT.fullmatch(folder.name):  # of a run that was killed
                    shutil.rmtree(folder, ignore_errors=True)

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._poll()
        step, every = trainer.global_step, self.every_n_steps
        if every is not None and step != self._step and step % every == 0:
            self._due = True
        self._step = step
        if self._due and self._pending is None:
            self._begin(trainer, pl_module)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._complete()
        last = self.path / _name(trainer.global_step)
        if self._due or (self.at_end and last not in self.exported):
            self._begin(trainer, pl_module)
            self._complete()

    @override
    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.export.given_up.set()
            pending.thread.join()
            if trainer.is_global_zero:
                pending.export.abandon()

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._copy is not None and self._pending is None:
            self._copy.close()
            self._copy = None
        if self._deletion is not None:
            self._deletion.join()
            self._deletion = None

    # ------------------------------------------------------------------ an export

    def _begin(self, trainer: Any, module: Any) -> None:
        began, self._due = time.monotonic(), False
        if trainer.fast_dev_run:
            return
        held, together = held_for_export(module, self._merge_adapters)
        facts = facts_of_trainer(trainer)
        if not together and not trainer.is_global_zero:
            return  # every rank holds all of it
        ranks = RankGroup(trainer.strategy.mesh.control_group if together else ALONE)
        if self._shares is None:
            self._shares = held.share(ranks)
        options = self._options.with_facts(facts)
        path = self.path / _name(trainer.global_step)
        export = begin_export(module, held, path, options, ranks, mine=self._shares)
        copy = self._copy
        assert copy is not None
        try:
            ranks.gather("copying weights to be exported", lambda: copy.take(held, export))
        except BaseException:
            if ranks.is_first:
                export.abandon()
            raise
        thread = ExportThread(export, copy, verify=options.verify)
        thread.start()
        self._pending = _Pending(
            export=export,
            thread=thread,
            ranks=ranks,
            began=began,
            stall_seconds=time.monotonic() - began,
        )

    def _poll(self) -> None:
        """Between two steps: put in its place what all ranks have written."""
        pending = self._pending
        if pending is not None:
            thread = pending.thread
            done, fine = pending.ranks.minimum(not thread.is_alive(), not thread.failed)
            if done or not fine:
                self._complete()

    def _complete(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        export, ranks = pending.export, pending.ranks
        try:
            ranks.gather(f"exporting to {export.path}", pending.thread.result)
            ranks.broadcast(
                f"exporting to {export.path}", lambda: export.put_in_place(replace=True)
            )
        except BaseException:
            if ranks.is_first:
                export.abandon()
            raise
        self.exported.append(export.path)
        if ranks.is_first:
            get_logger(__name__).info(
                "exported %s in %.1f s, training waited for %.2f s",
                export.path,
                time.monotonic() - pending.began,
                pending.stall_seconds,
            )
        if self.keep is not None:
            if ranks.is_first:
                self._delete_old(self.keep)
            self.exported = self.exported[-self.keep :]

    def _delete_old(self, keep: int) -> None:
        """Those of earlier runs first, then those of this one in their order."""
        found = [(m, p) for p in self.path.iterdir() if (m := _FOLDER.fullmatch(p.name))]
        found = [(m, p) for m, p in found if (p / CARD).is_file() and (p / CONFIG).is_file()]
        found = sorted(found, key=lambda entry: int(entry[0].group(1)))
        order = [path for _, path in found if path not in self.exported] + self.exported
        old = order[:-keep]
        if self._deletion is not None:
            self._deletion.join()
        self._deletion = threading.Thread(
            target=lambda: [shutil.rmtree(path, ignore_errors=True) for path in old], daemon=True
        )
        self._deletion.start()


def _name(step: int) -> str:
    return f"step-{step:08d}"
