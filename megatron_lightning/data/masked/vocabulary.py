"""What masked samples need to know of a vocabulary: special tokens by name, where words begin."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_lightning.data.masked.options import (
    BERTDataConfig,
    FIMConfig,
    T5DataConfig,
    WordMarker,
)

_USUAL = frozenset(  # special whatever the task: tokenizers of BERT and T5 have them in common
    ["[CLS]", "[SEP]", "[MASK]", "[PAD]", "[BOS]", "[EOS]", "<s>", "</s>", "<mask>", "<pad>"]
)


@dataclass(frozen=True, kw_only=True)
class MaskedVocabulary:
    """Ids and classes of tokens; arrays are (V,), with V the largest id + 1."""

    continues_word: NDArray[np.bool_]
    """Tokens that belong to the word of the token before."""
    special: NDArray[np.bool_]
    """Tokens that are no text: never masked, and no replacement of masked ones. The unknown token
    counts as text."""
    known: NDArray[np.int64]
    """Ids that exist, ascending; (tokens,)."""
    pad_id: int
    """Token behind the end of a sample."""

    def check_ids(self, tokens: NDArray[np.int64], corpus: str) -> None:
        """Refuses tokens that the vocabulary doesn't have.

        Raises:
            ValueError: there are; the corpus and the largest token are named.
        """
        if len(tokens) and int(tokens.max()) >= len(self.special):
            raise ValueError(
                f"{corpus} holds token {int(tokens.max())}, but the vocabulary ends at "
                f"{len(self.special) - 1}: use the tokenizer that the corpus was made with"
            )


@dataclass(frozen=True, kw_only=True)
class BERTVocabulary(MaskedVocabulary):
    """The vocabulary of a `BERTDataset`."""

    cls_id: int
    """Token before a sample."""
    sep_id: int
    """Token after each segment."""
    mask_id: int
    """Token in the place of masked ones."""

    @classmethod
    def from_tokens(
        cls, tokens: Mapping[str, int], config: BERTDataConfig, eod_id: int | None = None
    ) -> "BERTVocabulary":
        """Returns the vocabulary of `tokens` (names and ids).

        Args:
            tokens: id of every token by its name.
            config: names the special tokens.
            eod_id: end-of-document token, which counts as special.

        Raises:
            ValueError: a token that is needed is missing; all that are missing are named.
        """
        errors: list[str] = []
        cls_id = _find(tokens, "cls_token", config.cls_token, ("[CLS]", "<s>"), errors)
        sep_id = _find(tokens, "sep_token", config.sep_token, ("[SEP]", "</s>"), errors)
        mask_id = _find(tokens, "mask_token", config.mask_token, ("[MASK]", "<mask>"), errors)
        pad_id = _find_pad(tokens, config.pad_token, errors)
        _refuse("BERT", errors)
        classes = _classes(
            tokens, [cls_id, sep_id, mask_id, pad_id, eod_id], config.masking.word_marker
        )
        return cls(**classes, cls_id=cls_id, sep_id=sep_id, mask_id=mask_id, pad_id=pad_id or 0)


@dataclass(frozen=True, kw_only=True)
class T5Vocabulary(MaskedVocabulary):
    """The vocabulary of a `T5Dataset`."""

    bos_id: int
    """First input token of the decoder."""
    eos_id: int
    """Last label of the decoder."""
    sentinel_ids: tuple[int, ...]
    """Tokens that stand for a span, in the order in which they are used."""

    @classmethod
    def from_tokens(
        cls, tokens: Mapping[str, int], config: T5DataConfig, eod_id: int | None = None
    ) -> "T5Vocabulary":
        """Returns the vocabulary of `tokens`, as `BERTVocabulary.from_tokens` does.

        Raises:
            ValueError: a token that is needed is missing; all that are missing are named.
        """
        errors: list[str] = []
        bos_id = _find(tokens, "bos_token", config.bos_token, ("[BOS]", "<s>", "<pad>"), errors)
        eos_id = _find(tokens, "eos_token", config.eos_token, ("[EOS]", "</s>"), errors)
        pad_id = _find_pad(tokens, config.pad_token, errors)
        prefix = config.sentinel_prefix
        numbers = {
            int(name[len(prefix) : -1]): token
            for name, token in tokens.items()
            if name.startswith(prefix) and name.endswith(">") and name[len(prefix) : -1].isdecimal()
        }
        if not numbers:
            errors.append(
                f"sentinel_prefix={prefix!r}: the vocabulary has no token {prefix}0>; name its "
                "sentinels, or add some to the tokenizer"
            )
        _refuse("T5", errors)
        sentinels = tuple(numbers[number] for number in sorted(numbers))
        special = [bos_id, eos_id, pad_id, eod_id, *sentinels]
        classes = _classes(tokens, special, config.masking.word_marker)
        return cls(
            **classes, bos_id=bos_id, eos_id=eos_id, pad_id=pad_id or 0, sentinel_ids=sentinels
        )


@dataclass(frozen=True, kw_only=True)
class FIMTokens:
    """Ids of the tokens of fill-in-the-middle samples."""

    prefix_id: int
    """Token before the prefix."""
    middle_id: int
    """Token before the middle."""
    suffix_id: int
    """Token before the suffix."""
    pad_id: int
    """Token that fills a short sample."""
    eod_id: int
    """End-of-document token."""
    split_id: int | None = None
    """Token between fragments of a document."""

    @classmethod
    def from_tokens(cls, tokens: Mapping[str, int], config: FIMConfig, eod_id: int) -> "FIMTokens":
        """Returns the ids of the tokens that `config` names.

        Raises:
            ValueError: a token is missing; all that are missing are named.
        """
        errors: list[str] = []
        found = {
            f"{role}_id": _find(tokens, f"{role}_token", name, (), errors)
            for role, name in (
                ("prefix", config.prefix_token),
                ("middle", config.middle_token),
                ("suffix", config.suffix_token),
                ("pad", config.pad_token),
                ("split", config.split_token),
            )
            if name is not None
        }
        _refuse("fill-in-the-middle", errors)
        return cls(**found, eod_id=eod_id)


def _find(
    tokens: Mapping[str, int],
    field: str,
    name: str | None,
    usual: tuple[str, ...],
    errors: list[str],
) -> int:
    """Returns the id of the token called `name`, or of the first usual one that exists; -1 and a
    line in `errors` when there is none.
    """
    names = usual if name is None else (name,)
    found = next((tokens[each] for each in names if each in tokens), None)
    if found is None:
        errors.append(
            f"{field}={name!r}: the vocabulary has no token {' or '.join(names)}; name one that it "
            "has, or add it to the tokenizer"
        )
        return -1
    return found


def _find_pad(tokens: Mapping[str, int], name: str | None, errors: list[str]) -> int | None:
    if name is None and "[PAD]" not in tokens and "<pad>" not in tokens:
        return None
    return _find(tokens, "pad_token", name, ("[PAD]", "<pad>"), errors)


def _refuse(what: str, errors: list[str]) -> None:
    if errors:
        raise ValueError(f"this tokenizer can't make {what} data:\n- " + "\n- ".join(errors))


def _classes(
    tokens: Mapping[str, int], special: Iterable[int | None], marker: WordMarker
) -> dict[str, NDArray]:
    """Returns the arrays of a `MaskedVocabulary`."""
    known = np.array(sorted(set(tokens.values())), dtype=np.int64)
    size = int(known[-1]) + 1 if len(known) else 0
    is_special, continues = np.zeros(size, np.bool_), np.zeros(size, np.bool_)
    is_special[[token for token in special if token is not None and token < size]] = True
    for name, token in tokens.items():
        is_special[token] |= name in _USUAL or name.startswith("<extra_id_")
        continues[token] = name.startswith(marker) == (marker == "##")
    return {"known": known, "special": is_special, "continues_word": continues & ~is_special}
