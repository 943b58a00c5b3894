"""Index arrays of GPT samples: Megatron-Core's order, bit for bit, as pure functions.

Sequences are tiled over as many epochs as the samples need and shuffled (document index); the
resulting token stream is cut into windows of `seq_length` tokens plus one for the shifted label
(sample index); the windows are shuffled again (shuffle index). One `numpy.random.RandomState` is
consumed in that order: document index first, then shuffle index. Integers only. Megatron's float32
rounding of the partial last sample is deliberately not reproduced.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_lightning.data.compiled import COMPILED_FROM, kernels


class EpochPlan(NamedTuple):
    """How many passes over the tokens a number of samples needs."""

    num_epochs: int
    samples_before_final_epoch: int
    separate_final_epoch: bool


def plan_epochs(
    tokens_per_epoch: int, num_samples: int | None, seq_length: int, extra: int = 1
) -> EpochPlan:
    """Returns the number of epochs and whether the last one is shuffled on its own.

    It is when less than four fifths of it are needed: mixed in, the tokens that are left out would
    be missing from all epochs alike.

    Args:
        tokens_per_epoch: tokens in one pass over the sequences.
        num_samples: samples asked for; None means one epoch.
        seq_length: tokens a sample.
        extra: 1 when a sample holds one more token for the label shift, else 0.

    Raises:
        ValueError: samples are asked of a corpus without tokens.
    """
    epochs = 1
    if num_samples:
        if tokens_per_epoch == 0:
            raise ValueError(f"num_samples={num_samples} samples asked of sequences without tokens")
        epochs = max(1, -(-(num_samples * seq_length + extra) // tokens_per_epoch))
    before = ((epochs - 1) * tokens_per_epoch - extra) // seq_length if epochs > 1 else 0
    in_one_epoch = (tokens_per_epoch - extra) // seq_length
    separate = epochs > 1 and (num_samples or 0) - before < int(0.80 * in_one_epoch)
    return EpochPlan(epochs, before, separate)


def build_document_index(
    sequences: range, plan: EpochPlan, random: np.random.RandomState
) -> NDArray[np.int32]:
    """Returns the shuffled sequence numbers of all epochs, int32 of shape (epochs * sequences,)."""
    one = np.arange(sequences.start, sequences.stop, dtype=np.int32)
    head = np.tile(one, plan.num_epochs - plan.separate_final_epoch)
    random.shuffle(head)
    if not plan.separate_final_epoch:
        return head
    random.shuffle(one)
    return np.concatenate([head, one])


def build_sample_index(
    lengths: NDArray[np.int32],
    document_index: NDArray[np.int32],
    seq_length: int,
    *,
    extra: int = 1,
    drop_last: bool = True,
    tokens: int | None = None,
) -> NDArray[np.integer]:
    """Returns where each sample begins in the shuffled stream.

    Sample i reads from row i to row i + 1, and `extra` tokens more.

    Args:
        lengths: tokens in each sequence of the corpus.
        document_index: sequence numbers in stream order.
        seq_length: tokens a sample.
        extra: tokens that a sample shares with the next.
        drop_last: leave out a last sample that is shorter than the others.
        tokens: of the whole stream, where the caller knows them.

    Returns:
        (samples + 1, 2): position in `document_index`, token offset in that sequence; int32 where
        it fits.
    """
    total = int(lengths[document_index].sum(dtype=np.int64)) if tokens is None else tokens
    usable = max(total - extra, 0)
    full, rest = divmod(usable, seq_length)
    longest = int(lengths.max()) if len(lengths) else 0
    fits = max(len(document_index), longest) < 2**31
    partial = int(rest > 0 and not drop_last)
    index = np.zeros((full + partial + 1, 2), dtype=np.int32 if fits else np.int64)
    rows = index[: full + 1]
    compiled = kernels() if len(document_index) >= COMPILED_FROM else None
    if compiled is not None:
        # Copied: a mapped index is neither aligned nor writable, which numba would compile for.
        compiled.cut(np.array(lengths, np.int32), np.array(document_index), seq_length, extra, rows)
    else:
        cut_stream_plain(lengths, document_index, seq_length, extra, rows)
    if partial:  # it ends where the last sequence that holds a token does
        filled = np.flatnonzero(lengths[document_index[rows[-1, 0] :]])
        position = int(rows[-1, 0]) + int(filled[-1])
        index[-1] = position, int(lengths[document_index[position]]) - extra
    return index


def cut_stream_plain(
    lengths: NDArray[np.int32],
    document_index: NDArray[np.int32],
    seq_length: int,
    extra: int,
    rows: NDArray[np.integer],
) -> None:
    """Does what `compiled.cut_stream` does, without a loop."""
    sizes = lengths[document_index]
    ends = np.cumsum(sizes, dtype=np.int64)  # stream position after each sequence
    reached = (ends - extra) // seq_length  # samples that end in or before each sequence
    np.clip(reached, 0, len(rows) - 1, out=reached)
    ending = np.diff(reached, prepend=0)  # samples that end in each sequence
    positions = np.repeat(np.arange(len(ending), dtype=rows.dtype), ending)
    starts = np.arange(1, len(rows), dtype=np.int64) * seq_length  # begins of samples 1 and on
    rows[1:, 0] = positions
    rows[1:, 1] = starts - (ends - sizes)[positions]


def build_shuffle_index(
    num_samples: int, plan: EpochPlan, random: np.random.RandomState
) -> NDArray[np.integer]:
    """Returns the order of the samples, (num_samples,) of uint32 (int64 from 2^32 - 2 on)."""
    dtype = np.uint32 if num_samples < np.iinfo(np.uint32).max - 1 else np.int64
    cut = plan.samples_before_final_epoch if plan.separate_final_epoch else num_samples
    head = np.arange(0, cut, dtype=dtype)
    random.shuffle(head)
    if not plan.separate_final_epoch:
        return head
    tail = np.arange(cut, num_samples, dtype=dtype)
    random.shuffle(tail)
    return np.concatenate([head, tail])
