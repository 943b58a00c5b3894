"""The messages of jsonargparse in the words of the user: whole paths as typed, values, remedies.

A message is told anew only if each of its lines is of a known form; any other stays as it is.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from megatron_lightning.cli.given import Given, class_names
from megatron_lightning.config.names import ELSEWHERE, known_paths, meant, remedy
from megatron_lightning.precision.policy import policy_for

_TOP = ("trainer", "model", "data", "config", "seed_everything", "ckpt_path", "print_config")
_SECTIONS = (
    "model.config",
    "data",
    "trainer.strategy",
    "model.optimizer",
    "model.scheduler",
    "trainer",
    "model",
)
"""Where a name without a section is looked for; of several that have it the first is meant."""
_WORDS = {"the Trainer's ": "trainer.", "the data module's ": "data."}
"""What `ELSEWHERE` says of names in other sections, as the section."""
_WHOLE = {
    "load": "ckpt_path",
    "save": "trainer.callbacks",
    "save_interval": "trainer.callbacks",
    "log_interval": "trainer.log_every_n_steps",
}
"""What other programs' bare options are here that no name resembles; checkpoints are a callback's
(`ModelCheckpoint`)."""
_UNKNOWN = (
    r"Option '([^']+)' is not accepted",
    r"Group '([^']+)' does not accept option '([^']+)'",
    r"Subcommand '[^']+' does not accept option '([^']+)'",
)
_REQUIRED = r"the following arguments are required: (.+)"
_NO_CLASS = r"Expected a dot import path string: (.+)|Problem with given class_path '(.+)':"
_OF_CLASSES = r"module '.*' has no attribute '.*'|No module named '.*'|Import path .* not "
_NO_SUBCLASS = r"Import path does not correspond to a subclass of (\w+)"
_OF_SUBCLASSES = (
    r"Not a valid subclass of |Subclass types expect one of:|a class path \(str\)|a dict with"
)
"""Stands below a class that there is not, in a list; alone it is about one of another kind."""
_NONE = "<class 'NoneType'>"
_SHORT = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}
"""Precisions by the short names that Lightning takes too."""
_KINDS = {
    "<class 'int'>": "a whole number",
    "<class 'float'>": "a number",
    "<class 'bool'>": "true or false",
    "<class 'str'>": "text",
    _NONE: "null",
}


class _Line(NamedTuple):
    path: str
    """Of the parser that speaks, "model.config"; empty for the outermost."""
    text: str


def explain(message: str, given: Given) -> str | None:
    """The message in other words; None if a part of it is of no known form."""
    told: list[str] = []
    expected: dict[str, list[str]] = {}
    is_other_kind = False
    for path, text in _lines(message):
        unknown = _unknown_paths(path, text)
        if unknown:
            told += [_no_such_option(one, given) for one in unknown]
        elif found := re.fullmatch(_REQUIRED, text):
            told.append(_missing(path, found[1].split(", "), given))
        elif found := re.match(_NO_CLASS, text):
            told.append(_no_such_class(path, found[1] or found[2], given))
        elif found := re.fullmatch(r"Expected a (.+?)(\. Got value: .*)?", text):
            expected.setdefault(path, []).append(found[1])
        elif found := re.fullmatch(_NO_SUBCLASS, text):
            sentence = _no_subclass(path, found[1], given)
            told += [sentence] if sentence else []
            is_other_kind = True
        elif re.match(_OF_SUBCLASSES, text):
            is_other_kind = True
        elif not re.match(_OF_CLASSES, text):
            return None
    if is_other_kind and not told:
        return None
    for path, kinds in expected.items():
        if told or any(other.startswith(f"{path}.") for other in expected):
            continue  # the other forms that a union allows
        sentence = _other_kind(path, kinds, given)
        if sentence is None:
            return None
        told.append(sentence)
    return "\n".join(dict.fromkeys(told)) or None


def _lines(message: str) -> Iterator[_Line]:
    """Lines of a message, each with the path of keys that it stands under."""
    keys: list[tuple[int, str]] = []
    noise = r"Does not validate against|Subtypes:|Errors:|Given value|Expected a path but "
    for line in message.splitlines():
        text = re.sub(r"^(- )?", "", line.strip())
        if not text or re.match(noise, text):
            continue
        depth = len(line) - len(line.lstrip())
        keys = [(place, name) for place, name in keys if place < depth]
        key = re.fullmatch(r'Parser key "([^"]*)":', text)
        if key is not None:
            keys.append((depth, key[1]))
            continue
        names = [part for _, name in keys for part in name.split(".") if part != "init_args"]
        yield _Line(".".join(names), text)


def _unknown_paths(path: str, text: str) -> list[str]:
    """Whole paths of options that a line calls unknown."""
    names = []
    if text.startswith("unrecognized arguments: "):
        words = text.removeprefix("unrecognized arguments: ").split()
        names = [word[2:].partition("=")[0] for word in words if word.startswith("--")]
    for form in _UNKNOWN:
        found = re.fullmatch(form, text)
        if found is not None:
            names = [".".join(found.groups())]
    return [f"{path}.{name}" if path else name for name in names]


def _no_such_option(path: str, given: Given) -> str:
    place = given.place(path)
    path = path.replace("-", "_")  # as other programs write options
    head, _, name = path.rpartition(".")
    before = "--" if place.startswith("--") else ""
    root, _, rest = path.partition(".")
    if path in _TOP:
        return f"{place}: there is no such option; do you mean {before}{path}?"
    if root not in _TOP:
        found = meant(root, _TOP) if rest or root not in ELSEWHERE else []
        found = found or ([] if rest else _of_a_section(root, given))
        end = f"{found[0]}.{rest}" if found and rest else found[0] if found else ""
        said = f"do you mean {before}{end}?" if end else f"there are {', '.join(_TOP)}"
        return f"{place}: there is no such option; {said}"
    below = ""
    while head:
        kind = given.kind_at(head)
        if kind is not None:
            end = remedy(kind, name, f"{before}{head}.").replace("?", f"{below}?")
            return f"{place}: there is no such option; {end}"
        below, (head, _, name) = f".{name}{below}", head.rpartition(".")
    return f"{place}: there is no such option; `--help` lists them"


def _missing(path: str, names: Sequence[str], given: Given) -> str:
    """What is required and not given, with the ways to give it."""
    missing = f"{path}: {', '.join(names)} {'is' if len(names) == 1 else 'are'} not given"
    option = f"--{path}.{names[0]}{' and so on' if len(names) > 1 else ''}"
    if given.files:
        return f"{missing}; add to the file of --config, or give {option}"
    other = {"model": "data", "data": "model"}.get(path.partition(".")[0])
    also = f" (likewise --{other}.NAME)" if other is not None else ""
    return f"{missing}; give --config FILE with trainer, model and data, or {option}{also}"


def _of_a_section(name: str, given: Given) -> list[str]:
    """The whole path that a bare name stands for, Megatron-LM's `--num-layers`; empty if none."""
    if name in _WHOLE:
        return [_WHOLE[name]]
    own = ELSEWHERE.get(name, name)
    for words, section in _WORDS.items():
        if own.startswith(words):
            return [section + own.removeprefix(words)]
    paths = [
        f"{section}.{path}"
        for section in _SECTIONS
        if (kind := given.kind_at(section)) is not None
        for path in known_paths(kind)
    ]
    exact = [path for section in _SECTIONS for path in paths if path == f"{section}.{own}"]
    prefixed = [path for path in paths if path.endswith(f".{name.replace('_', '.', 1)}")]
    return [*exact, *prefixed, *meant(name, paths)][:1]


