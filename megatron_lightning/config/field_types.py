"""Values of another type than their field's, such as text in place of a number: found before the
rules about values, which would stumble over them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from megatron_lightning.config.names import remedy

_KINDS: dict[type, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "text"),
}


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """Of a user's subclass whose annotations name what can't be found here, those of its base."""
    try:
        return get_type_hints(kind)
    except NameError:
        return {} if kind.__base__ is None else _hints(kind.__base__)


def type_problems(config: Any, prefix: str = "", *, choices: bool = False) -> list[str]:
    """Fields of a config dataclass, and of those inside it, that hold another kind of value, as
    sentences; numbers must be finite. Choices among names are left to the rules, which know what to
    offer, unless `choices` asks for them too.
    """
    found: list[str] = []
    for name, hint in _hints(type(config)).items():
        value = getattr(config, name)
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        options = [kind for kind in kinds if kind is not NoneType]
        is_optional = NoneType in kinds
        if len(options) != 1 or (value is None and is_optional):
            continue
        kind = options[0]
        if dataclasses.is_dataclass(kind) and isinstance(value, kind):  # type: ignore[arg-type]
            found += type_problems(value, f"{prefix}{name}.", choices=choices)
        elif choices and get_origin(kind) is Literal:
            if value not in get_args(kind):
                found.append(f"{prefix}{name}={value!r}: choose one of {get_args(kind)}")
        elif dataclasses.is_dataclass(kind):
            found.append(prefix + name + wrong_kind(value, kind, or_none=is_optional))
        elif problem := _problem(value, kind):
            found.append(f"{prefix}{name}={value!r}{problem}{' or None' if is_optional else ''}")
    return found


def not_whole(values: Mapping[str, Any]) -> list[str]:
    """Values by name that are no whole numbers, as sentences; None is taken for not given."""
    return [
        f"{name}={value!r}{problem}"
        for name, value in values.items()
        if value is not None and (problem := _problem(value, int))
    ]


def wrong_kind(value: Any, kind: Any, *, or_none: bool) -> str:
    """What is said behind a name whose value is no such config: "={}: give an ...Config(...)"."""
    wanted = f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}(...)"
    wanted += " or None" if or_none else ""
    return f"={value!r}: give {wanted}, not {type(value).__name__}"


def _problem(value: Any, kind: Any) -> str | None:
    if kind not in _KINDS:
        return None
    wanted, told = _KINDS[kind]
    is_right = isinstance(value, wanted) and (kind is bool or not isinstance(value, bool))
    if not is_right:
        return f" must be {told}"
    return " must be a finite number" if kind is float and not math.isfinite(value) else None


def with_inner(config: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` of a config with whole inner configs in place of names with a dot, such as
    `moe.router_topk`. ValueError for a name that isn't there.
    """
    whole = {name: value for name, value in changes.items() if "." not in name}
    for name, value in changes.items():
        head, dot, field = name.partition(".")
        if not dot:
            continue
        if head not in [known.name for known in dataclasses.fields(config)]:
            raise ValueError(f"{name} is no field: {remedy(type(config), name, '')}")
        inner = whole.get(head, getattr(config, head))
        if not dataclasses.is_dataclass(inner):
            raise ValueError(f"{name}={value!r}: {head} is {inner!r} here, and has no fields")
        if field not in [known.name for known in dataclasses.fields(inner)]:
            raise ValueError(f"{name} is no field: {remedy(type(inner), field, f'{head}.')}")
        whole[head] = dataclasses.replace(inner, **{field: value})  # type: ignore[type-var]
    return whole
