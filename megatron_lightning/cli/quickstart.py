"""`megatron-lightning quickstart`: the whole way from text to text in a few minutes, no download.

The documentation that every Python ships becomes a tokenizer and a corpus; a small GPT trains on
it, with tensor and pipeline parallelism; its checkpoint is loaded in another layout, where the
validation loss must be the same; training goes on there; the loss curve is drawn and a prompt
continued. What happened is printed as one page and stands in `summary.json`.
"""

import json
import logging
import os
import shutil
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_lightning.cli.errors import Parser, UserError, run_command
from megatron_lightning.utils.wording import counted

if TYPE_CHECKING:
    from megatron_lightning.cli.quickstart_run import Settings

PROMPT = "The for statement is used to"
NEW_TOKENS = 48


def main(arguments: list[str]) -> None:
    """Run the quickstart with command-line `arguments`."""
    options = _parser().parse_args(arguments)
    _prepare_process()
    from megatron_lightning.cli import quickstart_run as run
    from megatron_lightning.cli.quickstart_page import page

    settings = _settings(options)
    _clear(settings)
    if options.prepare_only:
        card = run.prepare(settings)
        print(f"{settings.corpus}: {card.documents} documents, {card.tokens} tokens")
        return
    summary = quickstart(settings)
    path = settings.output / "summary.json"
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print(page(summary, settings.output))


def quickstart(settings: "Settings") -> dict[str, Any]:
    """Everything from text to text; returns the contents of `summary.json`.

    Raises RuntimeError when the checkpoint gives another loss in the other layout, or when
    training did not lower the loss.
    """
    from megatron_lightning.cli import quickstart_run as run
    from megatron_lightning.cli.generate import continue_text
    from megatron_lightning.cli.quickstart_page import draw, versions
    from megatron_lightning.models import Sampling

    first, second = run.LAYOUTS[settings.devices]
    clock = _Clock()
    with clock.part("data", "text, tokenizer, corpus"):
        card = run.prepare(settings)
    with clock.part("train", f"train steps 1 to {settings.first_steps} as {first}"):
        checkpoint = run.train(settings, first, "first")
        before_resume = run.recorded(settings, first, "first")
    with clock.part("validate", f"load the checkpoint as {second}"):
        after = run.validate(settings, second, checkpoint)
        _compare(before_resume.validation[-1][1], after, settings.resume_tolerance)
    with clock.part("resume", f"train on to step {settings.steps} as {second}"):
        last = run.train(settings, second, "resumed", resume=checkpoint)
        resumed = run.recorded(settings, second, "resumed")
        joint = (settings.first_steps, after)
        resumed = replace(resumed, validation=[joint, *resumed.validation])
    with clock.part("generate", "continue a prompt"):
        continuation = continue_text(
            last,
            settings.tokenizer,
            PROMPT,
            max_new_tokens=NEW_TOKENS,
            sampling=Sampling(temperature=0.7, top_k=20),
            seed=settings.seed,
        )
    with clock.part("plot", "draw the loss curve"):
        draw(settings, [before_resume, resumed])
    losses = before_resume.validation[0][1], resumed.validation[-1][1]
    if not losses[1] < losses[0]:
        raise RuntimeError(f"the validation loss did not fall: {losses[0]:.4f} to {losses[1]:.4f}")
    return {
        "validation_loss_first": losses[0],
        "validation_loss_last": losses[1],
        "validation_loss_before_resume": before_resume.validation[-1][1],
        "validation_loss_after_resume": after,
        "layouts": {"first": asdict(first), "resumed": asdict(second)},
        "accelerator": settings.accelerator,
        "precision": settings.precision,
        "steps": {"first": settings.first_steps, "total": settings.steps},
        "checkpoint": str(checkpoint),
        "checkpoint_last": str(last),
        "prompt": PROMPT,
        "continuation": continuation,
        "seconds": clock.seconds(),
        "model_parameters": run.build_model(settings).config.num_parameters(),
        "corpus_tokens": card.tokens,
        "seed": settings.seed,
        "versions": versions(),
    }


