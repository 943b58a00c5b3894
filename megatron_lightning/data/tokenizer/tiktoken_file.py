"""tiktoken vocabularies (`.tiktoken` files); the `tiktoken` package is imported when one is loaded.

Such a file holds the tokens and their ranks alone. The pattern that cuts a text into words and the
special tokens stand in a JSON file beside it, `NAME.tiktoken.json`:

    {"pattern": "...", "special_tokens": {"<|endoftext|>": 100257}}

Nothing is downloaded.
"""

import base64
import binascii
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lightning.data.tokenizer.base import END_OF_TEXT


class TiktokenTokenizer:
    """A tiktoken vocabulary with its pattern.

    Special tokens that occur in a text are encoded as the text that they are.

    Args:
        path: the `.tiktoken` file, with `NAME.tiktoken.json` beside it.
        eod_token: the end-of-document token; None means `<|endoftext|>`.

    Raises:
        ValueError: a file cannot be read, or does not know the token.
        FileNotFoundError: there is no description beside the file.
        ImportError: the `tiktoken` package is missing.
    """

    def __init__(self, path: Path, eod_token: str | None = None) -> None:
        self.name: str = str(path)
        self._arguments = (path, eod_token)
        content = path.read_bytes()
        beside = path.with_name(f"{path.name}.json")
        pattern, special = _description(beside)
        self._encoding = _encoding(path, _ranks(path, content), pattern, special)
        eod_token = eod_token or END_OF_TEXT
        if eod_token not in special:
            raise ValueError(f"{beside}: special_tokens has no {eod_token}, the end of document")
        self.eod_id: int = special[eod_token]
        self.special_ids: Mapping[str, int] = {"eod": self.eod_id}
        self.vocab_size: int = self._encoding.max_token_value + 1
        self._special, self._special_ids = frozenset(special.values()), special
        identity = hashlib.sha256(content)
        identity.update(json.dumps([pattern, sorted(special.items())]).encode())
        self.digest: str = f"sha256:{identity.hexdigest()}"

    def __reduce__(self) -> tuple[Any, tuple[Path, str | None]]:
        """Travels to worker processes as its path; each of them reads the file once."""
        return _load, self._arguments

    def token_ids(self) -> dict[str, int]:
        """Returns the id of each special token by its name; the others are bytes without one."""
        return dict(self._special_ids)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of the text, without special tokens."""
        return self._encoding.encode_ordinary(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text."""
        return [self._encoding.encode_ordinary(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of the ids, without special tokens; broken characters become U+FFFD."""
        return self._encoding.decode([int(i) for i in ids if i not in self._special])


@functools.lru_cache(maxsize=4)
def _load(path: Path, eod_token: str | None) -> TiktokenTokenizer:
    return TiktokenTokenizer(path, eod_token)


def _description(path: Path) -> tuple[str, dict[str, int]]:
    wanted = '{"pattern": "REGULAR EXPRESSION", "special_tokens": {"<|endoftext|>": ID}}'
    if not path.is_file():
        raise FileNotFoundError(
            f"no {path}, which tells the pattern and special tokens: write {wanted}"
        )
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        pattern, special = entries["pattern"], entries["special_tokens"]
        good = isinstance(pattern, str) and all(isinstance(i, int) for i in special.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        good = False
    if not good:
        raise ValueError(f"{path} must hold {wanted}")
    return pattern, special


def _ranks(path: Path, content: bytes) -> dict[bytes, int]:
    """Returns the rank of each token; a line holds the token in base64 and its rank."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ValueError(
                f"{path}:{number}: no token in base64 with its rank: {error}"
            ) from error
    return ranks


def _encoding(path: Path, ranks: dict[bytes, int], pattern: str, special: dict[str, int]) -> Any:
    try:
        import tiktoken
    except ImportError as error:
        raise ImportError(
            f"{path} is a tiktoken vocabulary: pip install megatron-lightning[tokenizers]"
        ) from error
    missing = [value for value in range(256) if bytes([value]) not in ranks]
    if missing:
        raise ValueError(f"{path} has no token for the byte {missing[0]}: it is damaged")
    try:
        return tiktoken.Encoding(
            path.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
        )
    except (ValueError, AssertionError) as error:
        raise ValueError(f"{path} with the description beside it: {error}") from error
