"""Where chat templates come from: the files of a tokenizer's folder, a Jinja file, or built in."""

import json
import os
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from megatron_lightning.data.sft.chat_template import ChatTemplate
from megatron_lightning.data.tokenizer import BYTES

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BUILTIN: Mapping[str, str] = {"chatml": CHATML}
"""Templates that can be chosen by name for a tokenizer without one."""

_TEMPLATE_FILES = ("*.jinja", "tokenizer_config.json", "special_tokens_map.json")
_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
    "additional_special_tokens",
)


def load_chat_template(
    tokenizer: str | os.PathLike[str], choice: str | None = None, *, today: date | None = None
) -> ChatTemplate:
    """Loads the template of a tokenizer, or another one for it.

    Args:
        tokenizer: folder of the tokenizer, or a file in it, or a model of the Hugging Face hub;
            "bytes" has no template.
        choice: None takes the tokenizer's; a name takes that one of the tokenizer's templates, or
            "chatml"; a path takes that file.
        today: see `ChatTemplate`.

    Raises:
        ValueError: there is no such template; the message says what can be chosen.
    """
    name = os.fspath(tokenizer)
    if name == BYTES:
        return ChatTemplate(_chosen({}, choice, name), today=today)
    folder = _folder(name)
    config = read_json(folder / "tokenizer_config.json")
    source = _chosen(_own_templates(folder, config), choice, name)
    return ChatTemplate(source, special_tokens(folder), today=today)


def _folder(tokenizer: str) -> Path:
    """Folder with the tokenizer's files, downloaded for a model of the Hugging Face hub."""
    path = Path(tokenizer)
    if path.exists():
        return path if path.is_dir() else path.parent
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(tokenizer, allow_patterns=list(_TEMPLATE_FILES)))


def special_tokens(folder: Path) -> dict[str, Any]:
    """Returns the special tokens by name (`eos_token`, ...) of a tokenizer's folder, as texts."""
    found = read_json(folder / "special_tokens_map.json") | read_json(
        folder / "tokenizer_config.json"
    )
    tokens = {name: _text(found[name]) for name in _TOKEN_NAMES if found.get(name)}
    extra = found.get("extra_special_tokens")
    if isinstance(extra, dict):
        tokens |= {name: _text(token) for name, token in extra.items()}
    return tokens


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object of a JSON file, {} when there is no such file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _own_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name; files come before fields, as in `transformers`."""
    field = config.get("chat_template")
    if isinstance(field, list):
        templates = {entry["name"]: entry["template"] for entry in field}
    else:
        templates = {"default": field} if field else {}
    alone = folder / "chat_template.jinja"
    if alone.is_file():
        templates = {"default": alone.read_text(encoding="utf-8")}
        more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
        templates |= {path.stem: path.read_text(encoding="utf-8") for path in more}
    return templates


def _chosen(own: Mapping[str, str], choice: str | None, tokenizer: str) -> Mapping[str, str]:
    if choice is None and own:
        return own
    if choice is None:
        raise ValueError(
            f"tokenizer {tokenizer} has no chat template (chat_template.jinja, or chat_template in"
            " tokenizer_config.json): give chat_template, the path of a Jinja file or"
            f" {' or '.join(map(repr, BUILTIN))}"
        )
    if choice in own:
        return {"default": own[choice]}
    if choice in BUILTIN:
        return {"default": BUILTIN[choice]}
    if Path(choice).is_file():
        return {"default": Path(choice).read_text(encoding="utf-8")}
    raise ValueError(
        f"chat_template={choice!r} is neither a file nor one of {', '.join([*own, *BUILTIN])}"
    )


def _text(token: Any) -> Any:
    if isinstance(token, list):
        return [_text(entry) for entry in token]
    return token["content"] if isinstance(token, dict) else token
