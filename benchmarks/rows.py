"""The rows in which this package is measured beside Megatron-Core: options of both, and what was
published of the other.
"""

from dataclasses import dataclass
from typing import Any

MANY_LAUNCHES = "CUDA_DEVICE_MAX_CONNECTIONS=32 NVTE_USE_CUTLASS_GROUPED_GEMM=1"
"""What makes the peer fast at a mixture of experts."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison: same shape, layout and policy of precision on both sides."""

    title: str
    """For tables and the chart."""
    ours: str
    """Options of `train_step.py` beyond `--compile`."""
    peer: str = ""
    """What the peer's command takes after `--configs`."""
    environment: str = ""
    """Of the peer's command: NAME=VALUE, separated by spaces."""
    gpus: int = 1
    """Of one host."""
    rate: int = 0
    """Published: the peer's tokens a second a GPU on another machine of the kind."""
    memory: float = 0.0
    """Published: the largest of the peer's GPUs, GiB."""
    wanted: float = 0.0
    """Ratio to reach, best of the back ends."""
    least: float = 0.0
    """Ratio to reach by torch and Triton alone."""
    of: str = ""
    """A row of this package that stands for the peer, where the peer has no such run."""


ROWS: dict[str, Row] = {
    "a": Row(
        title="(a) dense 1.1B, bf16",
        ours="--shapes a",
        peer="a_tece",
        rate=71033,
        memory=38.6,
        wanted=1.12,
        least=1.10,
    ),
    "a-fp8": Row(
        title="(a) FP8, all layers",
        ours="--shapes a --fp8 fp8_tensorwise --keep 0",
        peer="a_fp8",
        rate=78240,
        memory=41.4,
        wanted=1.15,
        least=1.08,
    ),
    "b": Row(
        title="(b) 8 layers of Llama-3-8B's width, bf16",
        ours="--shapes b",
        peer="b",
        rate=34636,
        memory=66.8,
        wanted=1.12,
        least=1.08,
    ),
    "b-fp8": Row(
        title="(b) FP8, all layers",
        ours="--shapes b --fp8 fp8_tensorwise --keep 0",
        peer="b_fp8",
        rate=43100,
        memory=68.6,
        wanted=1.10,
        least=1.03,
    ),
    "c": Row(
        title="(c) 128 experts of which 8, bf16",
        ours="--shapes c",
        peer="c",
        environment=MANY_LAUNCHES,
        rate=22902,
        memory=113.6,
        wanted=2.3,
        least=2.0,
    ),
    "c-forced": Row(
        title="(c) experts equally busy",
        ours="--shapes c --forced",
        peer="c_bal",
        environment=MANY_LAUNCHES,
        rate=23446,
        memory=113.6,
        wanted=2.3,
        least=2.0,
    ),
    "c-ep2-forced": Row(
        title="(c) EP=2, experts equally busy",
        ours="--shapes c --ep 2 --forced",
        peer="c_bal@ep=2",
        environment=MANY_LAUNCHES,
        gpus=2,
        rate=30389,
        memory=68.8,
        wanted=1.8,
        least=1.6,
    ),
    "c-ep2": Row(
        title="(c) EP=2, real routing",
        ours="--shapes c --ep 2",
        peer="c@ep=2",
        environment=MANY_LAUNCHES,
        gpus=2,
        rate=26406,
        memory=69.3,
        wanted=1.8,
        least=1.6,
    ),
    "a-pp2": Row(
        title="(a) PP=2, 8 micro-batches",
        ours="--shapes a --pp 2 --accumulate 8 --schedule zb-v --virtual 2"
        " --set recompute.mode=selective recompute.modules=['layers.[0-3].mlp.activation']"
        " pipeline.defer_head_gradient=False",
        peer="a@pp=2:gas=8",
        gpus=2,
        rate=60685,
        memory=28.5,
        wanted=1.15,
        least=1.12,
    ),
    "a-tp2": Row(
        title="(a) TP=2, sequence parallel, overlapped",
        ours="--shapes a --tp 2 --set runtime.overlap_tensor_parallel=None",
        peer="a@tp=2",
        gpus=2,
        rate=54595,
        memory=21.4,
        wanted=1.15,
        least=1.08,
    ),
    "a-dp2": Row(
        title="(a) DP=2, sharded optimizer",
        ours="--shapes a --sharding optimizer",
        peer="a",
        gpus=2,
        rate=69380,
        memory=36.4,
        wanted=1.10,
        least=1.08,
    ),
    "a-cp2": Row(
        title="(a) CP=2, 32,768 tokens",
        ours=(
            "--shapes a --cp 2 --seq 32768 --micro 1 --context all_to_all --sharding optimizer"
            " --set context.peer_memory=True"
        ),
        peer="a@cp=2:seq=32768:mb=1",
        gpus=2,
        rate=33474,
        memory=36.4,
        wanted=1.08,
        least=1.03,
    ),
    "a-packed": Row(
        title="(a) packed documents, of the dense rate",
        ours="--shapes a --packed",
        of="a",
        wanted=0.9,
        least=0.75,
    ),
}


def row_of(run: dict[str, Any]) -> str | None:
    """Name of the row that a result of `train_step.py` belongs to; None: of no row."""
    if run.get("backend", "torch") != "torch":
        return None  # the rows are those of torch and Triton alone
    if run.get("mirror"):
        return None  # nothing was communicated
    sizes = {name: run.get(name, 1) for name in ("tp", "pp", "ep", "cp")}
    apart = [f"{name}{size}" for name, size in sizes.items() if size > 1]
    devices = run.get("devices", 1)
    if not apart and devices > 1:
        apart = [f"dp{devices}"]
    parts = [run["shape"], *apart]
    if run.get("fp8"):
        parts.append("fp8")
    if run.get("forced"):
        parts.append("forced")
    if run.get("packed"):
        parts.append("packed")
    name = "-".join(parts)
    return name if name in ROWS and _same_options(ROWS[name], run) else None


def _same_options(row: Row, run: dict[str, Any]) -> bool:
    """Whether a result was measured with the row's batch, and over data ranks with its sharding."""
    words = row.ours.split()
    given = dict(zip(words, words[1:], strict=False))
    batch = ("seq", "micro", "accumulate")
    for option in batch if "--cp" in given else (*batch, "sharding"):
        value = given.get(f"--{option}")
        if value is not None and option in run and str(run[option]) != value:
            return False
    return True