def _no_such_class(path: str, name: str, given: Given) -> str:
    home, _, last = name.rpartition(".")
    is_near = not home or home.partition(".")[0] in ("lightning", "megatron_lightning")
    near = meant(last, class_names(path)) if is_near else []
    end = f"do you mean {near[0]}?" if near else "give its whole path, package.module.Class"
    return f"{given.place_of_class(path, name)}={name!r}: there is no such class; {end}"


def _no_subclass(path: str, base: str, given: Given) -> str | None:
    value = given.value(f"{path}+") or given.value(path)
    if not isinstance(value, str):
        return None
    return f"{given.place_of_class(path, value)}={value!r}: is no {base}; name a class that is one"


def _other_kind(path: str, kinds: Sequence[str], given: Given) -> str | None:
    value, place = given.value(path), given.place(path)
    if value is None:
        return None
    if path == "trainer.precision":
        return precision_problem(value, place)
    kinds = [kind for kind in dict.fromkeys(kinds) if kind != _NONE] or [_NONE]
    if "<class 'float'>" in kinds and "<class 'int'>" in kinds:
        kinds.remove("<class 'int'>")
    names = [_named_kind(kind) for kind in kinds]
    if any(name is None for name in names):
        return None
    return f"{place}={value!r}: must be {' or '.join(map(str, names))}"


def precision_problem(value: Any, place: str) -> str | None:
    """What MegatronStrategy says to a precision of the Trainer; None if it takes it."""
    try:
        policy_for(_SHORT.get(str(value), str(value)))
    except ValueError as error:
        return f"{place}: {error}"
    return None


def _named_kind(kind: str) -> str | None:
    """A type's text as words."""
    if kind in _KINDS:
        return _KINDS[kind]
    literal = re.fullmatch(r"typing\.Literal(\[.*\])", kind)
    if literal is None:
        return None
    try:
        return f"one of {tuple(ast.literal_eval(literal[1]))}"
    except (ValueError, SyntaxError):
        return None
