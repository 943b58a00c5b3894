"""The pieces of the quickstart that need no training."""

import struct
from pathlib import Path

import pytest

from megatron_lightning.cli import quickstart
from megatron_lightning.cli.errors import UserError
from megatron_lightning.cli.loss_plot import Part, draw_losses
from megatron_lightning.cli.quickstart_run import LAYOUTS, STEPS_UNIT, Settings


def settings(output: Path, **changes: object) -> Settings:
    values = dict(output=output, steps=120, seed=1, accelerator="cpu", devices=4)
    return Settings(**{**values, **changes})  # type: ignore[arg-type]


def test_every_part_ends_with_a_validation() -> None:
    for steps in range(STEPS_UNIT, 400, STEPS_UNIT):
        chosen = settings(Path(), steps=steps)
        assert 0 < chosen.first_steps < steps
        assert chosen.first_steps % chosen.validation_interval == 0
        assert steps % chosen.validation_interval == 0


def test_layouts_use_the_devices_and_differ() -> None:
    for devices, (first, second) in LAYOUTS.items():
        assert first.devices == devices
        assert second.devices <= devices
        assert devices == 1 or first != second


def test_old_results_go_and_other_files_stay(tmp_path: Path) -> None:
    chosen = settings(tmp_path)
    (tmp_path / "checkpoints" / "first").mkdir(parents=True)
    with pytest.raises(UserError, match="no quickstart made"):
        quickstart._clear(chosen)
    chosen.corpus.parent.mkdir()
    chosen.corpus.with_suffix(".card.json").write_text("{}")
    chosen.losses("first").write_text("")
    (tmp_path / "notes.txt").write_text("mine")
    quickstart._clear(chosen)
    left = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file())
    assert left == ["data/corpus.card.json", "notes.txt"]
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "7"], r"--steps=7: give a multiple of 10, such as 10"),
        (["--steps", "0"], r"--steps=0"),
        (["--devices", "3"], "invalid choice"),
        (["--accelerator", "gpu", "--devices", "8"], "this machine has . GPU"),
        (["--steps", "many"], "invalid int value"),
    ],
)
def test_wrong_options(options: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        quickstart.main([*options, "--output", str(tmp_path)])


def test_a_loss_that_changes_with_the_layout_is_an_error() -> None:
    quickstart._compare(4.0, 4.00005, 1e-4)
    for after in (4.0002, float("nan")):
        with pytest.raises(RuntimeError, match=r"4\.000000 in the layout that saved it"):
            quickstart._compare(4.0, after, 1e-4)


def test_picture(tmp_path: Path) -> None:
    first = Part(label="A", train=[(1, 5.0), (2, 4.0)], validation=[(0, 5.5), (2, 4.1)])
    second = Part(label="B", train=[(3, 3.0)], validation=[(2, 4.1), (3, 3.5)])
    path = tmp_path / "loss.png"
    draw_losses([first, second], path, title="A title", subtitle="and more")
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", header[16:24]) == (1600, 1000)
