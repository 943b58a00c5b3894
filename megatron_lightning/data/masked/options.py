"""Options of masked, span and fill-in-the-middle data. Wrong values are refused when an object is
made, all of them in one message.
"""

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

WordMarker = Literal["##", "▁", "Ġ"]
"""How a vocabulary marks words: `##` before the parts of a word after its first one (WordPiece),
`▁` (SentencePiece) or `Ġ` (byte-level BPE) before the first one."""


@dataclass(frozen=True, kw_only=True)
class MaskingConfig:
    """What is masked: runs of whole words or of tokens (n-grams), chosen at random."""

    probability: float = 0.15
    """Share of the tokens of a sample that is masked, above 0 and below 1."""
    max_ngram: int = 3
    """Words (tokens without `whole_words`) of the longest run."""
    whole_words: bool = True
    """Mask all tokens of a word or none."""
    longer_ngrams: bool = False
    """Draw long runs more often than short ones; else run of n words in proportion to 1/n."""
    geometric: bool = False
    """Draw the length of a run from a geometric distribution (SpanBERT, p = 0.2) instead."""
    permute: bool = False
    """Also exchange as many other tokens with each other, with loss; not with `geometric`."""
    word_marker: WordMarker = "##"
    """How the vocabulary marks words."""

    def check(self) -> list[str]:
        """Returns every violation as a sentence with field, value and remedy."""
        errors = []
        if not 0 < self.probability < 1:
            errors.append(f"masking.probability={self.probability}: must be above 0 and below 1")
        if self.max_ngram < 1:
            errors.append(f"masking.max_ngram={self.max_ngram}: must be at least 1 word")
        if self.geometric and self.permute:
            errors.append("masking.permute=True: not with masking.geometric=True; choose one")
        if self.geometric and self.longer_ngrams:
            errors.append(
                "masking.longer_ngrams=True: masking.geometric=True has its own distribution; "
                "choose one"
            )
        if self.word_marker not in get_args(WordMarker):
            errors.append(
                f"masking.word_marker={self.word_marker!r}: choose one of {get_args(WordMarker)}"
            )
        return errors

    def __post_init__(self) -> None:
        """Refuses wrong values."""
        refuse("MaskingConfig", self.check())


@dataclass(frozen=True, kw_only=True)
class BERTDataConfig:
    """Masked-language-model samples, with sentence pairs or without."""

    masking: MaskingConfig = field(default_factory=MaskingConfig)
    """What is masked."""
    short_seq_prob: float = 0.1
    """Share of samples with a shorter target length, 0 to 1; used as 1 / round(1 / value)."""
    classification_head: bool = True
    """Samples are pairs of segments, in half of them in exchanged order, with the label
    `is_random`."""
    max_sentence_length: int = 512
    """Documents of several sentences with one of more tokens than this are left out."""
    cls_token: str | None = None
    """Token before a sample; None: [CLS] or <s>, whichever the vocabulary has."""
    sep_token: str | None = None
    """Token after each segment; None: [SEP] or </s>."""
    mask_token: str | None = None
    """Token in the place of masked ones; None: [MASK] or <mask>."""
    pad_token: str | None = None
    """Token behind the end of a sample; None: [PAD] or <pad>, and id 0 without either."""

    def check(self) -> list[str]:
        """Returns every violation as a sentence with field, value and remedy."""
        return _sentence_errors(self.short_seq_prob, self.max_sentence_length)

    def __post_init__(self) -> None:
        """Refuses wrong values."""
        refuse("BERTDataConfig", self.check())


