"""`fit`, `validate`, `test`, `predict`: LightningCLI with this package's classes as defaults.

Any LightningModule, data module, callback or logger can be named by `class_path`. What differs from
LightningCLI: the strategy is `MegatronStrategy` unless another one is given; hyper-parameters in
checkpoints are the config objects themselves, so that a checkpoint made here loads like any other;
and a wrong input is one message.
"""

import re
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import set_parsing_settings
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from megatron_lightning.checkpoint import CheckpointError, read_manifest
from megatron_lightning.cli.errors import UserError, wrong_input

# Known by their short names on the command line because they are imported here.
from megatron_lightning.data import PretrainingDataModule, SFTDataModule  # noqa: F401
from megatron_lightning.models import GPTModel
from megatron_lightning.strategies import MegatronStrategy

DEFAULT_SEED = 1234


class TrainerParser(LightningArgumentParser):
    """Raises UserError with the message alone; the usage text of the Trainer fills pages."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise UserError."""
        raise UserError(shorten(message)) from ex


class TrainerCLI(LightningCLI):
    """Parses, builds model, data and Trainer, and runs the subcommand."""

    def __init__(self, arguments: list[str]) -> None:
        super().__init__(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            parser_class=TrainerParser,
            parser_kwargs={"prog": "megatron-lightning"},
            trainer_defaults={"strategy": _named(MegatronStrategy)},
            seed_everything_default=DEFAULT_SEED,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,  # it would store plain dicts for the config objects
            save_config_kwargs={"overwrite": True},
            args=arguments,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Set the classes that are meant when none is named."""
        parser.set_defaults({"model": _named(GPTModel), "data": _named(PretrainingDataModule)})

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse `args`; Lightning's own method warns when they are not left to it to find."""
        self.config = parser.parse_args(args)

    def instantiate_classes(self) -> None:
        """Build model, data module and Trainer; what they refuse is a wrong input."""
        try:
            with wrong_input(MisconfigurationException):
                super().instantiate_classes()
        except UserError as error:
            raise UserError(shorten(str(error))) from error

    def after_instantiate_classes(self) -> None:
        """Look into the checkpoint that is asked for, before any rank is started."""
        path = self.config[self.config.subcommand].ckpt_path
        if path is not None and Path(path).is_dir():
            with wrong_input(CheckpointError):
                read_manifest(path)


def main(arguments: list[str]) -> None:
    """Run `arguments`: a subcommand of the Trainer and its options."""
    if asks_for_help(arguments):
        # The texts below fields are read from the sources, which takes most of a second: not for
        # every rank of a run.
        set_parsing_settings(docstring_parse_attribute_docstrings=True)
    TrainerCLI(arguments)


def asks_for_help(arguments: list[str]) -> bool:
    """Whether one of `arguments` is `--help`, or the help of a class: `--model.help NAME`."""
    return any(re.match(r"(-h|--([\w.]+\.)?help)(=|$)", argument) for argument in arguments)


def _named(cls: type) -> dict[str, Any]:
    """`cls` by its public path, as it stands in a config file."""
    return {"class_path": f"megatron_lightning.{cls.__name__}"}


def shorten(message: str) -> str:
    """A parser's message without the lines that only describe how unions were tried."""
    noise = (
        r"Does not validate against|Subtypes:|Errors:|- Expected a <class 'NoneType'>|Given value"
    )
    lines = [line for line in message.splitlines() if not re.match(rf"\s*({noise})", line)]
    kept = [line for line in lines if line.strip()]
    told = [line for line in kept if not re.match(r"\s*- Expected a <class 'str'>", line)]
    if any(not re.match(r'\s*(- )?Parser key "[^"]*":$', line) for line in told):
        kept = told
    kept[:1] = [line.strip().removeprefix("- ") for line in kept[:1]]
    return "\n".join(kept)
