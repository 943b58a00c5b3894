"""`megatron-lightning preprocess`: JSON lines to an indexed corpus, with a tokenizer that is given
or trained on the same text.
"""

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_lightning.cli.errors import Parser, UserError, wrong_input

if TYPE_CHECKING:
    from megatron_lightning.data import DataCard


def main(arguments: list[str]) -> None:
    """Write the corpus and print what is in it."""
    options = _parser().parse_args(arguments)
    _check(options)
    from megatron_lightning.data import preprocess_jsonl

    with wrong_input():
        tokenizer = options.tokenizer or _train_tokenizer(options)
        card = preprocess_jsonl(
            options.inputs,
            options.output_prefix,
            tokenizer,
            json_key=options.json_key,
            append_eod=not options.no_eod,
            workers=options.workers,
            on_bad_line=options.on_bad_line,
        )
    print(describe(card, options.output_prefix))


def describe(card: "DataCard", prefix: Path) -> str:
    """The counts of a corpus as text, one a line."""
    rows = {
        "corpus": f"{prefix}.bin, .idx",
        "documents": f"{card.documents:,} ({card.empty_documents:,} empty)",
        "sequences": f"{card.sequences:,}",
        "tokens": f"{card.tokens:,}, {card.dtype}, {card.bin_bytes:,} bytes",
        "lines skipped": f"{card.skipped_lines:,}",
        "tokenizer": f"{card.tokenizer}, {card.vocab_size:,} ids, end of document {card.eod_id}",
    }
    return "\n".join(f"{name:<14} {text}" for name, text in rows.items())


def _check(options: Namespace) -> None:
    """Options that contradict each other or name missing files, all at once."""
    problems = [f"{path}: there is no such file" for path in options.inputs if not path.is_file()]
    if options.tokenizer is not None and options.save_tokenizer is not None:
        problems.append("--save-tokenizer: belongs to --train-tokenizer; leave it out")
    if options.train_tokenizer is not None and options.vocab_size is None:
        problems.append("--train-tokenizer: needs the number of ids, such as --vocab-size 32000")
    if options.tokenizer is not None and options.vocab_size is not None:
        problems.append("--vocab-size: belongs to --train-tokenizer; a given tokenizer has its own")
    if problems:
        raise UserError("\n".join(problems))


def _train_tokenizer(options: Namespace) -> str:
    """Train on the texts of all inputs and return the tokenizer's file."""
    from megatron_lightning.data import train_byte_bpe

    path = options.save_tokenizer or Path(f"{options.output_prefix}.tokenizer.json")
    texts = (text for file in options.inputs for text in _texts(file, options))
    tokenizer = train_byte_bpe(texts, options.vocab_size, path)
    print(f"{'tokenizer':<14} trained: {tokenizer.vocab_size:,} ids, in {path}", flush=True)
    return tokenizer.name


def _texts(path: Path, options: Namespace) -> Iterator[str]:
    """The texts of a file. What can't be read is left to the preprocessing, which names it."""
    with path.open("rb") as file:
        for line in file:
            try:
                text = json.loads(line)[options.json_key]
            except (ValueError, KeyError, TypeError):
                continue
            yield from (
                part
                for part in (text if isinstance(text, list) else [text])
                if isinstance(part, str)
            )


def _parser() -> Parser:
    parser = Parser("preprocess", "JSON lines to an indexed corpus (.bin, .idx and a data card).")
    add = parser.add_argument
    add("inputs", nargs="+", type=Path, metavar="FILE", help="JSON lines, one document a line")
    add(
        "--output-prefix",
        type=Path,
        required=True,
        metavar="PATH",
        help="path of the corpus without suffix; an existing one is replaced",
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--tokenizer", help='tokenizer.json, a folder with one, or "bytes"')
    which.add_argument("--train-tokenizer", choices=("bpe",), help="train a byte-level BPE")
    add("--vocab-size", type=int, metavar="N", help="ids of the trained tokenizer")
    add(
        "--save-tokenizer",
        type=Path,
        metavar="FILE",
        help="where the trained tokenizer goes (default: OUTPUT_PREFIX.tokenizer.json)",
    )
    add("--json-key", default="text", help="key of the text (default: text)")
    add("--no-eod", action="store_true", help="no end-of-document token after each document")
    add("--workers", type=int, default=1, metavar="N", help="processes (default: 1)")
    add(
        "--on-bad-line",
        choices=("fail", "skip"),
        default="fail",
        help="what to do at a line without readable text (default: fail)",
    )
    return parser
