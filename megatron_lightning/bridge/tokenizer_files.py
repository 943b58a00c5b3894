"""The tokenizer that goes with an exported model: files that transformers' AutoTokenizer loads, and
the ids of special tokens for config.json. Only what the files name is written; the rest stays null.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_lightning.bridge.family import TOKEN_FIELDS
from megatron_lightning.bridge.folder import COMPANIONS
from megatron_lightning.bridge.placing import write_json
from megatron_lightning.data.tokenizer import BYTES, special_tokens
from megatron_lightning.utils.logging import warn_once

VOCABULARY, SETTINGS = "tokenizer.json", "tokenizer_config.json"
_TOKENIZERS = (
    VOCABULARY,
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)


@dataclass(frozen=True)
class Companions:
    """Files beside the weights."""

    copied: Mapping[str, Path] = field(default_factory=dict)
    """Where the content of each comes from, by its name in the new folder."""
    settings: Mapping[str, Any] | None = None
    """Of a tokenizer_config.json that is made."""
    token_ids: Mapping[str, int] = field(default_factory=dict)
    """Fields of config.json that the tokenizer knows."""

    def complete(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of config.json, with ids where there is none."""
        known = {name: n for name, n in self.token_ids.items() if fields.get(name) is None}
        return {**fields, **known}

    def write(self, folder: Path) -> None:
        """Put all of them there."""
        for name, source in self.copied.items():
            shutil.copyfile(source, folder / name)
        if self.settings is not None:
            write_json(folder / SETTINGS, self.settings)


def companions_of_source(folder: str | Path | None) -> Companions:
    """Those of the folder that a model came from, as they are; None where it came from nowhere."""
    return Companions() if folder is None else Companions(_found_in(Path(folder)))


def companions_of_tokenizer(
    tokenizer: str | Path, vocab_size: int | None = None, digest: str | None = None
) -> Companions:
    """Those of a `tokenizer.json` under any name, or of a folder with files of a tokenizer.

    `vocab_size`: ids that the model has; `digest`: of the tokenizer that it was trained with, where
    that is known. ValueError where there is no such file, it is no tokenizer, or another one.
    """
    path, label = Path(tokenizer), f"tokenizer={str(tokenizer)!r}"
    what = f"give a {VOCABULARY} (as preprocess writes it), or a folder that holds tokenizer files"
    if str(tokenizer) == BYTES and not path.exists():
        raise ValueError(f"{label}: there is no file of it that transformers reads; leave it out")
    if not path.exists():
        raise ValueError(f"{label}: there is no such file or folder; {what}")
    if path.is_dir():
        copied = _found_in(path)
        if not has_tokenizer(path):
            raise ValueError(f"{label}: the folder holds none of {list(_TOKENIZERS)}; {what}")
    elif path.suffix == ".json":
        beside = path.with_name(SETTINGS)
        copied = {VOCABULARY: path, **({SETTINGS: beside} if beside.is_file() else {})}
    else:
        raise ValueError(f"{label}: transformers doesn't read this file; {what}")
    if VOCABULARY not in copied:
        return Companions(copied)
    tokens = special_tokens(copied[VOCABULARY])
    found = f"sha256:{hashlib.sha256(copied[VOCABULARY].read_bytes()).hexdigest()}"
    if digest is not None and not path.is_dir() and digest != found:  # a folder may be a later copy
        raise ValueError(
            f"{label} is {found}, the model was trained with {digest}: give the tokenizer that it"
            " was trained with, or a folder that holds another form of it"
        )
    outside = {name: n for name, n in tokens.values() if vocab_size is not None and n >= vocab_size}
    if outside and path.is_dir():  # a token added for padding, say, that the model never sees
        warn_once(f"{label}: config.json names none of its tokens beyond the model's: {outside}")
        tokens = {role: token for role, token in tokens.items() if token[0] not in outside}
    elif outside:
        raise ValueError(
            f"{label}: its tokens {outside} are beyond the {vocab_size} ids of the model; give the"
            " tokenizer that it was trained with"
        )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{f"{role}_token": name for role, (name, _) in tokens.items()},
    }
    ids = {f"{role}_token_id": number for role, (_, number) in tokens.items()}
    return Companions(
        copied,
        None if SETTINGS in copied else settings,
        {name: number for name, number in ids.items() if name in TOKEN_FIELDS},
    )


def has_tokenizer(folder: str | Path) -> bool:
    """Whether a folder holds the vocabulary of a tokenizer."""
    return any((Path(folder) / name).is_file() for name in _TOKENIZERS)


def _found_in(folder: Path) -> dict[str, Path]:
    return {name: folder / name for name in COMPANIONS if (folder / name).is_file()}
