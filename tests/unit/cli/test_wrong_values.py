"""Wrong values on the command line: one message and status 2, before any work is done."""

import pytest

from megatron_lightning.cli import main as entry


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["verify", "--preset", "tiny", "--layouts", "dp2", "--steps", "0"], "--steps 0"),
        (["verify", "--preset", "tiny", "--layouts", "dp2", "--timeout", "0"], "--timeout 0"),
        (
            ["verify", "--preset", "tiny", "--layouts", "dp2", "--report", "no/such/r.md"],
            "--report no/such/r.md",
        ),
        (["plan", "--preset", "tiny", "--gpus", "4", "--json", "no/such/x.json"], "no folder"),
        (["plan", "--preset", "tiny", "--gpus", "4", "--gpu-memory", "-5"], "--gpu-memory -5"),
        (["plan", "--preset", "tiny", "--gpus", "4", "--gpu-memory", "nan"], "--gpu-memory nan"),
    ],
)
def test_wrong_values(
    arguments: list[str],
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["megatron-lightning", *arguments])
    with pytest.raises(SystemExit) as left:
        entry.main()
    assert left.value.code == 2
    assert text in capsys.readouterr().err