@dataclass(frozen=True, kw_only=True)
class T5DataConfig:
    """Span-corruption samples: spans are replaced by sentinels, the decoder gives them back."""

    masking: MaskingConfig = field(
        default_factory=lambda: MaskingConfig(max_ngram=10, geometric=True)
    )
    """What is replaced; `permute` has no meaning here."""
    decoder_seq_length: int = 128
    """Tokens of a decoder sample; `seq_length` is that of the encoder."""
    short_seq_prob: float = 0.1
    """Share of samples with a shorter target length, 0 to 1; used as 1 / round(1 / value)."""
    max_sentence_length: int = 512
    """Documents of several sentences with one of more tokens than this are left out."""
    bos_token: str | None = None
    """First input token of the decoder; None: [BOS], <s>, or <pad> as T5 has it."""
    eos_token: str | None = None
    """Last label of the decoder; None: [EOS] or </s>."""
    pad_token: str | None = None
    """Token behind the end of a sample; None: [PAD] or <pad>, and id 0 without either."""
    sentinel_prefix: str = "<extra_id_"
    """Sentinels are the tokens PREFIXn>, used in the order of n."""

    def check(self) -> list[str]:
        """Returns every violation as a sentence with field, value and remedy."""
        errors = _sentence_errors(self.short_seq_prob, self.max_sentence_length)
        if self.decoder_seq_length < 4:
            errors.append(
                f"decoder_seq_length={self.decoder_seq_length}: must be at least 4 tokens: start, "
                "one span with its sentinel, end"
            )
        if self.masking.permute:
            errors.append("masking.permute=True: has no meaning for spans; leave it out")
        return errors

    def __post_init__(self) -> None:
        """Refuses wrong values."""
        refuse("T5DataConfig", self.check())


@dataclass(frozen=True, kw_only=True)
class FIMConfig:
    """GPT samples whose documents are partly put in the order prefix, suffix, middle."""

    rate: float = 0.5
    """Share of documents (of their parts within a sample) that are put in that order, 0 to 1."""
    spm_rate: float = 0.5
    """Share of those with the suffix first (SPM: prefix token, suffix token, suffix, middle token,
    prefix, middle), 0 to 1."""
    prefix_token: str = "<fim_prefix>"
    """Token before the prefix."""
    middle_token: str = "<fim_middle>"
    """Token before the middle."""
    suffix_token: str = "<fim_suffix>"
    """Token before the suffix."""
    pad_token: str = "<fim_pad>"
    """Token that fills a sample that came out shorter; without loss."""
    split_token: str | None = None
    """Token at which a document falls into fragments (files of a repository), each ordered on its
    own; it stays where it is."""
    fragment_rate: float | None = None
    """Share of the fragments that are ordered, in the documents chosen by `rate`; needed with
    `split_token`."""
    no_prefix: str | None = None
    """Text that begins with this is left as it is."""

    def check(self) -> list[str]:
        """Returns every violation as a sentence with field, value and remedy."""
        shares = {"rate": self.rate, "spm_rate": self.spm_rate, "fragment_rate": self.fragment_rate}
        errors = [
            f"{name}={share}: must be between 0 and 1"
            for name, share in shares.items()
            if share is not None and not 0 <= share <= 1
        ]
        if (self.split_token is None) != (self.fragment_rate is None):
            errors.append(
                f"split_token={self.split_token!r} with fragment_rate={self.fragment_rate}: give "
                "both or neither"
            )
        names = [self.prefix_token, self.middle_token, self.suffix_token, self.pad_token]
        if self.split_token is not None:
            names.append(self.split_token)
        if len(set(names)) < len(names):
            errors.append(f"tokens {', '.join(names)}: must differ from each other")
        return errors

    def __post_init__(self) -> None:
        """Refuses wrong values."""
        refuse("FIMConfig", self.check())


def refuse(what: str, errors: list[str]) -> None:
    """Raises one error that lists all of `errors`, if there are any.

    Raises:
        ValueError: there are.
    """
    if errors:
        raise ValueError(f"{what}:\n- " + "\n- ".join(errors))


def _sentence_errors(short_seq_prob: float, max_sentence_length: int) -> list[str]:
    errors = []
    if not (0 <= short_seq_prob <= 1) or math.isnan(short_seq_prob):
        errors.append(f"short_seq_prob={short_seq_prob}: must be between 0 and 1")
    if max_sentence_length < 1:
        errors.append(f"max_sentence_length={max_sentence_length}: must be at least 1 token")
    return errors
