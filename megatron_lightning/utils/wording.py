"""Words of messages: numbers with their nouns, and what is said of every layer said once."""

import re
from collections.abc import Iterable

_NUMBER_IN_NAME = re.compile(r"(?<=[A-Za-z_]\.)\d+\b|(?<![\w.])\d+(?=\.[A-Za-z_])")


def counted(count: int, noun: str, several: str | None = None) -> str:
    """The number with its noun: "1 GPU", "2 GPUs". `several`: plural, where it isn't noun + s."""
    return f"{count} {noun if count == 1 else several or noun + 's'}"


def merge_alike(messages: Iterable[str]) -> list[str]:
    """Messages that differ in the numbers within names of modules alone, as those about the same
    parameter of each layer, become one with `*` there and their count; the order is kept.
    """
    groups: dict[str, list[str]] = {}
    for message in messages:
        groups.setdefault(_NUMBER_IN_NAME.sub("*", message), []).append(message)
    return [
        group[0] if len(set(group)) == 1 else f"{pattern} ({len(set(group))} alike)"
        for pattern, group in groups.items()
    ]
