"""From a name to a tokenizer."""

import os
import re
from contextlib import suppress
from pathlib import Path

from megatron_lightning.data.tokenizer.base import BYTES, ByteTokenizer, Tokenizer
from megatron_lightning.data.tokenizer.fast import FileTokenizer
from megatron_lightning.data.tokenizer.sentence_piece import SentencePieceTokenizer
from megatron_lightning.data.tokenizer.tiktoken_file import TiktokenTokenizer

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_SUFFIXES = (".json", ".model", ".tiktoken")
_FOLDER_FILES = ("tokenizer.json", "tokenizer.model")


def load_tokenizer(path: str | os.PathLike[str], *, eod_token: str | None = None) -> Tokenizer:
    """Loads a tokenizer.

    Args:
        path: "bytes"; a file: `tokenizer.json` of the tokenizers library, a SentencePiece `.model`,
            or a `.tiktoken` file with its description beside it; a folder with a `tokenizer.json`
            or `tokenizer.model`; or ORGANISATION/MODEL on the Hugging Face hub.
        eod_token: the end-of-document token; None takes the one that the tokenizer itself names,
            see the classes.

    Raises:
        ValueError: the file cannot be read, or does not know the token.
        FileNotFoundError: there is no such file.
        ImportError: the package for this kind of file is missing.
    """
    name = os.fspath(path)
    if name == BYTES:
        return ByteTokenizer()
    file = tokenizer_file(path)
    if not file.is_file():
        if not _may_be_on_hub(name):
            raise FileNotFoundError(
                f"no tokenizer file {file}: give a tokenizer.json, a .model or .tiktoken file, a "
                f'folder with one, ORGANISATION/MODEL of the Hugging Face hub, or "{BYTES}"'
            )
        return FileTokenizer(_from_hub(name), eod_token, name)
    if file.suffix == ".model":
        return SentencePieceTokenizer(file, eod_token)
    if file.suffix == ".tiktoken":
        return TiktokenTokenizer(file, eod_token)
    return FileTokenizer(file, eod_token)


def _may_be_on_hub(name: str) -> bool:
    """Returns whether a name is ORGANISATION/MODEL and no mistyped path."""
    looks_so = bool(_HUB_ID.fullmatch(name)) and not name.endswith(_SUFFIXES)
    return looks_so and not Path(name).parent.exists()


def tokenizer_file(path: str | os.PathLike[str]) -> Path:
    """Returns the file that `load_tokenizer` reads for a file or a folder."""
    if not Path(path).is_dir():
        return Path(path)
    files = [Path(path) / name for name in _FOLDER_FILES]
    return next((file for file in files if file.is_file()), files[0])


def _from_hub(name: str) -> Path:
    """Returns the downloaded `tokenizer.json` of a model, its config beside it."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

    try:
        file = hf_hub_download(name, "tokenizer.json")
    except (HfHubHTTPError, EntryNotFoundError, HFValidationError, OSError) as error:
        raise FileNotFoundError(
            f"no tokenizer file {name}, and no tokenizer.json of a model {name} could be had from "
            f"the Hugging Face hub: {error}"
        ) from error
    with suppress(EntryNotFoundError):  # it is optional
        hf_hub_download(name, "tokenizer_config.json")
    return Path(file)
