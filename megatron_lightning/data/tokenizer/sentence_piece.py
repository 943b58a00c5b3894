"""SentencePiece models (`.model` files); the package is imported when one is loaded."""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class SentencePieceTokenizer:
    """A SentencePiece model.

    Args:
        path: the `.model` file.
        eod_token: the end-of-document piece; None takes the model's end-of-sentence piece.

    Raises:
        ValueError: the file cannot be read, or has no such piece.
        ImportError: the `sentencepiece` package is missing.
    """

    def __init__(self, path: Path, eod_token: str | None = None) -> None:
        self.name: str = str(path)
        self._arguments = (path, eod_token)
        content = path.read_bytes()
        self._model = _processor(path, content)
        self.vocab_size: int = self._model.get_piece_size()
        eod_id = self._model.eos_id() if eod_token is None else self._piece_id(eod_token)
        if eod_id < 0:
            raise ValueError(
                f"{path} has no {'end-of-sentence piece' if eod_token is None else eod_token}: "
                "name its end-of-document piece with eod_token"
            )
        self.eod_id: int = eod_id
        roles = {
            role: getattr(self._model, f"{role}_id")() for role in ("bos", "eos", "unk", "pad")
        }
        self.special_ids: Mapping[str, int] = {
            "eod": eod_id,
            **{role: number for role, number in roles.items() if number >= 0},
        }
        self.digest: str = f"sha256:{hashlib.sha256(content).hexdigest()}"

    def _piece_id(self, piece: str) -> int:
        number = self._model.piece_to_id(piece)
        return number if self._model.id_to_piece(number) == piece else -1

    def __reduce__(self) -> tuple[Any, tuple[Path, str | None]]:
        """Travels to worker processes as its path; each of them reads the file once."""
        return _load, self._arguments

    def token_ids(self) -> dict[str, int]:
        """Returns the id of each piece by its name, control pieces included."""
        return {self._model.id_to_piece(number): number for number in range(self.vocab_size)}

    def encode(self, text: str) -> list[int]:
        """Returns the ids of the text, without begin and end of sentence."""
        return self._model.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text."""
        return self._model.encode(list(texts), num_threads=1)  # its threads do not survive a fork

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of the ids, without control pieces."""
        kept = [int(i) for i in ids if i != self.eod_id and not self._model.is_control(int(i))]
        return self._model.decode(kept)


@functools.lru_cache(maxsize=4)
def _load(path: Path, eod_token: str | None) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(path, eod_token)


def _processor(path: Path, content: bytes) -> Any:
    try:
        import sentencepiece
    except ImportError as error:
        raise ImportError(
            f"{path} is a SentencePiece model: pip install megatron-lightning[tokenizers]"
        ) from error
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=content)
    except RuntimeError as error:
        raise ValueError(f"{path} is no SentencePiece model: {error}") from error