class _Clock:
    """Says which part begins, and keeps the seconds of each."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._parts: dict[str, float] = {}

    @contextmanager
    def part(self, name: str, title: str) -> Iterator[None]:
        """Time what happens inside."""
        # Flushed, or every forked rank would print it once more.
        print(f"[{len(self._parts) + 1}/6] {title}", flush=True)
        begin = time.monotonic()
        yield
        self._parts[name] = time.monotonic() - begin

    def seconds(self) -> dict[str, float]:
        """Seconds of each part, and in all, importing the packages not counted."""
        parts = {**self._parts, "total": time.monotonic() - self._begin}
        return {name: round(value, 2) for name, value in parts.items()}


def _compare(before: float, after: float, tolerance: float) -> None:
    print(f"  validation loss {before:.6f} when saved, {after:.6f} when loaded", flush=True)
    if not abs(before - after) <= tolerance:
        raise RuntimeError(
            f"the checkpoint's validation loss is {before:.6f} in the layout that saved it and"
            f" {after:.6f} in the other one: more than {tolerance:g} apart"
        )


def _prepare_process() -> None:
    """One thread and few messages, before torch and tokenizers are imported and ranks forked."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # look for GPUs without touching them
    import lightning  # noqa: F401 (it sets the levels of its loggers when it is imported)
    import torch

    torch.set_num_threads(1)
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\.")


def _settings(options: Namespace) -> "Settings":
    """The options, completed by what the machine has."""
    from megatron_lightning.cli import quickstart_run as run

    if options.steps < run.STEPS_UNIT or options.steps % run.STEPS_UNIT:
        raise UserError(
            f"--steps={options.steps}: give a multiple of {run.STEPS_UNIT}, such as"
            f" {max(options.steps // run.STEPS_UNIT, 1) * run.STEPS_UNIT}"
        )
    gpus = run.count_gpus()
    accelerator = options.accelerator
    if accelerator == "auto":
        accelerator = "gpu" if gpus else "cpu"
    if accelerator == "gpu" and gpus < (options.devices or 1):
        raise UserError(
            f"--devices={options.devices or 1}: this machine has {counted(gpus, 'GPU')};"
            f" give {'fewer devices, or ' if gpus else ''}--accelerator cpu"
        )
    most = gpus if accelerator == "gpu" else 4
    devices = options.devices or max(number for number in run.LAYOUTS if number <= most)
    return run.Settings(
        output=options.output,
        steps=options.steps,
        seed=options.seed,
        accelerator=accelerator,
        devices=devices,
    )


def _clear(settings: "Settings") -> None:
    """Remove what an earlier quickstart left; other people's files are not touched."""
    old = [settings.output / "checkpoints", *settings.output.glob("losses-*.jsonl")]
    if not any(path.exists() for path in old):
        return
    if not settings.corpus.with_suffix(".card.json").is_file():
        raise UserError(
            f"--output={settings.output}: has a folder 'checkpoints' that no quickstart made;"
            " choose another folder"
        )
    for path in old:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _parser() -> Parser:
    parser = Parser("quickstart", "Train, resume in another layout and generate, without download.")
    add = parser.add_argument
    add(
        "--output",
        type=Path,
        default=Path("runs/quickstart"),
        metavar="FOLDER",
        help="where everything is left (default: runs/quickstart)",
    )
    add(
        "--steps",
        type=int,
        default=120,
        metavar="N",
        help="optimizer steps, a multiple of 10 (default: 120)",
    )
    add(
        "--devices",
        type=int,
        choices=(1, 2, 4, 8),
        help="ranks of the first part (default: the GPUs that there are, else 4 on the CPU)",
    )
    add("--accelerator", choices=("auto", "cpu", "gpu"), default="auto", help="default: auto")
    add("--seed", type=int, default=1234, help="of weights, samples and text (default: 1234)")
    add(
        "--prepare-only",
        action="store_true",
        help="make tokenizer and corpus only, for examples/quickstart.yaml",
    )
    return parser


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:], "quickstart"))
