"""Order and warm-up of the pipeline schedules against tables recorded from Megatron-Core."""

import json

from megatron_lightning.parallel.schedules.actions import Kind
from megatron_lightning.parallel.schedules.build import (
    interleaved_1f1b,
    interleaved_order,
    microbatch_groups,
    one_forward_one_backward,
)


def test_order_is_the_recorded_table(golden):
    for case in json.loads((golden / "data" / "schedules" / "interleaved_table.json").read_text()):
        chunks, m = case["num_model_chunks"], case["num_microbatches"]
        table = [tuple(entry) for entry in case["table"]]
        # A pipeline size of 2 lets the remainder of 2 stand, as the recorded table has it.
        groups = microbatch_groups(m, 2, case["group_size"])
        assert interleaved_order(groups, chunks) == table
        for actions in interleaved_1f1b(2, chunks, m, case["group_size"]):
            order = [(a.micro_batch, a.chunk) for a in actions if a.kind is Kind.F]
            assert order == table
            backward = [(a.micro_batch, a.chunk) for a in actions if a.kind is Kind.B]
            assert backward == [(i, chunks - 1 - c) for i, c in table]


def test_warmup_is_the_recorded_one(golden):
    """Forwards before the first backward: the recorded warm-up and, in the steady state, one."""
    for case in json.loads((golden / "data" / "schedules" / "pipeline_warmup.json").read_text()):
        p, v, m = case["pipeline_size"], case["num_model_chunks"], case["num_microbatches"]
        lists = interleaved_1f1b(p, v, m) if v > 1 else one_forward_one_backward(p, m)
        kinds = [a.kind for a in lists[case["pipeline_rank"]]]
        first_forwards = case["warmup"] + (case["remaining"] > 0)
        assert kinds[:first_forwards] == [Kind.F] * first_forwards
        assert kinds[first_forwards] is Kind.B
        assert kinds.count(Kind.F) == case["total"]
