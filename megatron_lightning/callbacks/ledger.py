"""What a run was trained on: documents, samples and tokens by source and epoch, exact across
resume and change of layout.

Every batch of this package's loaders carries an account of its samples, made on the CPU where they
were read. Each rank adds up its own; the sum over ranks is taken where it is logged and where a
checkpoint is written, in one small exchange between CPUs that also finds ranks which disagree. No
GPU is waited for.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
from typing_extensions import override

from megatron_lightning.callbacks.ledger_exchange import Sums, digest, sum_over_ranks
from megatron_lightning.data.account import ACCOUNT, BatchAccount
from megatron_lightning.strategies import MegatronStrategy


class TokenCounts(NamedTuple):
    """Sums over samples that were trained on."""

    samples: int = 0
    """Sequences."""
    documents: int = 0
    """Documents that begin in them."""
    tokens: int = 0
    """Input tokens, padding included."""
    non_padding_tokens: int = 0
    """Input tokens that do not only fill up a sequence."""
    loss_tokens: int = 0
    """Tokens whose label has a loss."""
    truncated: int = 0
    """Documents that lost tokens because they were too long."""


_FIELDS = TokenCounts._fields


class TokenLedger(L.Callback):
    """Counts what the data modules of this package deliver for training.

    Parameters
    ----------
    every_n_steps
        Optimizer steps between two entries in logger and file; None: the Trainer's
        `log_every_n_steps`.
    directory
        Where `token_ledger.csv` goes. None: the Trainer's log directory, else its
        `default_root_dir`.

    The counts are saved in the checkpoint, and continue after a resume in any layout and with any
    batch size. They are the same on all ranks, and brought up to date where they are logged, saved,
    and at the end of training.

    Raises
    ------
    RuntimeError
        Ranks of one model copy have read different samples, or ranks hold different counts.

    """

    reads_parameters = False
    """See `strategies/readers.py`."""

    def __init__(
        self, every_n_steps: int | None = None, *, directory: str | Path | None = None
    ) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps}: give at least 1, or None")
        self.every_n_steps = every_n_steps
        self.directory = directory
        self.optimizer_steps = 0
        """Optimizer steps when the counts were brought up to date."""
        self.skipped_samples = 0
        """Samples that were not trained on: they filled no batch at the end of an epoch, or their
        batch was left out or interrupted."""
        self._totals: Sums = {}
        self._own: Sums = {}  # of this rank, since the totals were brought up to date
        self._own_skipped = 0
        self._open: BatchAccount | None = None  # fetched, its step not known to have ended
        self._trainer: L.Trainer | None = None
        self._path = Path()
        self._shown = (0, TokenCounts())  # the last entry

    # ------------------------------------------------------------------ reading

    @property
    def counts(self) -> dict[tuple[str, int], TokenCounts]:
        """Counts by source and epoch of the source (from 0)."""
        return {key: TokenCounts(*sums.tolist()) for key, sums in sorted(self._totals.items())}

    @property
    def total(self) -> TokenCounts:
        """Counts of all sources and epochs."""
        return _total(self._totals.values())

    def by_source(self) -> dict[str, TokenCounts]:
        """Counts of all epochs of each source."""
        names = sorted({source for source, _ in self._totals})
        return {
            name: _total(sums for (source, _), sums in self._totals.items() if source == name)
            for name in names
        }

    def training_facts(self) -> dict[str, int]:
        """What the model card of an export says. In a fit all ranks call it, and the counts are
        brought up to date.
        """
        if self._trainer is not None:
            self._update(self._trainer)
        total = self.total
        return {"tokens": total.tokens, "tokens with a loss": total.loss_tokens}

    # ------------------------------------------------------------------ counting

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._trainer = trainer

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._trainer = None

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        folder = self.directory or trainer.log_dir or trainer.default_root_dir  # on all ranks
        self._path = Path(folder) / "token_ledger.csv"
        self._shown = (trainer.global_step, self.total)
        if trainer.is_global_zero:
            _begin_file(self._path, trainer.global_step)

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        account = batch.get(ACCOUNT) if isinstance(batch, Mapping) else None
        if not isinstance(account, BatchAccount):
            raise ValueError(
                f"TokenLedger: the batch has no {ACCOUNT!r}, which the data modules of this package"
                " put there; train with one of them, or leave the callback out"
            )
        if self._open is not None:  # left out by a hook: its step never ended
            self._own_skipped += _samples(self._open)
        self._open = account
        self.skipped_samples += account.left_out

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._close()
        step = trainer.global_step
        every = self.every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and step % every == 0 and step != self._shown[0]:
            self._log(trainer)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._log(trainer)

    def _close(self) -> None:
        """Counts the batch that has been trained on."""
        if self._open is not None:
            for key, sums in self._open.totals().items():
                self._own[key] = self._own.get(key, 0) + sums
            self._open = None

    # ------------------------------------------------------------------ state

    @override
    def state_dict(self) -> dict[str, Any]:
        """Counts as of now. All ranks call it, as they do when a checkpoint is written."""
        waiting = 0
        if self._trainer is not None:
            waiting = self._update(self._trainer)
        rows = [[source, epoch, *sums] for (source, epoch), sums in self.counts.items()]
        return {
            "fields": list(_FIELDS),
            "rows": rows,
            "skipped_samples": self.skipped_samples + waiting,
            "optimizer_steps": self.optimizer_steps,
        }

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue with the counts of a checkpoint."""
        if list(state_dict.get("fields", ())) != list(_FIELDS):
            raise ValueError(
                f"TokenLedger: the checkpoint counts {state_dict.get('fields')}, this version "
                f"{list(_FIELDS)}; leave the callback out, or resume with the version that saved it"
            )
        self._totals = {
            (source, epoch): np.array(sums, np.int64) for source, epoch, *sums in state_dict["rows"]
        }
        self.skipped_samples = state_dict["skipped_samples"]
        self.optimizer_steps = state_dict["optimizer_steps"]
        self._own, self._own_skipped, self._open = {}, 0, None

    def _update(self, trainer: L.Trainer) -> int:
        """Brings the totals up to date, on all ranks together. Returns the samples of a batch that
        is under way.
        """
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        if progress.processed == progress.ready:
            self._close()
        strategy = trainer.strategy
        if isinstance(strategy, MegatronStrategy) and strategy.fails_alone:
            return 0
        waiting = 0 if self._open is None else _samples(self._open)
        own, (skipped, waiting) = sum_over_ranks(
            trainer,
            self._own,
            np.array([self._own_skipped, waiting]),
            digest(self._totals),
            len(_FIELDS),
        )
        for key, sums in own.items():
            self._totals[key] = self._totals.get(key, 0) + sums
        self.skipped_samples += int(skipped)
        self._own, self._own_skipped = {}, 0
        self.optimizer_steps = trainer.global_step
        return int(waiting)

    # ------------------------------------------------------------------ showing

    def _log(self, trainer: L.Trainer) -> None:
        self._update(trainer)
        shown, self._shown = self._shown, (self.optimizer_steps, self.total)
        if not trainer.is_global_zero or shown == self._shown:
            return
        total = self.total._asdict() | {"skipped_samples": self.skipped_samples}
        numbers: dict[str, float] = {f"ledger/{name}": value for name, value in total.items()}
        numbers |= {f"ledger/tokens/{name}": each.tokens for name, each in self.by_source().items()}
        for logger in trainer.loggers:  # whole numbers: `log` would round them to float32
            logger.log_metrics(numbers, step=self.optimizer_steps)
        with self._path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            for (source, epoch), each in self.counts.items():
                writer.writerow([self.optimizer_steps, source, epoch, *each, ""])
            writer.writerow([self.optimizer_steps, "total", "", *self.total, self.skipped_samples])


def _samples(account: BatchAccount) -> int:
    return int((account.sample_id >= 0).sum())


def _total(sums: Any) -> TokenCounts:
    return TokenCounts(*sum(sums, np.zeros(len(_FIELDS), np.int64)).tolist())


def _begin_file(path: Path, step: int) -> None:
    """Makes the file, keeping the entries of the run that is continued up to where it is."""
    kept: list[list[str]] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            kept = [row for row in csv.reader(file) if row and row[0].isdigit()]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "source", "epoch", *_FIELDS, "skipped_samples"])
        writer.writerows(row for row in kept if int(row[0]) <= step)
