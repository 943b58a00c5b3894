"""The same ids several times as fast: text is encoded once a word, not once an occurrence.

Many tokenizers cut a text into words before anything else, and always at some places: before a
space that a visible character follows, and between a letter or digit and a line break or
punctuation. Where that is so, the ids of a text are those of its pieces, one after the other, and a
table of pieces saves most of the work. `cuts_words` tells by the tokenizer's description whether it
is so; for any other tokenizer nothing is cut. The first texts are encoded both ways, so that a
mistake in this reasoning costs speed and not the corpus.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_MODELS = ("BPE", "WordPiece", "WordLevel")
_NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer")
_WORD_CUTTERS = ("BertPreTokenizer", "Whitespace")
_ANY_AFTER_CUT = (*_WORD_CUTTERS, "WhitespaceSplit", "Punctuation", "Digits", "Split", "ByteLevel")
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]")
_PATTERNS = frozenset(
    {
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2
        rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}",  # GPT-4, Llama 3
        rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_REST}",  # Qwen 2
        rf"[^\r\n\p{{L}}\p{{N}}]?{_CASED[0]}*{_CASED[1]}+{_CONTRACTIONS}?"  # GPT-4o
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_CASED[0]}+{_CASED[1]}*{_CONTRACTIONS}?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
# A piece: perhaps a space; what is no letter or digit; letters and digits; and so on from whatever
# may follow these without a cut (apostrophe, underscore, what is not ASCII).
_SPACE = r" (?![!-~])"  # one that does not begin a piece
_OTHER = rf"(?:[^A-Za-z0-9 ]+|{_SPACE})*"
_PIECE = re.compile(
    rf" ?{_OTHER}[A-Za-z0-9]*"
    rf"(?:(?:[^A-Za-z0-9 \n!-&(-/:-@\[-^`{{-~]|{_SPACE}){_OTHER}[A-Za-z0-9]*)*"
)
_LARGEST_TABLE = 1 << 18  # pieces, about 60 MB
_LONGEST_PIECE = 64  # characters of a piece that is kept
_COMPARED = 64  # texts encoded both ways

Encode = Callable[[Sequence[str]], list[bytes]]


def cuts_words(description: Mapping[str, Any]) -> bool:
    """Returns whether a tokenizer cuts wherever `_PIECE` does, whatever stands around it.

    Args:
        description: content of its `tokenizer.json`.
    """
    model = description["model"]
    if model["type"] not in _MODELS or model.get("dropout"):
        return False
    normalizers = _steps(description["normalizer"], "normalizers")
    if any(step["type"] not in _NORMALIZERS for step in normalizers):
        return False
    for token in description["added_tokens"]:
        if token["lstrip"] or token["rstrip"] or token["single_word"]:
            return False
        if re.search(r"\s", token["content"]) or (token["normalized"] and normalizers):
            return False
    first, *rest = _steps(description["pre_tokenizer"], "pretokenizers") or [{"type": ""}]
    return _cuts(first) and all(step["type"] in _ANY_AFTER_CUT for step in rest)


def _steps(step: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return [inner for part in step[name] for inner in _steps(part, name)]


def _cuts(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Split":
        isolated = step["behavior"] == "Isolated" and not step["invert"]
        return isolated and step["pattern"].get("Regex") in _PATTERNS
    if step["type"] == "ByteLevel":  # a space in front of each piece would be one too many
        return step["use_regex"] and not step["add_prefix_space"]
    return step["type"] in _WORD_CUTTERS


class WordCache:
    """Encodes texts piece by piece, remembering the pieces.

    Args:
        encode: token bytes of each of some texts.
        whole: tokens that are found in a text before it is cut; a text with one of them is encoded
            as a whole.
    """

    def __init__(self, encode: Encode, whole: Sequence[str]) -> None:
        self._encode = encode
        self._hints = sorted({token[:2] for token in whole})  # few, and fast to look for
        self._whole = re.compile("|".join(map(re.escape, whole)))
        self._table: dict[str, bytes] = {}
        self._to_compare = _COMPARED
        self._trusted = True

    def __call__(self, texts: Sequence[str]) -> list[bytes]:
        """Returns the token bytes of each text."""
        if not self._trusted:
            return self._encode(texts)
        found = self._by_pieces(texts)
        if self._to_compare > 0:
            compared = min(self._to_compare, len(texts))
            self._to_compare -= compared
            if self._encode(texts[:compared]) != found[:compared]:
                self._trusted = False
                return self._encode(texts)
        return found

    def _by_pieces(self, texts: Sequence[str]) -> list[bytes]:
        if len(self._table) > _LARGEST_TABLE:
            self._table.clear()
        table = self._table
        cut = [None if self._has_whole(text) else _PIECE.findall(text) for text in texts]
        new = list({piece for pieces in cut if pieces for piece in set(pieces).difference(table)})
        table.update(zip(new, self._encode(new), strict=True))
        found = [
            self._encode([text])[0] if pieces is None else b"".join(map(table.__getitem__, pieces))
            for text, pieces in zip(texts, cut, strict=True)
        ]
        for piece in new:
            if len(piece) > _LONGEST_PIECE:
                del table[piece]
        return found

    def _has_whole(self, text: str) -> bool:
        return any(hint in text for hint in self._hints) and bool(self._whole.search(text))
