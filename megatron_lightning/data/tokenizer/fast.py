"""Tokenizers of the `tokenizers` library, from a `tokenizer.json` file.

The library is imported when a file is loaded, not before. Truncation and padding that a file asks
for are switched off: a corpus holds its texts whole. Chat templates and the `transformers` classes
are not used.
"""

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_lightning.data.tokenizer.base import END_OF_TEXT, ROLES

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

_USUAL = {
    "bos": ("<s>", "<|begin_of_text|>"),
    "eos": ("</s>", "<|end_of_text|>"),
    "unk": ("<unk>", "[UNK]"),
    "pad": ("<pad>", "[PAD]"),
    "cls": ("[CLS]",),
    "sep": ("[SEP]",),
    "mask": ("<mask>", "[MASK]"),
}
"""How special tokens are called where no `tokenizer_config.json` names them."""
_USUAL_EOD = (END_OF_TEXT, *_USUAL["eos"], *_USUAL["sep"])


class FileTokenizer:
    """A tokenizer of the `tokenizers` library, from a `tokenizer.json` file.

    Args:
        path: the file.
        eod_token: the end-of-document token; None takes the `eos_token` of a
            `tokenizer_config.json` beside the file, else the first that the file knows of
            `<|endoftext|>`, `</s>`, `<|end_of_text|>` and `[SEP]`.
        name: what it was loaded by; None means the path.

    Raises:
        ValueError: the file cannot be read, or does not know the token.
    """

    def __init__(self, path: Path, eod_token: str | None = None, name: str | None = None) -> None:
        content = path.read_bytes()
        self.name: str = str(path) if name is None else name
        self._arguments = (path, eod_token, name)
        self._tokenizer = _from_bytes(path, content)
        named = _named_tokens(path)
        wanted = _end_tokens(named, eod_token)
        eod_id = _first_known(self._tokenizer, wanted)
        if eod_id is None:
            raise ValueError(
                f"{path} has no token {' or '.join(wanted)}: name its end-of-document "
                "token as eos_token in a tokenizer_config.json beside it, or with eod_token"
            )
        self.eod_id: int = eod_id
        self.special_ids: Mapping[str, int] = {"eod": eod_id, **_role_ids(self._tokenizer, named)}
        self.vocab_size: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.digest: str = f"sha256:{hashlib.sha256(content).hexdigest()}"

    def __reduce__(self) -> tuple[Any, tuple[Path, str | None, str | None]]:
        """Travels to worker processes as its path; each of them reads the file once."""
        return _file_tokenizer, self._arguments

    def description(self) -> dict[str, Any]:
        """Returns the content of the file, as the library understands it."""
        return json.loads(self._tokenizer.to_str())

    def token_ids(self) -> dict[str, int]:
        """Returns the id of each token by its name, special tokens included."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of the text, without special tokens added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
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


def special_tokens(path: Path) -> dict[str, tuple[str, int]]:
    """Returns name and id of the special tokens of a `tokenizer.json` by role, as `FileTokenizer`
    finds them; `eos` is the end of a document where no other is named. Those that aren't known are
    left out.

    Raises:
        ValueError: the file cannot be read.
    """
    tokenizer, named = _from_bytes(path, path.read_bytes()), _named_tokens(path)
    found = _role_ids(tokenizer, named)
    end = _first_known(tokenizer, _end_tokens(named))
    if end is not None:
        found["eos"] = end
    return {role: (str(tokenizer.id_to_token(number)), number) for role, number in found.items()}


def _end_tokens(named: Mapping[str, str], eod_token: str | None = None) -> tuple[str, ...]:
    """Returns what the end-of-document token may be called."""
    first = eod_token or named.get("eos")
    return _USUAL_EOD if first is None else (first,)


def _first_known(tokenizer: "FastTokenizer", tokens: Sequence[str]) -> int | None:
    known = (tokenizer.token_to_id(token) for token in tokens)
    return next((number for number in known if number is not None), None)


def _role_ids(tokenizer: "FastTokenizer", named: Mapping[str, str]) -> dict[str, int]:
    special = {
        token.content: number
        for number, token in tokenizer.get_added_tokens_decoder().items()
        if token.special
    }
    found: dict[str, int] = {}
    for role in ROLES:
        if role in named:
            number = tokenizer.token_to_id(named[role])
        else:
            number = next((special[token] for token in _USUAL[role] if token in special), None)
        if number is not None:
            found[role] = number
    return found


@functools.lru_cache(maxsize=4)
def _file_tokenizer(path: Path, eod_token: str | None, name: str | None) -> FileTokenizer:
    return FileTokenizer(path, eod_token, name)


def _from_bytes(path: Path, content: bytes) -> "FastTokenizer":
    from tokenizers import Tokenizer as Fast

    try:
        tokenizer = Fast.from_buffer(content)
    except Exception as error:  # the library raises plain Exception for a file that it cannot parse
        raise ValueError(
            f"{path} is no tokenizer.json of the tokenizers library: {error}"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _named_tokens(file: Path) -> dict[str, str]:
    """Returns the special tokens by role that the Hugging Face config beside the file names."""
    config = file.with_name("tokenizer_config.json")
    if not config.is_file():
        return {}
    try:
        entries = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{config} is no JSON: {error}") from error
    found: dict[str, str] = {}
    for role in ROLES:
        token = entries.get(f"{role}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[role] = token
    return found
