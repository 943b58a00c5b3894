"""Index arrays of GPT samples: Megatron-Core's order, bit for bit, as pure functions.

Sequences are tiled over as many epochs as the samples need and shuffled (document index); the
resulting token stream is cut into windows of `seq_length` tokens plus one for the shifted label
(sample index); the windows are shuffled again (shuffle index). One `numpy.random.RandomState` is
consumed in that order: document index first, then shuffle index. Integers only, and no Python loop:
window ends are found by bisection in the running sum of sequence lengths. Megatron's float32
rounding of the partial last sample is deliberately not reproduced.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


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
) -> NDArray[np.integer]:
    """Returns where each sample begins in the shuffled stream.

    Sample i reads from row i to row i + 1, and `extra` tokens more.

    Args:
        lengths: tokens in each sequence of the corpus.
        document_index: sequence numbers in stream order.
        seq_length: tokens a sample.
        extra: tokens that a sample shares with the next.
        drop_last: leave out a last sample that is shorter than the others.

    Returns:
        (samples + 1, 2): position in `document_index`, token offset in that sequence; int32 where
        it fits.
    """
    ends = np.cumsum(lengths[document_index], dtype=np.int64)  # stream position after each sequence
    total = int(ends[-1]) if len(ends) else 0
    usable = max(total - extra, 0)
    samples = usable // seq_length if drop_last else -(-usable // seq_length)
    # Sample i ends before this stream position; the sequence that reaches it also holds the next
    # begin.
    stops = np.minimum(np.arange(1, samples + 1, dtype=np.int64) * seq_length + extra, total)
    positions = np.searchsorted(ends, stops, side="left")
    begins = ends[positions] - lengths[document_index[positions]]
    longest = int(lengths.max()) if len(lengths) else 0
    fits = max(len(document_index), longest) < 2**31
    index = np.zeros((samples + 1, 2), dtype=np.int32 if fits else np.int64)
    index[1:, 0] = positions
    index[1:, 1] = stops - extra - begins
    return index


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
