"""Folders to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.utils import validate_repo_id


def check_repo_id(repo_id: str) -> None:
    """ValueError for what is no id of a repository."""
    try:
        validate_repo_id(repo_id)
    except ValueError as error:
        raise ValueError(
            f"push_to_hub={repo_id!r}: give the id of a repository, such as 'name/model': {error}"
        ) from error


def push(folder: Path, repo_id: str) -> None:
    """Upload a model folder to the repository `repo_id`, which is made if it isn't there, with the
    token that huggingface_hub finds. ValueError if it can't be: the folder stays.
    """
    api = HfApi()
    try:
        api.create_repo(repo_id, exist_ok=True)
        api.upload_folder(
            repo_id=repo_id, folder_path=str(folder), commit_message=f"Upload {folder.name}"
        )
    except Exception as error:  # the client's, its transport's, the system's
        raise ValueError(
            f"{folder} is written, but could not be pushed to {repo_id}: {error}"
        ) from error
