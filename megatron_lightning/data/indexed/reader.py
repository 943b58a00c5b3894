"""Reader of the indexed token format (see `format`) from a local disk or a remote file system."""

import os
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from megatron_lightning.data.files import is_file, is_remote
from megatron_lightning.data.indexed.format import Index, check_pair, parse_index
from megatron_lightning.data.indexed.remote import BlockCache, RemoteFile
from megatron_lightning.data.indexed.storage import Access, ByteSource, open_local


class IndexedDataset:
    """Read-only view of a `.bin`/`.idx` pair; item i is the token array of sequence i.

    It may be handed to worker processes: it travels as its path, and opens the files anew in a
    process that was forked.

    Args:
        prefix: path of the pair without suffix, or a URL that fsspec knows, such as
            s3://bucket/corpus.
        access: how a local pair is read: "mmap" maps it into memory, "file" reads piece by piece.
        cache: local folder for blocks of a remote pair.

    Raises:
        ValueError: a file is damaged or the two do not belong together; the message names the path
            and both sizes.
        FileNotFoundError: a file is missing.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        *,
        access: Access = "mmap",
        cache: BlockCache | None = None,
    ) -> None:
        if access not in ("mmap", "file"):
            raise ValueError(f'access="{access}" must be "mmap" or "file"')
        self.prefix = os.fspath(prefix)
        self._access: Access = access
        self._cache = cache or BlockCache()
        if missing := missing_files(self.prefix):
            raise FileNotFoundError(
                f"no {' and '.join(missing)}: give the path of a .bin/.idx pair without its suffix"
            )
        name = f"{self.prefix}.idx"
        if is_remote(self.prefix):
            remote = RemoteFile(name, self._cache)
            source: ByteSource = remote.mapped() or remote
        else:
            source = open_local(Path(name), self._access)
        self.index_bytes = source.size
        self._index: Index = parse_index(name, source.read(0, source.size))
        self._tokens, self._process = self._open_tokens(), os.getpid()

    def _open_tokens(self) -> ByteSource:
        name = f"{self.prefix}.bin"
        if is_remote(self.prefix):
            source: ByteSource = RemoteFile(name, self._cache)
        else:
            source = open_local(Path(name), self._access)
        check_pair(name, source.size, f"{self.prefix}.idx", self._index)
        return source

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self._index.lengths)

    def __reduce__(self) -> tuple[object, ...]:
        """Travels to worker processes as its path; each of them opens the files anew."""
        return _open_again, (self.prefix, self._access, self._cache)

    @property
    def dtype(self) -> np.dtype:
        """Type of the tokens on disk."""
        return self._index.dtype

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all sequences."""
        return self._index.num_tokens

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """Tokens in each sequence, shape (sequences,)."""
        return self._index.lengths

    @property
    def document_indices(self) -> NDArray[np.int64]:
        """Sequence index at which each document begins, and the number of sequences; (documents +
        1,).
        """
        return self._index.boundaries

    @overload
    def __getitem__(self, index: int) -> NDArray: ...
    @overload
    def __getitem__(self, index: slice) -> list[NDArray]: ...
    def __getitem__(self, index: int | slice) -> NDArray | list[NDArray]:
        """Returns the tokens of a sequence (from the end for a negative number), or a list of those
        of a slice.

        Raises:
            IndexError: the sequence does not exist.
        """
        if isinstance(index, slice):
            return [self.get(number) for number in range(*index.indices(len(self)))]
        return self.get(index + len(self) if -len(self) <= index < 0 else index)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray:
        """Returns `length` tokens of sequence `index` from `offset` on, not to be written to.

        Args:
            index: sequence number, 0 to len(self) - 1.
            offset: first token, counted within the sequence.
            length: number of tokens; None means to the end of the sequence.

        Raises:
            IndexError: the sequence does not exist or does not hold the tokens asked for.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {self.prefix}, which has {len(self)}")
        held = int(self._index.lengths[index])
        length = held - offset if length is None else length
        if not 0 <= offset <= offset + length <= held:
            raise IndexError(
                f"tokens {offset} to {offset + length} of sequence {index} of {self.prefix}, "
                f"which has {held} tokens"
            )
        begin = int(self._index.pointers[index]) + offset * self.dtype.itemsize
        return self.read_bytes(begin, length * self.dtype.itemsize).view(self.dtype)

    def read_bytes(self, begin: int, size: int) -> NDArray[np.uint8]:
        """Returns `size` bytes of the token file from byte `begin` on."""
        if os.getpid() != self._process:  # forked: a connection must not be shared
            self._tokens, self._process = self._open_tokens(), os.getpid()
        return self._tokens.read(begin, size)


def missing_files(prefix: str | os.PathLike[str]) -> list[str]:
    """Returns those of the two files of `prefix` that do not exist."""
    names = [f"{os.fspath(prefix)}{suffix}" for suffix in (".bin", ".idx")]
    return [name for name in names if not is_file(name)]


def _open_again(prefix: str, access: Access, cache: BlockCache) -> IndexedDataset:
    return IndexedDataset(prefix, access=access, cache=cache)
