"""English text that every Python installation has: the help topics of the language reference.

About half a megabyte, so that a first training run needs no download.
"""

import json
import os
from pathlib import Path


def python_help_texts() -> list[str]:
    """Returns the help topics in alphabetical order, one document each.

    Raises:
        RuntimeError: this Python was packaged without `pydoc_data`.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise RuntimeError(
            "this Python has no pydoc_data.topics (some minimal images remove it): install the "
            "full standard library, or give your own JSONL file"
        ) from error
    return [topics[name] for name in sorted(topics)]


def write_python_help(path: str | os.PathLike[str]) -> int:
    """Writes the topics as JSON lines `{"text": ...}` and returns the number of documents.

    The file appears complete or not at all; its folder is made.
    """
    texts = python_help_texts()
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    with partial.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    partial.replace(target)
    return len(texts)
