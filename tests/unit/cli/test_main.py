"""The table of commands: help and mistakes at its top level, at once and without torch."""

import subprocess
import sys

import pytest

from megatron_lightning import __version__
from megatron_lightning.cli.errors import Parser, UserError, run_command, wrong_input
from megatron_lightning.cli.main import COMMANDS, main
from megatron_lightning.config.validate import ConfigurationError


def exit_status(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(["--version"]) == 0
    assert capsys.readouterr().out == f"megatron-lightning {__version__}\n"


def test_no_command_shows_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status([]) == 2
    assert "usage: megatron-lightning COMMAND" in capsys.readouterr().out


def test_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(["fitt"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "no command 'fitt'; choose one of fit, validate" in captured.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["nonsense"],
        ["preprocess", "--help"],
        ["generate", "--nonsense"],
        ["inspect", "--help"],
        ["quickstart", "--help"],
    ],
    ids=" ".join,
)
def test_answers_without_importing_torch(arguments: list[str]) -> None:
    script = (
        "import sys\nfrom megatron_lightning.cli.main import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules and 'lightning' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", [n for n, c in COMMANDS.items() if not c.passes_name])
def test_unknown_option_is_one_message(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status([name, "--nonsense", "3"]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"megatron-lightning {name}: ")
    assert f"`megatron-lightning {name} --help` lists the options" in message
    assert "Traceback" not in message


def test_abbreviated_option_is_refused() -> None:
    parser = Parser("x", "A command.")
    parser.add_argument("--steps")
    with pytest.raises(UserError, match="unrecognized arguments: --step"):
        parser.parse_args(["--step", "3"])


def raising(error: Exception) -> int:
    def command(arguments: list[str]) -> None:
        raise error

    return run_command(command, [], "name")


def test_wrong_input_is_printed_and_a_crash_is_not_hidden(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert raising(UserError("--a=1: give 2")) == 2
    assert raising(ConfigurationError(["a=1: give 2"])) == 2
    assert capsys.readouterr().err == (
        "megatron-lightning name: --a=1: give 2\n"
        "megatron-lightning name: 1 problem in the configuration:\n  - a=1: give 2\n"
    )
    with pytest.raises(ValueError, match="shapes differ"):
        raising(ValueError("shapes differ"))


def test_errors_about_what_was_given_become_wrong_input() -> None:
    for error in (ValueError("a"), TypeError("b"), FileNotFoundError("c")):
        with pytest.raises(UserError, match=str(error)), wrong_input():
            raise error
    with pytest.raises(KeyError), wrong_input():
        raise KeyError("d")
    with pytest.raises(UserError, match="e"), wrong_input(KeyError):
        raise KeyError("e")
