"""`megatron-lightning preprocess`: raw text to an indexed corpus, with a tokenizer that is given
or trained on the same text.
"""

import signal
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_lightning.cli.errors import UserError, wrong_input
from megatron_lightning.cli.preprocess_options import parse

if TYPE_CHECKING:
    from megatron_lightning.data import DataCard, PreprocessOptions

_INTERRUPTED = 130  # as shells count it: 128 + SIGINT


def main(arguments: list[str]) -> None:
    """Write the corpus and print what is in it."""
    options = parse(arguments)
    from megatron_lightning.data import preprocess
    from megatron_lightning.utils.env import provide

    with _interruptible(), wrong_input():
        chosen = _preprocess_options(options)
        sources = _sources(options, chosen)
        tokenizer = options.tokenizer or _train_tokenizer(options, sources)
        provide(override=False, TOKENIZERS_PARALLELISM="false")  # said before workers are forked
        cards = preprocess(sources, options.output_prefix, tokenizer, chosen, log=sys.stderr)
    for card, prefix in zip(cards, _prefixes(options.output_prefix, chosen), strict=False):
        print(describe(card, prefix))
        if few := _without_validation(card, options):
            print(f"{'validation':<15} {few}")
    if not cards:
        print(f"{'part':<15} {options.partition} of {options.partitions} is finished")


def describe(card: "DataCard", prefix: str | Path) -> str:
    """The counts of a corpus as text, one a line."""
    end = card.eod_id if card.arguments["append_eod"] else "not appended (see --append-eod)"
    rows = {
        "corpus": f"{prefix}.bin, .idx",
        "documents": f"{card.documents:,} ({card.empty_documents:,} empty)",
        "sequences": f"{card.sequences:,}",
        "tokens": f"{card.tokens:,}, {card.dtype}, {card.bin_bytes:,} bytes",
        "lines skipped": f"{card.skipped_lines:,}",
        "tokenizer": f"{card.tokenizer}, {card.vocab_size:,} ids",
        "end of document": f"{end}",
    }
    return "\n".join(f"{name:<15} {text}" for name, text in rows.items())


def _without_validation(card: "DataCard", options: Namespace) -> str | None:
    """A hint where the usual split would leave nothing to validate on."""
    from megatron_lightning.data.splits import DEFAULT_SPLIT, split_ranges

    if not card.sequences or split_ranges(DEFAULT_SPLIT, card.sequences).valid:
        return None
    is_text = options.dataset is None and options.input_format in ("auto", "text")
    plain = is_text and any(".txt" in Path(name).suffixes for name in map(str, options.inputs))
    lines = "--input-format text-lines (a line is a document), " if plain else ""
    return (
        f"none: the default split {DEFAULT_SPLIT} gives it 0 of {card.sequences} sequences; use"
        f" {lines}valid_paths or another split"
    )


@contextmanager
def _interruptible() -> Iterator[None]:
    """Lets Ctrl-C and SIGTERM end the run the same way: files and workers are cleared away."""
    before = signal.signal(signal.SIGTERM, _raise_exit)
    try:
        yield
    except KeyboardInterrupt:
        print("megatron-lightning preprocess: interrupted", file=sys.stderr)
        sys.exit(_INTERRUPTED)
    finally:
        signal.signal(signal.SIGTERM, before)


def _raise_exit(number: int, frame: Any) -> None:
    sys.exit(128 + number)


def _preprocess_options(options: Namespace) -> "PreprocessOptions":
    from megatron_lightning.data import PreprocessOptions

    chosen = PreprocessOptions(
        fields=tuple(options.json_keys),
        append_eod=options.append_eod,
        sentences=options.split_sentences,
        language=options.lang,
        keep_newlines=options.keep_newlines,
        on_bad_line=options.on_bad_line,
        workers=options.workers,
        partitions=options.partitions,
        partition=options.partition,
        merge=options.merge,
        resume=options.resume,
    )
    if problems := chosen.problems():
        raise UserError("\n".join(problems))
    return chosen


def _sources(options: Namespace, chosen: "PreprocessOptions") -> list[Any]:
    from megatron_lightning.data import DatasetName, open_dataset, open_files

    if options.dataset is None:
        return open_files(options.inputs, options.input_format, chosen.fields)
    name = DatasetName(
        path=options.dataset,
        config=options.dataset_config,
        split=options.dataset_split,
        revision=options.dataset_revision,
        streaming=options.streaming,
    )
    return [open_dataset(name, chosen.fields)]


def _prefixes(prefix: Path, chosen: "PreprocessOptions") -> list[str]:
    from megatron_lightning.data.preprocessing.writer import prefixes

    return prefixes(prefix, chosen)


def _train_tokenizer(options: Namespace, sources: list[Any]) -> str:
    """Train on the texts of all inputs and return the tokenizer's file."""
    from megatron_lightning.data import train_byte_bpe
    from megatron_lightning.data.preprocessing.sources import texts

    path = options.save_tokenizer or Path(f"{options.output_prefix}.tokenizer.json")
    found = texts(sources, options.json_keys)
    tokenizer = train_byte_bpe(found, options.vocab_size, path)
    print(f"{'tokenizer':<15} trained: {tokenizer.vocab_size:,} ids, in {path}", flush=True)
    return tokenizer.name
