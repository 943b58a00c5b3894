"""Tokenizers for preprocessing and for reading text back: raw bytes, or a `tokenizer.json` file.

The `tokenizers` library is imported when a file is trained or loaded, not before; the byte
tokenizer needs nothing. Chat templates and the `transformers` classes are not used.
"""

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

END_OF_TEXT = "<|endoftext|>"
BYTES = "bytes"
"""Name that `load_tokenizer` takes for the byte tokenizer."""


class Tokenizer(Protocol):
    """What preprocessing, data module and generation need of a tokenizer."""

    @property
    def name(self) -> str:
        """What `load_tokenizer` takes for it."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of ids: the largest id + 1."""
        ...

    @property
    def eod_id(self) -> int:
        """Id of the end-of-document token."""
        ...

    @property
    def digest(self) -> str:
        """Identity of the vocabulary: equal digests mean equal ids for every text."""
        ...

    def encode(self, text: str) -> list[int]:
        """Returns the ids of the text, without special tokens added."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of the ids, without special tokens."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, end of document 256."""

    name = BYTES
    vocab_size = 257
    eod_id = 256
    digest = "utf-8-bytes-256"

    def encode(self, text: str) -> list[int]:
        """Returns the UTF-8 bytes of the text."""
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the UTF-8 bytes of each text."""
        return [self.encode(text) for text in texts]

    def encode_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Returns for each text the ids of `encode`, and begin and end of each token in the text,
        in characters.
        """
        found = []
        for text in texts:
            sizes = [len(character.encode("utf-8")) for character in text]
            spans = [(n, n + 1) for n, size in enumerate(sizes) for _ in range(size)]
            found.append((self.encode(text), spans))
        return found

    @property
    def begin_ids(self) -> list[int]:
        """Special tokens in front of a text: none."""
        return []

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text; broken characters become U+FFFD, the end of document is left out."""
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")


class FileTokenizer:
    """A tokenizer of the `tokenizers` library, from a `tokenizer.json` file.

    Args:
        path: the file.
        eod_token: the end-of-document token.

    Raises:
        ValueError: the file cannot be read, or does not know the token.
    """

    def __init__(self, path: Path, eod_token: str) -> None:
        content = path.read_bytes()
        self.name: str = str(path)
        self._eod_token = eod_token
        self._tokenizer = _from_bytes(path, content)
        eod_id = self._tokenizer.token_to_id(eod_token)
        if eod_id is None:
            raise ValueError(
                f"{path} has no token {eod_token}: name its end-of-document token with eod_token"
            )
        self.eod_id: int = eod_id
        self.vocab_size: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.digest: str = f"sha256:{hashlib.sha256(content).hexdigest()}"

    def __reduce__(self) -> tuple[Any, tuple[Path, str]]:
        """Travels to worker processes as its path; each of them reads the file once."""
        return _file_tokenizer, (Path(self.name), self._eod_token)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of the text, without special tokens added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Returns for each text the ids of `encode`, and begin and end of each token in the text,
        in characters.
        """
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    @property
    def begin_ids(self) -> list[int]:
        """Special tokens that the tokenizer puts in front of a text; none for many tokenizers."""
        encoding = self._tokenizer.encode("a", add_special_tokens=True)
        return encoding.ids[: encoding.special_tokens_mask.index(0)]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of the ids, without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


def load_tokenizer(path: str | os.PathLike[str], *, eod_token: str | None = None) -> Tokenizer:
    """Loads a tokenizer.

    Args:
        path: "bytes", a `tokenizer.json` file, or a folder that holds one.
        eod_token: the end-of-document token; None takes the `eos_token` of a
            `tokenizer_config.json` beside the file, else `<|endoftext|>`.

    Raises:
        ValueError: the file cannot be read, or does not know the token.
        FileNotFoundError: there is no such file.
    """
    if os.fspath(path) == BYTES:
        return ByteTokenizer()
    file = tokenizer_file(path)
    if not file.is_file():
        raise FileNotFoundError(
            f'no tokenizer file {file}: give a tokenizer.json, a folder with one, or "{BYTES}"'
        )
    return FileTokenizer(file, eod_token or _configured_eod(file) or END_OF_TEXT)


def tokenizer_file(path: str | os.PathLike[str]) -> Path:
    """Returns the file that `load_tokenizer` reads for a file or a folder."""
    return Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)


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
        ValueError: `vocab_size` is too small.
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
    tokenizer.train_from_iterator(texts, trainer)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    tokenizer.save(str(partial))
    partial.replace(target)
    return FileTokenizer(target, END_OF_TEXT)


@functools.lru_cache(maxsize=4)
def _file_tokenizer(path: Path, eod_token: str) -> FileTokenizer:
    return FileTokenizer(path, eod_token)


def _from_bytes(path: Path, content: bytes) -> "FastTokenizer":
    from tokenizers import Tokenizer as Fast

    try:
        return Fast.from_buffer(content)
    except Exception as error:  # the library raises plain Exception for a file that it cannot parse
        raise ValueError(
            f"{path} is no tokenizer.json of the tokenizers library: {error}"
        ) from error


def _configured_eod(file: Path) -> str | None:
    """Returns the `eos_token` of the Hugging Face config beside the file, if there is one."""
    config = file.with_name("tokenizer_config.json")
    if not config.is_file():
        return None
    token = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
    return token["content"] if isinstance(token, dict) else token
