"""The options of `megatron-lightning preprocess`, named as Megatron's where it has them."""

import argparse
import re
from argparse import Namespace
from pathlib import Path

from megatron_lightning.cli.errors import Parser, UserError

_DATASET_OPTIONS = ("dataset_config", "dataset_split", "dataset_revision", "streaming")


def parse(arguments: list[str]) -> Namespace:
    """Parse and check; everything that is wrong is reported at once.

    `partition` and `partitions` of the result are two integers or None.
    """
    options = _parser().parse_args(arguments)
    if problems := _input_problems(options) + _tokenizer_problems(options) + _partition(options):
        raise UserError("\n".join(problems))
    options.dataset_split = options.dataset_split or "train"
    return options


def _input_problems(options: Namespace) -> list[str]:
    if options.dataset is not None:
        return ["FILE, --dataset: give one of them"] if options.inputs else []
    problems = [
        f"--{name.replace('_', '-')}: belongs to --dataset"
        for name in _DATASET_OPTIONS
        if getattr(options, name)
    ]
    if not options.inputs:
        return [*problems, "name an input: files, or a data set with --dataset"]
    from megatron_lightning.data.preprocessing.sources import find_files

    for pattern in options.inputs:
        try:
            find_files([pattern])
        except FileNotFoundError:
            problems.append(f"{pattern}: there is no such file")
    return problems


def _tokenizer_problems(options: Namespace) -> list[str]:
    problems = []
    if options.tokenizer is not None and options.save_tokenizer is not None:
        problems.append("--save-tokenizer: belongs to --train-tokenizer; leave it out")
    if options.train_tokenizer is not None and options.vocab_size is None:
        problems.append("--train-tokenizer: needs the number of ids, such as --vocab-size 32000")
    if options.tokenizer is not None and options.vocab_size is not None:
        problems.append("--vocab-size: belongs to --train-tokenizer; a given tokenizer has its own")
    if options.train_tokenizer is not None and (options.partition or options.merge):
        problems.append(
            "--train-tokenizer: all parts need the same tokenizer; train it first and give its "
            "file with --tokenizer"
        )
    return problems


def _partition(options: Namespace) -> list[str]:
    """Turns "i/n" into two numbers."""
    if options.partition is None:
        return []
    match = re.fullmatch(r"(\d+)/(\d+)", options.partition)
    if match is None:
        return [f"--partition {options.partition}: give number and count, such as 0/4"]
    part, count = int(match[1]), int(match[2])
    if options.partitions not in (None, count):
        return [f"--partition {options.partition}: --partitions is {options.partitions}"]
    options.partition, options.partitions = part, count
    return []


def _parser() -> Parser:
    parser = Parser(
        "preprocess", "Text to an indexed corpus (.bin, .idx and a data card), tokenizer included."
    )
    _add_inputs(parser.add_argument_group("input"))
    _add_tokenizers(parser)
    _add_outputs(parser.add_argument_group("output"))
    _add_work(parser.add_argument_group("work"))
    return parser


def _add_inputs(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "inputs",
        nargs="*",
        metavar="FILE",
        help="files or quoted patterns: JSON lines, Parquet, plain text; .gz and .zst are unpacked",
    )
    add(
        "--input-format",
        choices=("auto", "jsonl", "parquet", "text", "text-lines"),
        default="auto",
        help="auto: .parquet is a table, .txt is one document, all else is JSON lines; text: a file"
        " is a document; text-lines: a line is one (default: auto)",
    )
    add("--dataset", metavar="NAME", help="a data set of the datasets library: folder or hub id")
    add("--dataset-config", metavar="NAME", help="configuration of the data set")
    add("--dataset-split", metavar="SPLIT", help="split of the data set (default: train)")
    add("--dataset-revision", metavar="REVISION", help="commit, tag or branch on the hub")
    add("--streaming", action="store_true", help="read the data set while it is downloaded")
    add(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="fields of the text, a.b for nested ones; several make a corpus each,"
        " PREFIX_KEY_document (default: text)",
    )
    add(
        "--on-bad-line",
        choices=("fail", "skip"),
        default="fail",
        help="what to do at a line without readable text; skipped ones are listed in"
        " PREFIX.skipped.txt (default: fail)",
    )


def _add_tokenizers(parser: Parser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--tokenizer",
        metavar="NAME",
        help='tokenizer.json, SentencePiece .model, .tiktoken, a folder, a hub id, "bytes"',
    )
    which.add_argument("--train-tokenizer", choices=("bpe",), help="train a byte-level BPE")
    add = parser.add_argument
    add("--vocab-size", type=int, metavar="N", help="ids of the trained tokenizer")
    add(
        "--save-tokenizer",
        type=Path,
        metavar="FILE",
        help="where the trained tokenizer goes (default: PREFIX.tokenizer.json)",
    )


def _add_outputs(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--output-prefix",
        type=Path,
        required=True,
        metavar="PREFIX",
        help="path of the corpus without suffix; an existing one is replaced",
    )
    add(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="end each document with the end-of-document token (default: no, as in Megatron)",
    )
    add(
        "--split-sentences",
        nargs="?",
        const="regex",
        default="whole",
        choices=("regex", "nltk"),
        help="a sequence a sentence, for BERT: by built-in rules (regex) or NLTK's Punkt model",
    )
    add("--lang", default="english", help="language of the Punkt model (default: english)")
    add("--keep-newlines", action="store_true", help="keep line breaks at the end of sentences")


def _add_work(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--workers", type=int, default=1, metavar="N", help="processes (default: 1)")
    add(
        "--partitions",
        type=int,
        metavar="N",
        help="process N parts one after the other and merge them (default: one for 2 GiB of input)",
    )
    add(
        "--partition",
        metavar="I/N",
        help="process part I of N only, I from 0, for example on a machine each; then --merge",
    )
    add("--merge", action="store_true", help="merge the --partitions N parts that are there")
    add("--resume", action="store_true", help="use the finished parts of an earlier run")
