"""The writer process of a rank, and one write that is under way.

The process is `data_file.py`, run as a program; it is started when the first save needs it. A
thread makes the copies from the device, hands the boxes over and waits for the answer, so that
the trainer's thread is free.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_lightning.checkpoint import data_file
from megatron_lightning.checkpoint.errors import CheckpointError

_CLOSE_SECONDS = 5.0


class WriterProcess:
    """Writes boxes out of shared memory into files, one request at a time."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Its process id; None when there is none."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process if there is none. To be called from the main thread if it can be: the
        kernel ends the process with the thread that has started it.
        """
        if self._process is not None and self._process.poll() is None:
            return
        main = threading.current_thread() is threading.main_thread()
        program = Path(data_file.__file__)
        arguments = [str(self._descriptor), str(os.getpid()), "1" if main else "0"]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(program), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[self._descriptor],
        )

    def write(self, path: Path, boxes: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """Have the boxes (position and length in the shared memory) written to a new file `path`.

        Returns its answer, see `data_file.write_file`. Raises CheckpointError if it failed.
        """
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        request = {"path": str(path), "boxes": list(boxes)}
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except (OSError, ValueError):  # its end of the pipe, or ours, is closed
            line = b""
        if not line:
            status = process.wait()
            raise CheckpointError(
                f"the process that writes {path} ended with status {status}"
                f"{' (killed; out of memory?)' if status == -9 else ''}"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise CheckpointError(f"{path}: {answer['error']}")
        return answer

    def close(self, *, kill: bool = False) -> None:
        """End the process, at once with `kill`, otherwise when it has written what it writes."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        if kill:
            process.kill()
        with contextlib.suppress(OSError):  # it is gone already
            process.stdin.close()
        try:
            process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


class WriteJob(threading.Thread):
    """One rank's part of a save, from the copies to the end of the writing."""

    def __init__(
        self,
        writer: WriterProcess,
        path: Path | None,
        boxes: Sequence[tuple[int, int]],
        *,
        copy: Callable[[], None],
        began: float,
    ) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self._writer, self._path, self._boxes = writer, path, boxes
        self._copy, self._began = copy, began
        self._answer: dict[str, Any] | None = None
        self._error: BaseException | None = None
        self.staging_seconds = 0.0
        """From the beginning of the save until all copies were there."""

    @classmethod
    def failed_before(cls, error: BaseException) -> WriteJob:
        """A job that could not be made."""
        job = cls(WriterProcess(-1), None, [], copy=lambda: None, began=time.monotonic())
        job.fail(error)
        return job

    def run(self) -> None:
        """Copy, then have it written."""
        try:
            self._copy()
            self.staging_seconds = time.monotonic() - self._began
            if self._path is not None:
                self._answer = self._writer.write(self._path, self._boxes)
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            self._error = error

    def fail(self, error: BaseException) -> None:
        """Let `result` raise `error` whatever the writing gives."""
        self._error = error

    @property
    def failed(self) -> bool:
        """Whether `result` is known to raise."""
        return self._error is not None

    def result(self) -> dict[str, Any] | None:
        """Wait for the end; the answer of the process, None if this rank had nothing to write."""
        self.join()
        if self._error is not None:
            raise self._error
        return self._answer
