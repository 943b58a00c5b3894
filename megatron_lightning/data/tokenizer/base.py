"""What the package needs of a tokenizer, and the one that needs no file: raw bytes."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol, runtime_checkable

END_OF_TEXT = "<|endoftext|>"
BYTES = "bytes"
"""Name that `load_tokenizer` takes for the byte tokenizer."""
ROLES = ("bos", "eos", "unk", "pad", "cls", "sep", "mask")
"""Names under which `special_ids` has tokens, apart from `eod`, which is always there."""


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
    def special_ids(self) -> Mapping[str, int]:
        """Ids of special tokens by what they are for: `eod`, and those of `ROLES` that it has."""
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


@runtime_checkable
class NamedTokens(Protocol):
    """A tokenizer whose tokens have names."""

    def token_ids(self) -> dict[str, int]:
        """Returns the id of each token by its name, special tokens included."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, end of document 256."""

    name = BYTES
    vocab_size = 257
    eod_id = 256
    digest = "utf-8-bytes-256"
    special_ids: Mapping[str, int] = MappingProxyType({"eod": 256})

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
