"""Putting a checkpoint in place, replacing, removing and recovering, in one process."""

import os
from pathlib import Path

import pytest
import torch

from megatron_lightning.checkpoint import (
    commit,
    is_checkpoint,
    load_metadata,
    recover,
    remove,
    save,
    verify,
)


def make(path: Path, step: int) -> Path:
    save(path, {"w": torch.full((50,), float(step))}, {"step": step}, metadata={"step": step})
    return path


def hide(path: Path, role: str, token: str = "0" * 8) -> Path:
    hidden = path.with_name(f".{role}-{path.name}-{token}")
    os.rename(path, hidden)
    return hidden


def test_a_save_leaves_one_folder_and_a_second_replaces_it(tmp_path: Path) -> None:
    path = make(tmp_path / "new" / "last.ckpt", 1)
    make(path, 2)
    assert os.listdir(path.parent) == ["last.ckpt"]
    assert load_metadata(path) == {"step": 2}
    verify(path)


def test_removal_leaves_nothing(tmp_path: Path) -> None:
    remove(make(tmp_path / "a.ckpt", 1))
    assert os.listdir(tmp_path) == []


def test_things_that_are_not_ours_are_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "file.ckpt").write_bytes(b"x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_bytes(b"x")
    with pytest.raises(ValueError, match="is a file"):
        make(tmp_path / "file.ckpt", 1)
    with pytest.raises(ValueError, match="other contents"):
        make(tmp_path / "folder", 1)
    with pytest.raises(ValueError, match="plain path"):
        save("s3://bucket/a.ckpt", {}, {})
    with pytest.raises(ValueError, match="cannot name a checkpoint"):
        make(tmp_path / ".staging-x-00000000", 1)
    assert sorted(os.listdir(tmp_path)) == ["file.ckpt", "folder"]


def test_an_empty_folder_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").mkdir()
    verify(make(tmp_path / "a.ckpt", 1))


def test_a_link_is_replaced_and_its_goal_kept(tmp_path: Path) -> None:
    goal = make(tmp_path / "step=1.ckpt", 1)
    (tmp_path / "last.ckpt").symlink_to(goal)
    assert is_checkpoint(tmp_path / "last.ckpt")
    make(tmp_path / "last.ckpt", 2)
    assert load_metadata(goal) == {"step": 1}
    assert load_metadata(tmp_path / "last.ckpt") == {"step": 2}
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step=1.ckpt"]


def test_a_failed_rename_puts_the_older_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "_exchange", lambda *_: False)
    path, rename = make(tmp_path / "a.ckpt", 1), os.rename

    def failing(source: Path, target: Path) -> None:
        if target == path and ".staging" in str(source):
            raise OSError("disk on fire")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OSError, match="disk on fire"):
        make(path, 2)
    assert load_metadata(path) == {"step": 1}
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_recovery_finishes_a_complete_save(tmp_path: Path) -> None:
    path = make(tmp_path / "a.ckpt", 2)
    hide(path, "staging")
    assert recover(tmp_path) == [f"finished the save of {path}"]
    assert load_metadata(path) == {"step": 2}


def test_recovery_deletes_an_unfinished_save(tmp_path: Path) -> None:
    hidden = hide(make(tmp_path / "b.ckpt", 2), "staging")
    (hidden / "manifest.json").unlink()
    short = hide(make(tmp_path / "c.ckpt", 2), "staging")
    os.truncate(short / "data" / "rank_00000.bin", 100)
    assert len(recover(tmp_path)) == 2
    assert os.listdir(tmp_path) == []


def test_recovery_puts_the_older_one_back_if_the_newer_is_not_complete(tmp_path: Path) -> None:
    path = make(tmp_path / "a.ckpt", 1)
    hide(path, "replaced")
    newer = hide(make(path, 2), "staging")
    (newer / "objects.json").unlink()
    recover(tmp_path)
    assert load_metadata(path) == {"step": 1}
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_recovery_prefers_the_newer_of_two(tmp_path: Path) -> None:
    path = make(tmp_path / "a.ckpt", 1)
    older = hide(path, "staging", "11111111")
    newest = hide(make(path, 3), "staging", "00000000")
    assert [item.name for item in (newest, older)] == sorted(os.listdir(tmp_path))
    recover(tmp_path)
    assert load_metadata(path) == {"step": 3}
    hide(path, "staging")
    make(path, 4)
    assert "older than the one in place" in recover(tmp_path)[0]
    assert load_metadata(path) == {"step": 4}
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_recovery_never_brings_a_removed_checkpoint_back(tmp_path: Path) -> None:
    hide(make(tmp_path / "a.ckpt", 1), "removing")
    half_deleted = hide(make(tmp_path / "b.ckpt", 1), "replaced")
    (half_deleted / "metadata.json").unlink()
    recover(tmp_path)
    assert os.listdir(tmp_path) == []


def test_recovery_leaves_other_files_alone(tmp_path: Path) -> None:
    make(tmp_path / "a.ckpt", 1)
    (tmp_path / ".staging-notes").mkdir()
    assert recover(tmp_path) == []
    assert recover(tmp_path / "none") == []
    assert sorted(os.listdir(tmp_path)) == [".staging-notes", "a.ckpt"]


def test_no_hidden_name_looks_like_a_checkpoint(tmp_path: Path) -> None:
    seen: list[str] = []

    class Spy(dict[str, torch.Tensor]):
        def items(self):  # type: ignore[no-untyped-def] # called between begin and publish
            seen.extend(os.listdir(tmp_path))
            return super().items()

    save(tmp_path / "last.ckpt", Spy(w=torch.ones(2)), {})
    assert len(seen) == 1
    assert seen[0].startswith(".staging-last.ckpt-")
    assert not list(tmp_path.glob(".*.ckpt"))
