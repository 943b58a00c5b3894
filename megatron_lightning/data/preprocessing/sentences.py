"""Splitting a text into sentences, for corpora with a sequence a sentence (BERT).

The default is a set of rules: a sentence ends after . ! ? (with closing quotes or brackets) when
space and then anything but a lower-case letter follow, after the full stops of Chinese and
Japanese, and at an empty line. A full stop after an initial, or after one of a few abbreviations,
ends none. NLTK's Punkt model, which Megatron uses, is the alternative; it has to be there
(`nltk.download("punkt_tab")`), nothing is downloaded here.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

Splitter = Callable[[str], list[str]]

_CLOSING = "\"'\u2019\u201d\u00bb)\\]}\u300d\u300f\uff09"
_END = re.compile(
    rf"(?P<stop>[.!?\u2026]+)[{_CLOSING}]*(?=\s+(?P<next>\S))"
    rf"|[\u3002\uff01\uff1f]+[{_CLOSING}]*"
    r"|\n[^\S\n]*\n"
)
_WORD_BEFORE = re.compile(r"[^\s(\[\"'\u201c\u2018]+\Z")
_ABBREVIATION = re.compile(
    "mr|mrs|ms|dr|prof|sr|jr|st|vs|etc|inc|ltd|co|corp|figs?|eqs?|nos?|vol|pp|eds?|cf|al|approx"
    "|dept|est|gen|gov|hon|rev|sen|rep|col|capt|lt|sgt|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov"
    "|dec|e[.]g|i[.]e|a[.]m|p[.]m|u[.]s|u[.]k|u[.]n",
    re.IGNORECASE,
)
_PUNKT_PIECE = 1_000_000  # characters that Punkt is given at a time, as in Megatron


def splitter(kind: str, language: str = "english", *, keep_newlines: bool = False) -> Splitter:
    """Returns the function that splits a text.

    Args:
        kind: "regex" or "nltk".
        language: of the Punkt model.
        keep_newlines: leave the line breaks at the end of a sentence in it.

    Raises:
        ImportError: the `nltk` package is missing.
        ValueError: there is no Punkt model of this language.
    """
    if kind == "regex":
        return functools.partial(split_sentences, keep_newlines=keep_newlines)
    return functools.partial(_punkt_sentences, _punkt(language), keep_newlines)


def split_sentences(text: str, *, keep_newlines: bool = False) -> list[str]:
    """Returns the sentences of a text by rules, without the space between them."""
    cuts = [0]
    for match in _END.finditer(text):
        if match["stop"] is None or _ends_sentence(text, match, cuts[-1]):
            cuts.append(match.end())
    return _cut(text, cuts, keep_newlines)


def _ends_sentence(text: str, match: re.Match[str], start: int) -> bool:
    if match["next"].islower():
        return False
    if match["stop"] != ".":
        return True
    word = _WORD_BEFORE.search(text, max(start, match.start() - 24), match.start())
    if word is None:
        return True
    before = word[0]
    initial = len(before) == 1 and before.isalpha() and before != "I"
    return not initial and _ABBREVIATION.fullmatch(before) is None


def _cut(text: str, cuts: list[int], keep_newlines: bool) -> list[str]:
    pieces = (text[begin:end] for begin, end in zip(cuts, [*cuts[1:], len(text)], strict=True))
    if not keep_newlines:
        return [piece for piece in map(str.strip, pieces) if piece]
    return _with_newlines(list(pieces))


def _with_newlines(pieces: list[str]) -> list[str]:
    """Strips spaces, and moves the line breaks that follow a sentence to its end."""
    sentences: list[str] = []
    for piece in pieces:
        body = piece.lstrip()
        lead = piece[: len(piece) - len(body)]
        if sentences:
            sentences[-1] += "\n" * lead.count("\n")
        if body:
            kept = body.rstrip()
            sentences.append(kept + "\n" * body[len(kept) :].count("\n"))
    return sentences


def _punkt(language: str) -> Any:
    try:
        from nltk.tokenize import PunktTokenizer
    except ImportError as error:
        raise ImportError(
            'sentences="nltk": pip install megatron-lightning[nltk], or choose "regex"'
        ) from error
    try:
        return PunktTokenizer(language)
    except LookupError as error:
        raise ValueError(
            f'sentences="nltk": there is no Punkt model for language="{language}"; get it with '
            'nltk.download("punkt_tab"), or choose "regex"'
        ) from error


def _punkt_sentences(model: Any, keep_newlines: bool, text: str) -> list[str]:
    sentences: list[str] = []
    for at in range(0, len(text), _PUNKT_PIECE):
        piece = text[at : at + _PUNKT_PIECE]
        spans = list(model.span_tokenize(piece))
        if keep_newlines:
            cuts = [begin for begin, _ in spans] or [0]
            sentences += _with_newlines(
                [piece[a:b] for a, b in zip(cuts, [*cuts[1:], len(piece)], strict=True)]
            )
        else:
            sentences += [piece[begin:end] for begin, end in spans]
    return sentences
