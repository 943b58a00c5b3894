"""`fit`, `validate`, `test`, `predict`: LightningCLI with this package's classes as defaults.

Any LightningModule, data module, callback or logger can be named by `class_path`. What differs from
LightningCLI: the strategy is `MegatronStrategy` unless another one is given; hyper-parameters in
checkpoints are the config objects themselves, so that a checkpoint made here loads like any other;
and a wrong input is one message.
"""

import re
from typing import Any, NoReturn

from jsonargparse import set_parsing_settings
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import StrategyRegistry

from megatron_lightning.cli.errors import UserError, wrong_input
from megatron_lightning.cli.fit_values import graph_problems, precision_problems, seed_problems
from megatron_lightning.cli.given import Given, class_named, class_names
from megatron_lightning.cli.parser_words import explain
from megatron_lightning.config.names import meant

# Known by their short names on the command line because they are imported here.
from megatron_lightning.data import PretrainingDataModule, SFTDataModule  # noqa: F401
from megatron_lightning.models import GPTModel
from megatron_lightning.strategies import MegatronStrategy
from megatron_lightning.strategies.checkpoint_checks import check_checkpoint_path

DEFAULT_SEED = 1234


class TrainerParser(LightningArgumentParser):
    """Raises UserError with the message alone; the usage text of the Trainer fills pages."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise UserError."""
        raise ParserError(message) from ex


class ParserError(UserError):
    """A message of the parser, whose noise is left out."""

    def __init__(self, message: str) -> None:
        self.message = message
        super().__init__(shorten(message))


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
        """Parse `args`; Lightning's own method warns when they are not left to it to find. What can
        be known from the options alone is checked at once.
        """
        given = Given(args)
        try:
            self.config = parser.parse_args(args)
        except ParserError as error:
            raise UserError(explain(error.message, given) or str(error)) from error
        chosen = self.config[self.config.subcommand]
        problems = chosen_problems(chosen, given)
        problems += seed_problems(chosen.get("seed_everything"), given.place)
        if self.config.subcommand == "fit":
            problems += graph_problems(chosen.trainer, given.place)
        if problems:
            raise UserError("\n".join(problems))

    def instantiate_classes(self) -> None:
        """Build model, data module and Trainer; what they refuse is a wrong input."""
        try:
            with wrong_input(MisconfigurationException):
                super().instantiate_classes()
        except UserError as error:
            raise UserError(shorten(str(error))) from error


def chosen_problems(chosen: Any, given: Given) -> list[str]:
    """What is wrong with the chosen options whatever classes they build: checkpoint, precision,
    accelerator. Another strategy than this package's has its own rules.
    """
    trainer = chosen.trainer
    kind = strategy_class(trainer.strategy)
    problems = []
    if isinstance(trainer.strategy, str) and (near := meant_strategy(trainer.strategy)):
        place = given.place("trainer.strategy")
        problems.append(
            f"{place}={trainer.strategy!r}: there is no such strategy; do you mean {near}?"
        )
    if kind is None or not issubclass(kind, MegatronStrategy):
        return problems
    if trainer.accelerator == "gpu" and not CUDAAccelerator.is_available():
        problems.append(
            f"{given.place('trainer.accelerator')}='gpu': there is no CUDA GPU here; set"
            " trainer.accelerator to cpu, or to auto, which takes what there is"
        )
    problems += check_checkpoint_path(chosen.get("ckpt_path"))
    return problems + precision_problems(trainer, given.place)


def meant_strategy(name: str) -> str | None:
    """The class that a name stands for which is none of Lightning's; None where none is near."""
    if name in StrategyRegistry or name == "auto":
        return None
    return next(iter(meant(name, class_names("trainer.strategy"))), None)


def strategy_class(strategy: Any) -> type | None:
    """The class that a parsed `trainer.strategy` names; None for a name of Lightning's,
    and for a function that makes one.
    """
    path = getattr(strategy, "class_path", None)
    kind = None if path is None else class_named(path)
    return kind if isinstance(kind, type) else None


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
