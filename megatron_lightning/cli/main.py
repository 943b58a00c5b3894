"""`megatron-lightning COMMAND [options]`: the table of commands.

`fit`, `validate`, `test` and `predict` are LightningCLI's. A command's module is imported when it
is chosen, so that help, version and a mistyped command answer at once, without torch.
"""

import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from megatron_lightning import __version__
from megatron_lightning.cli.errors import EXIT_WRONG_INPUT, run_command


class Command(NamedTuple):
    """Where a command lives and what it is for."""

    module: str
    """Module of this package with a function `main(arguments)`."""
    summary: str
    """One line of the help."""
    passes_name: bool = False
    """Whether the command's own name is the first argument."""


COMMANDS = {
    "fit": Command("trainer", "train a model (LightningCLI: --config FILE.yaml)", True),
    "validate": Command("trainer", "run the validation set once", True),
    "test": Command("trainer", "run the test set once", True),
    "predict": Command("trainer", "run predict_step over data", True),
    "preprocess": Command("preprocess", "text to an indexed corpus, tokenizer included"),
    "data": Command("data", "look into corpora, merge and cut them"),
    "generate": Command("generate", "continue a prompt with the model of a checkpoint"),
    "inspect": Command("inspect", "say what is in a checkpoint or a corpus"),
    "convert": Command("convert", "write a checkpoint in another form, or read another program's"),
    "plan": Command("plan", "check a layout and show what it needs, without GPUs"),
    "verify": Command("verify", "check that layouts train exactly as one process does"),
    "quickstart": Command("quickstart", "train, resume in another layout and generate, in minutes"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command named by the first of `arguments` (default: those of the process).

    Exits with 0 when it is done, 2 after a wrong input, which has been printed as one message.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(help_text())
        sys.exit(0 if given else EXIT_WRONG_INPUT)
    if given[0] == "--version":
        print(f"megatron-lightning {__version__}")
        sys.exit(0)
    name, rest = given[0], given[1:]
    if name not in COMMANDS:
        print(
            f"megatron-lightning: there is no command {name!r}; choose one of"
            f" {', '.join(COMMANDS)}",
            file=sys.stderr,
        )
        sys.exit(EXIT_WRONG_INPUT)
    command = COMMANDS[name]
    module = importlib.import_module(f"megatron_lightning.cli.{command.module}")
    sys.exit(run_command(module.main, [name, *rest] if command.passes_name else rest, name))


def help_text() -> str:
    """The help of the program itself."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: megatron-lightning COMMAND [options]",
            "",
            "Megatron-class training under PyTorch Lightning.",
            "",
            "commands:",
            *lines,
            "",
            "`megatron-lightning COMMAND --help` lists a command's options; --version the version.",
        ]
    )


if __name__ == "__main__":
    main()
