"""Files by path or by URL: what reading a corpus and its data card needs of a file system.

A name with "://" is a URL that fsspec opens (s3://, gs://, memory://, file://, ...); its package
for that protocol may have to be installed. Everything else is a local path.
"""

import os
from pathlib import Path
from typing import Any


def is_remote(name: str | os.PathLike[str]) -> bool:
    """Returns whether `name` is a URL."""
    return "://" in os.fspath(name)


def open_file_system(url: str) -> tuple[Any, str]:
    """Returns fsspec's file system for a URL, and the path in it.

    Raises:
        ValueError: the protocol is not known.
        ImportError: the package for this protocol is missing; the message names it.
    """
    from fsspec.core import url_to_fs

    return url_to_fs(url)


def is_file(name: str) -> bool:
    """Returns whether there is a file of this name."""
    if not is_remote(name):
        return Path(name).is_file()
    files, path = open_file_system(name)
    return files.isfile(path)


def file_size(name: str) -> int:
    """Returns the size of a file in bytes.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if not is_remote(name):
        return Path(name).stat().st_size
    files, path = open_file_system(name)
    return int(files.info(path)["size"])


def read_text(name: str) -> str:
    """Returns the content of a UTF-8 file.

    Raises:
        FileNotFoundError: there is no such file.
        UnicodeDecodeError: it is no text.
    """
    if not is_remote(name):
        return Path(name).read_text(encoding="utf-8")
    files, path = open_file_system(name)
    return files.cat_file(path).decode("utf-8")
