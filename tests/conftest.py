"""Session settings: one thread, no GPU touched before the ranks are forked, shared fixtures."""

import os

# Before torch and numpy are imported: ranks share few cores, and must not inherit thread pools.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault(
    "PYTORCH_NVML_BASED_CUDA_CHECK", "1"
)  # torch.cuda.is_available() would make forks unusable
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path

import lightning  # noqa: F401 (imported once here, inherited by every rank)
import pytest
import torch

from tests import harness

ROOT = Path(__file__).resolve().parents[1]

torch.set_num_threads(1)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fork the nursery while every test module is imported and nothing has run."""
    if session.items and not session.config.option.collectonly:
        harness.start()


def pytest_sessionfinish() -> None:
    """End all ranks."""
    harness.stop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is no GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def golden() -> Path:
    """Directory of recorded reference data, which lies beside the checkout and not in it."""
    path = ROOT.parent / "shared" / "golden"
    if not path.is_dir():
        pytest.skip(f"reference data not found at {path}")
    return path
