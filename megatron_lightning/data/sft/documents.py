"""All examples of a source as tokens, with what the model shall learn of them, in three arrays.

Made once and cached by content: source, tokenizer, template and options. Lengths are not cut here;
that is done when documents are packed.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np
from lightning.pytorch.utilities import rank_zero_info
from numpy.typing import NDArray

from megatron_lightning.data.cache import Arrays, cached_arrays, key_digest
from megatron_lightning.data.sft.conversations import DataFormat, detect_format, read_example
from megatron_lightning.data.sft.encode import ExampleEncoder, Text
from megatron_lightning.data.sft.records import RecordSource

OnBadExample = Literal["fail", "skip"]

_VERSION = 1  # part of the cache key: raise it when documents come out otherwise
_AT_ONCE = 512  # examples handed to the tokenizer together
_REPORT_EVERY = 200 * _AT_ONCE  # examples between two lines of the log


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Tokenized examples in the order of their source."""

    tokens: NDArray[np.int32]
    """(T,) of all documents, one after the other."""
    learned: NDArray[np.bool_]
    """(T,) tokens that have a loss when they are predicted."""
    offsets: NDArray[np.int64]
    """(documents + 1,) where each begins."""
    skipped: int
    """Examples left out because they could not be read."""
    key: dict[str, Any]
    """What determines all this, JSON-able."""

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.offsets) - 1


def load_documents(
    source: RecordSource,
    encoder: ExampleEncoder,
    *,
    data_format: DataFormat | None = None,
    on_bad_example: OnBadExample = "fail",
    cache_dir: str | os.PathLike[str] | None = None,
) -> Documents:
    """Reads and encodes a source, or takes it from the cache.

    Args:
        source: the records.
        encoder: makes tokens of them.
        data_format: how to read a record; None tells it from the first one.
        on_bad_example: "fail" stops at an example that can't be read, "skip" leaves it out and
            counts it.
        cache_dir: folder that keeps the result; None keeps nothing.

    Raises:
        ValueError: a bad example (the message names its place), or none at all.
    """
    template = encoder.template
    key: dict[str, Any] = {
        "what": "sft documents",
        "version": _VERSION,
        "source": source.digest,
        "tokenizer": encoder.tokenizer.digest,
        "template": None if template is None else key_digest(template.key()),
        "loss_on": encoder.loss_on,
        "frame": [*encoder.bos_ids, encoder.eos_id],
        "format": data_format,
        "on_bad_example": on_bad_example,
    }

    def build() -> Arrays:
        rank_zero_info("SFT data: reading and encoding the examples")
        return _encode_all(source, encoder, data_format, on_bad_example == "skip")

    arrays = cached_arrays(cache_dir, key, build)
    return Documents(
        tokens=arrays["tokens"],
        learned=arrays["learned"],
        offsets=arrays["offsets"],
        skipped=int(arrays["skipped"][0]),
        key=key,
    )


def _encode_all(
    source: RecordSource, encoder: ExampleEncoder, data_format: DataFormat | None, skip: bool
) -> Arrays:
    tokens: list[NDArray[np.int32]] = []
    learned: list[NDArray[np.bool_]] = []
    lengths: list[int] = []
    skipped = [0]
    texts = _texts(source, encoder, data_format, skip, skipped)
    while some := list(islice(texts, _AT_ONCE)):
        encoded = encoder.encode(some)
        tokens.append(np.concatenate([document.ids for document in encoded]))
        learned.append(np.concatenate([document.learned for document in encoded]))
        lengths += [len(document.ids) for document in encoded]
        if len(lengths) % _REPORT_EVERY == 0:
            rank_zero_info(f"SFT data: {len(lengths)} examples encoded")
    if not lengths:
        raise ValueError(f"no example in the data ({skipped[0]} skipped)")
    return {
        "tokens": np.concatenate(tokens),
        "learned": np.concatenate(learned),
        "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        "skipped": np.array(skipped, np.int64),
    }


def _texts(
    source: RecordSource,
    encoder: ExampleEncoder,
    data_format: DataFormat | None,
    skip: bool,
    skipped: list[int],
) -> Iterator[Text]:
    """Yields the examples' texts; counts in `skipped[0]` those that are left out."""
    for entry in source:
        try:
            if entry.error is not None:
                raise ValueError(entry.error)
            if data_format is None:
                data_format = detect_format(entry.record)
            yield encoder.render(read_example(entry.record, data_format))
        except ValueError as error:
            if not skip:
                raise ValueError(
                    f'{entry.place}: {error}; on_bad_example="skip" leaves such examples out'
                ) from error
            skipped[0] += 1
