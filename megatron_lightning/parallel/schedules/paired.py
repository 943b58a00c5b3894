"""1F1B whose steady state is pairs: the backward of one micro-batch beside the forward of another.

What one of the two waits for, as rows on their way to experts and back, is then hidden under the
other's computing. Megatron-Core's combined 1F1B and DeepSeek's DualPipe (arXiv 2412.19437, section
3.2.1) hide it so too.

A pair hands on both results when both are done. So a micro-batch moves by one stage a pair, in
either direction, and a rank runs more forwards ahead than in 1F1B, where it moves by two: of rank
r of P with V chunks, (V - 1) P + 2 (P - r) - 1 instead of P - r - 1 (V = 1) or (V - 1) P + 2 (P - r
- 1). That is the price in activations; without a pipeline there are two micro-batches instead of
one.
"""

from collections.abc import Sequence

from megatron_lightning.parallel.schedules.actions import Action, ActionLists, Kind


def side_by_side(
    order: Sequence[tuple[int, int]], pipeline_size: int, num_chunks: int, groups: Sequence[int]
) -> ActionLists:
    """Compute actions of all ranks for the forward order ``order`` of ``(micro_batch, chunk)``, in
    which ``groups`` of micro-batches run through a chunk together.
    """
    backward = [(m, num_chunks - 1 - c) for m, c in order]
    ahead = (num_chunks - 1) * max(groups)
    return tuple(
        _pairs(order, backward, warmup=ahead + 2 * (pipeline_size - rank) - 1)
        for rank in range(pipeline_size)
    )


def _pairs(
    forward: Sequence[tuple[int, int]], backward: Sequence[tuple[int, int]], warmup: int
) -> tuple[Action, ...]:
    warmup = min(warmup, len(forward))
    actions = [Action(Kind.F, m, c) for m, c in forward[:warmup]]
    for (fm, fc), (bm, bc) in zip(forward[warmup:], backward, strict=False):
        actions += [Action(Kind.B, bm, bc, beside_next=True), Action(Kind.F, fm, fc)]
    drained = len(forward) - warmup
    actions += [Action(Kind.B, m, c) for m, c in backward[drained:]]
    return tuple(actions)
