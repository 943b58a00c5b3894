"""Whether there is something to validate or test on where the user meant that there is."""

import re
from collections.abc import Collection, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Literal

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from megatron_lightning.data.splits import Part, parse_split, split_ranges

_OF_VALIDATION = re.compile(r"val(id(ation)?)?([_/]|$)")
_WORDS: dict[Part, str] = {"train": "training", "valid": "validation", "test": "testing"}
_WITHOUT: dict[Part, str] = {"valid": "1,0,0", "test": "99,1,0"}


@dataclass
class Shares:
    """How much each part has got of what a split string divides, all data sets together."""

    given: dict[Part, int] = field(default_factory=dict)
    divided: dict[Part, int] = field(default_factory=dict)

    def take(self, split: str, count: int, part: Part, use: Part | None = None) -> range:
        """Returns the run of `count` elements that is `part`, and counts it for `use` (`part`)."""
        run, use = getattr(split_ranges(split, count), part), use or part
        self.given[use] = self.given.get(use, 0) + len(run)
        self.divided[use] = self.divided.get(use, 0) + count
        return run

    def clear(self) -> None:
        """Forgets all counts."""
        self.given.clear()
        self.divided.clear()


def is_meant(split: str | None, part: Part) -> bool:
    """Whether a split string gives that part a share; data sets of its own (None) are meant."""
    return split is None or dict(zip(_WORDS, parse_split(split), strict=True))[part] > 0


def evaluation_of(trainer: Trainer) -> Literal["valid", "test"] | None:
    """Which part `Trainer.validate` or `test` has been called for; None in a fit."""
    if trainer.state.fn == TrainerFn.VALIDATING:
        return "valid"
    return "test" if trainer.state.fn == TrainerFn.TESTING else None


def nothing_meant(part: Literal["valid", "test"], split: str | None, own: str) -> str:
    """Returns the message about an evaluation for which no data are given at all: by no share of a
    split string, or not by the argument `own` where there is none.
    """
    if split is None:
        return f"{own} is not given, so there is nothing for {_WORDS[part]}; give {own}"
    first, second = ("second", "90,10,0") if part == "valid" else ("third", "90,5,5")
    return (
        f"split={split!r} leaves nothing for {_WORDS[part]}; give it a {first} share, as in"
        f" {second!r}, or {own} in place of split"
    )


def nothing_there(
    part: Part, split: str | None, shares: Shares, empty: Collection[str | int], unit: str, own: str
) -> str:
    """Returns the message about data sets without a sample: by a split string that divides so many
    elements (`unit`: what they are), or by the argument `own`, which gives a part data of its own.
    """
    if split is None:
        what = ", ".join(f"{own}[{name!r}]" if name != "" else own for name in empty)
        return f"{what} holds no token; give more data, or leave it out"
    given, divided = shares.given[part], shares.divided[part]
    lines = " (preprocess --input-format text-lines makes each line of plain text one)"
    return (
        f"split={split!r} gives {_WORDS[part]} {given} of {divided} {unit}"
        f"{', which hold no token' if given else ''}; give {own}, or more {unit}"
        f"{lines if unit == 'sequences' else ''}, or split={_WITHOUT[part]!r} to do without"
    )


def check_evaluation(
    part: Part,
    sets: Mapping[str | int, Sized],
    trainer: Trainer | None,
    *,
    fits: bool,
    split: str | None,
    shares: Shares,
    unit: str,
    own: str,
) -> None:
    """Says that sets are empty which the user means to be evaluated. ValueError where nothing else
    is asked for, or a callback waits for what validation would give. `fits`: within a fit; for the
    others see `nothing_there`.
    """
    empty = [name for name in sets if not len(sets[name])]
    if not empty or not is_meant(split, part):
        return
    if fits and (trainer is None or not trainer.enable_validation):
        return
    message = nothing_there(part, split, shares, empty, unit, own)
    if len(empty) < len(sets):
        rank_zero_warn(message)
        return
    callbacks: list[Callback] = trainer.callbacks if fits else []  # type: ignore[union-attr]
    if waiting := waiting_for_validation(callbacks):
        raise ValueError(f"{' and '.join(waiting)} goes by validation, but {message}")
    if not fits:
        raise ValueError(message)
    rank_zero_warn(f"No validation: {message}")


def waiting_for_validation(callbacks: Sequence[Callback]) -> list[str]:
    """Returns the callbacks that go by a value of validation and can't do without, in words."""
    return [
        f"{type(callback).__name__}(monitor={callback.monitor!r})"
        for callback in callbacks
        if isinstance(callback, (ModelCheckpoint, EarlyStopping))
        and _OF_VALIDATION.match(callback.monitor or "")
        and not _does_without(callback)
    ]


def _does_without(callback: ModelCheckpoint | EarlyStopping) -> bool:
    """Whether the user has said that it looks after training, or tolerates that there is none."""
    if isinstance(callback, EarlyStopping):
        return not callback.strict or bool(callback._check_on_train_epoch_end)
    return bool(callback._save_on_train_epoch_end)
