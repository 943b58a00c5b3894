"""What a wrong input looks like on the command line: one message, exit status 2, no traceback.

A `ConfigurationError` of this package's checks and the `UserError` of a command are wrong input
wherever they come from. A `CheckpointError` says by itself what is wrong with which file: one
message too, with status 1, since it may be no input but the disk that fills up. Any other exception
is a crash and keeps its traceback.
"""

import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from megatron_lightning.config.validate import ConfigurationError

EXIT_WRONG_INPUT = 2
EXIT_CHECKPOINT = 1


class UserError(Exception):
    """A wrong input; the text says which, and what would be right."""


class Parser(ArgumentParser):
    """An argparse parser that answers a wrong option with one message, without the usage text."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(
            prog=f"megatron-lightning {command}", description=description, allow_abbrev=False
        )

    def error(self, message: str) -> NoReturn:
        """Raise UserError with a pointer to the help."""
        raise UserError(f"{message}\n`{self.prog} --help` lists the options")


def check_writable(**paths: str | None) -> None:
    """Refuse files in folders that don't exist, before the work whose result they are to hold."""
    for option, path in paths.items():
        if path not in (None, "", "-") and not Path(str(path)).absolute().parent.is_dir():
            raise UserError(
                f"--{option} {path}: there is no folder {Path(str(path)).absolute().parent}; make"
                " it first"
            )


def check_folder(path: str) -> None:
    """Refuse what can be no checkpoint folder, before torch is imported to read it."""
    if Path(path).is_dir():
        return
    what = "it is a file" if Path(path).exists() else "there is no such folder"
    raise UserError(f"checkpoint={path!r}: {what}; give a folder that MegatronStrategy has saved")


def run_command(command: Callable[[list[str]], None], arguments: list[str], name: str) -> int:
    """Run a command; returns its exit status, after an input error has been printed."""
    try:
        command(arguments)
    except UserError as error:
        return _report(name, error)
    except ConfigurationError as error:
        return _report(name, error)
    except RuntimeError as error:
        from megatron_lightning.checkpoint.errors import CheckpointError  # not before torch is

        if not isinstance(error, CheckpointError):
            raise
        _report(name, error)
        return EXIT_CHECKPOINT
    return 0


@contextmanager
def wrong_input(*also: type[Exception]) -> Iterator[None]:
    """Everything inside only looks at what the user gave: its ordinary errors, and those in `also`,
    are the user's.
    """
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError, *also) as error:
        raise UserError(str(error)) from error


def _report(name: str, error: Exception) -> int:
    print(f"megatron-lightning {name}: {error}", file=sys.stderr)
    return EXIT_WRONG_INPUT
