"""What each sample of a batch is and counts for: made on the CPU where the sample is read, and
handed along with the batch, so that nothing has to be read back from a GPU.

A data set that knows where its samples come from has a method `read`; of any other the plain facts
are counted. The loader puts a `BatchAccount` under `ACCOUNT` into each batch. It is no tensor, so
neither Lightning nor the strategy looks into it, and all micro-batches of a batch share it.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_lightning.data.samplers import PADDING

ACCOUNT = "account"
"""Key of a batch that holds its `BatchAccount`."""
COLUMNS = (
    "sample_id",
    "source",
    "epoch",
    "documents",
    "tokens",
    "non_padding_tokens",
    "loss_tokens",
    "truncated",
)
_COLUMN = {name: number for number, name in enumerate(COLUMNS)}


class SampleNote(NamedTuple):
    """What a data set knows of one of its samples."""

    source: int = 0
    """Number of the source in `source_names`."""
    epoch: int = 0
    """Pass over the source, from 0, for a data set that holds several passes."""
    epochs: int = 1
    """Passes over the source that the data set holds."""
    documents: int = 1
    """Documents that begin in the sample."""
    padding: int = 0
    """Tokens that only fill it up."""
    truncated: int = 0
    """Documents of which tokens were cut off and come nowhere else."""


@runtime_checkable
class NotedSource(Protocol):
    """A data set that says where its samples come from."""

    @property
    def source_names(self) -> Sequence[str]:
        """Names of the sources, such as the members of a blend."""
        ...

    def read(self, index: int, /) -> tuple[dict[str, Tensor], SampleNote]:
        """Returns sample `index` and what there is to note about it."""
        ...


class BatchAccount:
    """What the samples of this rank's batch are and count for.

    Attributes:
        rows: int64 (B, 8), see `COLUMNS`; a sample that only fills up the batch has `sample_id` -1
            and counts nothing.
        names: of the sources.
        left_out: samples of the epoch of the data before this batch that filled no batch, of all
            ranks together.
    """

    __slots__ = ("left_out", "names", "rows")

    def __init__(self, rows: NDArray[np.int64], names: Sequence[str], left_out: int = 0) -> None:
        self.rows, self.names, self.left_out = rows, tuple(names), left_out

    @property
    def sample_id(self) -> NDArray[np.int64]:
        """Number of each sample in its data set, (B,); with the epoch it is unique in a run."""
        return self.column("sample_id")

    @property
    def source(self) -> NDArray[np.int64]:
        """Number of each sample's source in `names`, (B,)."""
        return self.column("source")

    @property
    def epoch(self) -> NDArray[np.int64]:
        """Pass over the source that each sample belongs to, (B,)."""
        return self.column("epoch")

    def column(self, name: str) -> NDArray[np.int64]:
        """Returns one of `COLUMNS`, (B,)."""
        return self.rows[:, _COLUMN[name]]

    def totals(self) -> dict[tuple[str, int], NDArray[np.int64]]:
        """Returns for each source and epoch: samples, documents, tokens, non-padding tokens, tokens
        with loss, truncated documents.
        """
        real = self.rows[self.sample_id >= 0]
        found: dict[tuple[str, int], NDArray[np.int64]] = {}
        for source, epoch in np.unique(real[:, 1:3], axis=0).tolist():
            held = real[(real[:, 1] == source) & (real[:, 2] == epoch), 3:]
            found[self.names[source], epoch] = np.concatenate([[len(held)], held.sum(0)])
        return found


def source_names(dataset: object) -> Sequence[str]:
    """Returns the names of a data set's sources; one that names none is a source called "data"."""
    return dataset.source_names if isinstance(dataset, NotedSource) else ("data",)


def read_sample(dataset: object, index: int) -> tuple[dict[str, Tensor], SampleNote]:
    """Returns sample `index` and the note about it."""
    if isinstance(dataset, NotedSource):
        return dataset.read(index)
    sample: dict[str, Tensor] = dataset[index]  # type: ignore[index]
    return sample, plain_note(sample)


def plain_note(sample: Mapping[str, Tensor]) -> SampleNote:
    """Returns what can be told from a sample alone: documents by `cu_seqlens`, padding by
    `attention_mask` (1 for tokens that count), where there are such fields.
    """
    documents, padding = 1, 0
    if "cu_seqlens" in sample:
        documents = int((sample["cu_seqlens"].diff() > 0).sum())
    mask = sample.get("attention_mask")
    if mask is not None and mask.dim() == 1:
        padding = int((mask == 0).sum())
    return SampleNote(documents=documents, padding=padding)


def account_row(index: int, sample: Mapping[str, Tensor], note: SampleNote) -> list[int]:
    """Returns a sample's row of `COLUMNS`, and the passes over its source that an epoch of the data
    holds: the epoch in the row is that within the data set.
    """
    tokens = sample.get("tokens", sample.get("input_ids"))
    length = 0 if tokens is None else tokens.numel()
    loss = sample.get("loss_mask")
    with_loss = 0 if loss is None else int(torch.count_nonzero(loss))
    return [
        index,
        note.source,
        note.epoch,
        note.documents,
        length,
        length - note.padding,
        with_loss,
        note.truncated,
        note.epochs,
    ]


def padding_row() -> list[int]:
    """Returns the row of a sample that only fills up a batch."""
    return [PADDING, *[0] * len(COLUMNS)]


def batch_account(
    rows: NDArray[np.int64], names: Sequence[str], *, epoch: int, left_out: int
) -> BatchAccount:
    """Returns the account of a batch from its samples' rows and the epoch of the data."""
    counted = rows[:, :-1].copy()
    counted[:, _COLUMN["epoch"]] += epoch * rows[:, -1]
    return BatchAccount(counted, names, left_out)
