"""Fine-tuning on packed chats in every layout equals one process: losses, norms, gradients,
weights, validation.
"""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lightning.config import ContextConfig
from megatron_lightning.data import SFTDataModule
from tests.harness import run_ranks_fresh
from tests.layout_runs import Run, assert_same_training, train

SEQ_LENGTH = 64


def write_chats(path: Path, count: int, seed: int) -> str:
    """Chats of one to three exchanges, of many lengths."""
    generator = torch.Generator().manual_seed(seed)

    def text(most: int) -> str:
        length = int(torch.randint(1, most, (), generator=generator))
        return bytes(torch.randint(97, 123, (length,), generator=generator).tolist()).decode()

    with path.open("w") as file:
        for number in range(count):
            turns = [
                {"from": speaker, "value": text(9)}
                for _ in range(1 + number % 3)
                for speaker in ("human", "gpt")
            ]
            file.write(json.dumps({"conversations": turns}) + "\n")
    return str(path)


TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}.{% endgeneration %}{% else %}{{ m.content }}.{% endif %}"
    "{% endfor %}"
)


def make_data(run: Run, micro_batch_size: int, **options: Any) -> SFTDataModule:
    folder = Path(tempfile.mkdtemp())
    (folder / "short.jinja").write_text(TEMPLATE)
    return SFTDataModule(
        write_chats(folder / "train.jsonl", 60, seed=1),
        SEQ_LENGTH,
        micro_batch_size,
        run.global_batch_size,
        tokenizer="bytes",
        valid=write_chats(folder / "valid.jsonl", 20, seed=2),
        chat_template=str(folder / "short.jinja"),
        **options,
    )


def packed_run(layout: dict[str, Any], micro_batch_size: int, **options: Any) -> Run:
    """Six steps: an epoch, whose last batch is not full, and the beginning of the next."""
    return Run(
        layout=layout,
        trainer=dict(check_val_every_n_epoch=None),
        steps=6,
        keep_gradients=(0, 1, 5),
        make_data=functools.partial(make_data, micro_batch_size=micro_batch_size, **options),
    )


@functools.cache
def single(**options: Any) -> dict[str, Any]:
    return run_ranks_fresh(train, 1, packed_run({}, 8, **options), timeout=200)[0]


def slow(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("ranks", "layout", "micro_batch_size"),
    [
        (2, dict(tensor_parallel_size=2, sequence_parallel=True), 2),
        (2, dict(context_parallel_size=2), 2),
        (2, dict(pipeline_parallel_size=2), 2),
        slow(2, dict(), 1),
        slow(2, dict(tensor_parallel_size=2), 8),
        slow(2, dict(context_parallel_size=2), 1),
        slow(2, dict(context_parallel_size=2, context=ContextConfig(form="all_to_all")), 8),
        slow(2, dict(pipeline_parallel_size=2), 1),
        slow(4, dict(pipeline_parallel_size=2, context_parallel_size=2), 2),
        slow(4, dict(tensor_parallel_size=2), 4),
    ],
)
def test_packed_chats(ranks: int, layout: dict[str, Any], micro_batch_size: int) -> None:
    run = packed_run(layout, micro_batch_size)
    assert_same_training(run_ranks_fresh(train, ranks, run, timeout=200), single())


@pytest.mark.parametrize(
    "options",
    [slow(dict(document_multiple=4)), slow(dict(packing="none")), slow(dict(packing="in_order"))],
)
def test_other_packings_over_context_ranks(options: dict[str, Any]) -> None:
    """Documents of a multiple of 2 x context_parallel_size tokens leave samples their length."""
    run = packed_run(dict(context_parallel_size=2), 4, **options)
    assert_same_training(run_ranks_fresh(train, 2, run, timeout=200), single(**options))
