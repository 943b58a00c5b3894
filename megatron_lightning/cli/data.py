"""`megatron-lightning data ACTION`: look into corpora, merge and cut them. What is written appears
complete or not at all.
"""

import dataclasses
import json
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import NamedTuple

from megatron_lightning.cli.errors import Parser, UserError, wrong_input


class Action(NamedTuple):
    """What can be done to a corpus."""

    run: Callable[[list[str]], None]
    summary: str


def main(arguments: list[str]) -> None:
    """Do what the first argument says."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(_help())
        return
    name = arguments[0] if arguments else ""
    if name not in ACTIONS:
        raise UserError(
            f"{name!r} is no action; choose one of {', '.join(ACTIONS)}\n"
            "`megatron-lightning data --help` lists the options"
        )
    ACTIONS[name].run(arguments[1:])


def show(rows: list[tuple[str, str]]) -> None:
    """Print names and texts as two columns."""
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name:<{width}}  {text}" for name, text in rows))


def _info(arguments: list[str]) -> None:
    parser = Parser("data info", "Say what is in corpora.")
    add = parser.add_argument
    add("prefixes", nargs="+", metavar="PREFIX", help="path or URL of a pair without suffix")
    add("--json", action="store_true", help="print JSON, one object a line")
    add("--verify", action="store_true", help="read everything, compare with the card's digests")
    options = parser.parse_args(arguments)
    from megatron_lightning.data.indexed import check_digests, corpus_info

    for number, prefix in enumerate(options.prefixes):
        with wrong_input():
            info = corpus_info(prefix)
            if options.verify:
                check_digests(prefix)
        if options.json:
            print(json.dumps(dataclasses.asdict(info)))
            continue
        if number:
            print()
        verified = [("verified", "both files have the digests of the data card")]
        show(info.rows() + (verified if options.verify else []))


def _merge(arguments: list[str]) -> None:
    parser = Parser("data merge", "Write the documents of several corpora, in order, as one.")
    add = parser.add_argument
    add("prefixes", nargs="+", metavar="PREFIX", help="path or URL of a pair without suffix")
    add(
        "--output-prefix",
        required=True,
        metavar="PATH",
        help="path of the merged corpus without suffix; an existing one is replaced",
    )
    options = parser.parse_args(arguments)
    from megatron_lightning.data.indexed import corpus_info, merge

    with wrong_input():
        merge(options.prefixes, options.output_prefix)
        show(corpus_info(options.output_prefix).rows())


def _split(arguments: list[str]) -> None:
    parser = Parser("data split", "Cut a corpus into runs of consecutive documents.")
    add = parser.add_argument
    add("prefix", metavar="PREFIX", help="path or URL of a pair without suffix")
    add(
        "--output-prefix",
        required=True,
        metavar="PATH",
        help="path of the parts; -00000, -00001, ... is added; existing ones are replaced",
    )
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--documents", type=int, metavar="N", help="documents in each part")
    how.add_argument(
        "--shares", type=_shares, metavar="A,B,...", help="share of the documents of each part"
    )
    options = parser.parse_args(arguments)
    from megatron_lightning.data.indexed import corpus_info, split_documents

    with wrong_input():
        parts = split_documents(
            options.prefix,
            options.output_prefix,
            documents=options.documents,
            shares=options.shares,
        )
        infos = [corpus_info(part) for part in parts]
    show([(i.prefix, f"{i.documents:,} documents, {i.tokens:,} tokens") for i in infos])


def _shares(text: str) -> list[float]:
    try:
        return [float(word) for word in re.split(r"[,:]", text)]
    except ValueError:
        raise ArgumentTypeError(f"{text!r} must be numbers with commas, such as 98,1,1") from None


ACTIONS = {
    "info": Action(_info, "say what is in corpora"),
    "merge": Action(_merge, "write the documents of several corpora as one"),
    "split": Action(_split, "cut a corpus by documents or shares"),
}


def _help() -> str:
    width = max(map(len, ACTIONS))
    return "\n".join(
        [
            "usage: megatron-lightning data ACTION [options]",
            "",
            "Look into corpora (.bin/.idx pairs), merge and cut them.",
            "",
            "actions:",
            *(f"  {name:<{width}}  {action.summary}" for name, action in ACTIONS.items()),
            "",
            "`megatron-lightning data ACTION --help` lists an action's options.",
        ]
    )
