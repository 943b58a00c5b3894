"""Training a tokenizer: byte-level BPE, by the `tokenizers` library."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron_lightning.data.tokenizer.base import END_OF_TEXT, Tokenizer
from megatron_lightning.data.tokenizer.fast import FileTokenizer


def train_byte_bpe(
    texts: Iterable[str], vocab_size: int, path: str | os.PathLike[str]
) -> Tokenizer:
    """Trains a byte-level BPE (GPT-2's scheme) with the one special token `<|endoftext|>`.

    Args:
        texts: training text, one document each.
        vocab_size: ids in all, at least 257 (256 bytes and the special token); fewer when the text
            has not enough pairs to merge.
        path: where `tokenizer.json` content is written; the file appears complete or not at all.

    Raises:
        ValueError: `vocab_size` is too small, or there is no text.
        ImportError: the `tokenizers` package is missing.
    """
    if vocab_size < 257:
        raise ValueError(
            f"vocab_size={vocab_size} must be at least 257: 256 bytes and {END_OF_TEXT}"
        )
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = Fast(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_some(texts), trainer)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    tokenizer.save(str(partial))
    partial.replace(target)
    return FileTokenizer(target, END_OF_TEXT)


def _some(texts: Iterable[str]) -> Iterator[str]:
    """Passes texts on; raises ValueError when all are empty."""
    empty = True
    for text in texts:
        empty = empty and not text
        yield text
    if empty:
        raise ValueError("there is no text to train a tokenizer on")
