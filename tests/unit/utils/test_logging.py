"""Rank prefixes, warnings given once, and the notice about a missing package."""

import logging
import uuid

import pytest

from megatron_lightning.utils import (
    current_rank,
    get_logger,
    is_installed,
    notice_missing,
    warn_once,
)
from tests.harness import run_ranks


def fresh(text: str) -> str:
    """A message that this process has not given yet."""
    return f"{text} {uuid.uuid4()}"


def prefixed_line(rank: int, world_size: int) -> str:
    records: list[str] = []
    logger = get_logger("megatron_lightning.test_prefix")
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        logger.warning("%d layers", 4)
    finally:
        logger.removeHandler(handler)
    return records[0]


def warned_lines(rank: int, world_size: int, message: str, every_rank: bool) -> list[str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    root = logging.getLogger("megatron_lightning")
    root.addHandler(handler)
    try:
        for _ in range(3):
            warn_once(message, every_rank=every_rank)
    finally:
        root.removeHandler(handler)
    return records


def test_a_single_process_has_no_prefix(caplog: pytest.LogCaptureFixture) -> None:
    get_logger("megatron_lightning.test").warning("plain %s", "line")
    assert caplog.messages == ["plain line"]
    assert current_rank() == 0


def test_the_prefix_is_added_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    get_logger("megatron_lightning.test")
    get_logger("megatron_lightning.test").warning("line")
    assert caplog.messages == ["[rank 3] line"]


def test_ranks_of_a_process_group_are_named() -> None:
    assert run_ranks(prefixed_line, 2) == ["[rank 0] 4 layers", "[rank 1] 4 layers"]


def test_a_warning_comes_once_and_from_rank_zero() -> None:
    message = fresh("careful")
    assert run_ranks(warned_lines, 2, message, False) == [[f"[rank 0] {message}"], []]
    message = fresh("each")
    lines = [[f"[rank 0] {message}"], [f"[rank 1] {message}"]]
    assert run_ranks(warned_lines, 2, message, True) == lines


def test_a_missing_package_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "megatron_lightning")
    consequence = fresh("using the torch layers")
    for _ in range(2):
        notice_missing("some_kernels", consequence)
    assert caplog.messages == [f"some_kernels is not installed: {consequence}"]


def test_is_installed_does_not_import() -> None:
    assert is_installed("torch")
    assert not is_installed("no_such_package_anywhere")
