"""Wrong values on the command line: one message and status 2, before any work is done."""

import pytest

from megatron_lightning.cli import main as entry
from megatron_lightning.cli.trainer import shorten


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
        (
            ["generate", "tests/data/hf/llama", "--tokenizer", "bytes", "--prompt", "a"],
            "`megatron-lightning convert` makes one of it",
        ),
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


@pytest.mark.parametrize(
    ("message", "short"),
    [
        (
            "  - Expected a <class 'str'>\n  - 1 problem:\n      - recipe='mxfp8': no",
            "1 problem:\n      - recipe='mxfp8': no",
        ),
        (
            'Parser key "plan":\n  - Expected a <class \'str\'>\n  - Parser key "recipe":\n    no',
            'Parser key "plan":\n  - Parser key "recipe":\n    no',
        ),
        (
            "Parser key \"plan\":\n  - Expected a <class 'str'>",
            "Parser key \"plan\":\n  - Expected a <class 'str'>",
        ),
    ],
)
def test_what_a_union_tried_is_left_out(message: str, short: str) -> None:
    assert shorten(message) == short
