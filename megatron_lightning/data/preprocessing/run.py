"""Preprocessing as a whole: sources in, a corpus with its data card out."""

import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal, TextIO

from megatron_lightning.data.card import DataCard
from megatron_lightning.data.indexed import best_dtype
from megatron_lightning.data.preprocessing.dataset_sources import StreamedSource
from megatron_lightning.data.preprocessing.describe import Describing
from megatron_lightning.data.preprocessing.encode import BlockEncoder, Encoded, Job
from megatron_lightning.data.preprocessing.files import Source
from megatron_lightning.data.preprocessing.options import PreprocessOptions
from megatron_lightning.data.preprocessing.parts import Parts, common_arguments
from megatron_lightning.data.preprocessing.progress import Progress
from megatron_lightning.data.preprocessing.sources import PART_BYTES, Stretch, cut, open_files
from megatron_lightning.data.preprocessing.workers import Workers
from megatron_lightning.data.preprocessing.writer import (
    CorporaWriter,
    Counts,
    blank_card,
    prefixes,
    write_skipped,
)
from megatron_lightning.data.tokenizer import Tokenizer, load_tokenizer

_NAMED_SKIPS = 20  # bad records that are shown one by one


def preprocess(
    sources: Sequence[Source],
    output_prefix: str | os.PathLike[str],
    tokenizer: Tokenizer | str | os.PathLike[str],
    options: PreprocessOptions | None = None,
    *,
    log: TextIO | None = None,
) -> list[DataCard]:
    """Writes `output_prefix.bin`, `.idx` and `.card.json`; for several fields one of each a field.

    The corpus does not depend on the number of workers or parts. It appears complete or not at
    all; of a run in several parts, those that were finished stay in `output_prefix.parts` when it
    fails, for `resume`.

    Args:
        sources: what `open_files` and `open_dataset` return, read in order.
        output_prefix: path of the corpus without suffix; an existing one is replaced.
        tokenizer: the tokenizer, or what `load_tokenizer` takes.
        options: how texts become a corpus; None means the defaults.
        log: where progress and skipped records are shown; None means nowhere.

    Returns:
        The data card of each field, with all counts; of a single part (`options.partition`) none.

    Raises:
        ValueError: bad arguments, a bad record (named with file and line), or no document at all.
        RuntimeError: a worker died.
    """
    run = _Run(sources, output_prefix, tokenizer, options or PreprocessOptions(), log)
    return run.run()


def preprocess_jsonl(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    output_prefix: str | os.PathLike[str],
    tokenizer: Tokenizer | str | os.PathLike[str],
    *,
    json_key: str = "text",
    append_eod: bool = True,
    workers: int = 1,
    on_bad_line: Literal["fail", "skip"] = "fail",
) -> DataCard:
    """Writes a corpus for language models from files of JSON lines: `preprocess` for the common
    case, with an end-of-document token after each document.

    Args:
        inputs: the files, read in order.
        output_prefix: path of the corpus without suffix; an existing one is replaced.
        tokenizer: the tokenizer, or what `load_tokenizer` takes.
        json_key: key of the text in each line's object.
        append_eod: end each document that is not empty with the end-of-document token.
        workers: processes that tokenize.
        on_bad_line: "fail" stops at a line without readable text, "skip" leaves it out and counts
            it. Blank lines are passed over.

    Returns:
        The data card, which holds all counts.

    Raises:
        ValueError: a bad line (named with file and number), a bad argument, or no document at all.
        FileNotFoundError: an input file is missing.
    """
    options = PreprocessOptions(
        fields=(json_key,), append_eod=append_eod, workers=workers, on_bad_line=on_bad_line
    )
    paths = [inputs] if isinstance(inputs, (str, os.PathLike)) else list(inputs)
    return preprocess(
        open_files(paths, "jsonl", options.fields), output_prefix, tokenizer, options
    )[0]


class _Run:
    """One call of `preprocess`."""

    def __init__(
        self,
        sources: Sequence[Source],
        output_prefix: str | os.PathLike[str],
        tokenizer: Tokenizer | str | os.PathLike[str],
        options: PreprocessOptions,
        log: TextIO | None,
    ) -> None:
        self._sources, self._prefix, self._options = sources, output_prefix, options
        self._cuts = self._checked_cuts()
        self._tokenizer = (
            load_tokenizer(tokenizer) if isinstance(tokenizer, (str, os.PathLike)) else tokenizer
        )
        self._dtype = best_dtype(self._tokenizer.vocab_size)
        arguments = common_arguments(self._tokenizer, options, sources, self._dtype.name)
        self._parts = Parts(output_prefix, len(self._cuts), sources, arguments)
        wanted = range(len(self._cuts)) if options.partition is None else [options.partition]
        self._wanted = list(wanted)
        total = sum(s.end - s.begin for part in self._wanted for s in self._cuts[part])
        self._progress = Progress(total, log)

    def _checked_cuts(self) -> list[list[Stretch]]:
        errors = self._options.problems()
        if not self._sources:
            errors.append("sources is empty: name at least one input")
        if errors:
            raise ValueError("; ".join(errors))
        total = sum(source.size for source in self._sources)
        count = self._options.partitions
        if any(isinstance(source, StreamedSource) for source in self._sources):
            if count is not None and count > 1:
                raise ValueError(f"partitions={count}: a streamed data set cannot be cut")
            count = 1
        return cut(self._sources, count or max(1, -(-total // PART_BYTES)))

    def run(self) -> list[DataCard]:
        """Processes what was asked for."""
        if self._options.merge:
            return self._merge()
        if len(self._cuts) == 1 and self._options.partition is None:
            return self._whole()
        if not self._options.resume and self._options.partition is None:
            self._parts.refuse_others()
        todo = [part for part in self._wanted if not self._is_finished(part)]
        with self._workers() as workers:
            for part in todo:
                self._make_part(workers, part)
        self._progress.clear()
        return [] if self._options.partition is not None else self._merge()

    def _workers(self) -> Workers[Job, Encoded]:
        encoder = partial(BlockEncoder, self._tokenizer, self._options, self._dtype)
        return Workers(encoder, self._options.workers)

    def _whole(self) -> list[DataCard]:
        """Processes everything in one go."""
        skipped: list[str] = []
        with self._workers() as workers, self._writer(self._prefix) as writer:
            describing = Describing(self._sources)
            self._process(workers, self._cuts[0], writer, skipped)
            self._progress.clear()
            return self._finish(writer, describing, skipped)

    def _make_part(self, workers: Workers[Job, Encoded], part: int) -> None:
        skipped: list[str] = []
        self._parts.discard(part)
        with self._writer(self._parts.prefix(part)) as writer:
            self._process(workers, self._cuts[part], writer, skipped)
            writer.finish(None)
        self._parts.write(part, self._cuts[part], writer.counts, skipped)

    def _is_finished(self, part: int) -> bool:
        """Whether a part is there from an earlier run and can be used."""
        if not self._options.resume:
            return False
        record = self._parts.read(part)
        if record is None:
            return False
        pairs = prefixes(self._parts.prefix(part), self._options)
        wrong = self._parts.whats_wrong(part, record, self._cuts[part], pairs)
        name = f"part {part} of {len(self._cuts)}"
        if wrong is not None:
            self._progress.say(f"{name} is made again: {wrong}")
            return False
        self._progress.say(f"{name} is there")
        self._progress.reuse(sum(s.end - s.begin for s in self._cuts[part]))
        return True

    def _merge(self) -> list[DataCard]:
        """Puts the finished parts together."""
        if missing := self._parts.missing():
            raise ValueError(
                f"{self._parts.folder} lacks the parts {', '.join(map(str, missing[:20]))} of "
                f"{len(self._cuts)}: make them with partition, or resume"
            )
        describing = Describing(self._sources)
        skipped: list[str] = []
        with self._writer(self._prefix) as writer:
            for part in range(len(self._cuts)):
                record = self._parts.read(part)
                assert record is not None
                pairs = prefixes(self._parts.prefix(part), self._options)
                wrong = None
                if self._options.merge:  # else it was looked at before
                    wrong = self._parts.whats_wrong(part, record, self._cuts[part], pairs)
                if wrong is not None:
                    raise ValueError(
                        f"part {part} of {len(self._cuts)} cannot be used: {wrong}; make it again"
                    )
                for number, pair in enumerate(pairs):
                    writer.copy(number, pair, Counts(**record.counts[number]))
                skipped += record.skipped
            cards = self._finish(writer, describing, skipped)
        self._parts.remove()
        return cards

    def _writer(self, prefix: str | os.PathLike[str]) -> CorporaWriter:
        return CorporaWriter(prefixes(prefix, self._options), self._dtype)

    def _process(
        self,
        workers: Workers[Job, Encoded],
        stretches: Sequence[Stretch],
        writer: CorporaWriter,
        skipped: list[str],
    ) -> None:
        """Reads, tokenizes and writes some stretches of the sources."""
        progress = self._progress
        for encoded in workers.map(self._jobs(stretches)):
            for number, reason in encoded.complaints:
                self._complain(encoded, number, reason, skipped)
            writer.add(encoded.fields)
            progress.documents += len(encoded.fields[0].sequences) // 8
            progress.tokens += sum(len(field.tokens) for field in encoded.fields) // (
                self._dtype.itemsize
            )
            progress.show()

    def _jobs(self, stretches: Sequence[Stretch]) -> Iterator[Job]:
        progress = self._progress
        for source, begin, end in stretches:
            before = progress.done
            for block in self._sources[source].blocks(begin, end):
                yield Job(block, source, begin)
                progress.done = min(progress.done + block.length, before + end - begin)
            progress.done = before + end - begin

    def _complain(self, encoded: Encoded, number: int, reason: str, skipped: list[str]) -> None:
        place = self._sources[encoded.source].place(encoded.begin, number)
        text = f"{place}: {reason}"
        if self._options.on_bad_line == "fail":
            raise ValueError(f'{text}; on_bad_line="skip" leaves such lines out')
        skipped.append(text)
        self._progress.skipped += 1
        if self._progress.skipped <= _NAMED_SKIPS:
            self._progress.say(f"skipped {text}")
        if self._progress.skipped == _NAMED_SKIPS:
            self._progress.say(f"more are in {os.fspath(self._prefix)}.skipped.txt at the end")

    def _finish(
        self, writer: CorporaWriter, describing: "Describing", skipped: list[str]
    ) -> list[DataCard]:
        if writer.counts[0].documents == 0:
            names = ", ".join(source.name for source in self._sources)
            raise ValueError(f"no document in {names} ({len(skipped)} lines skipped)")
        sources = describing.result()
        cards = [
            blank_card(
                self._tokenizer,
                self._options,
                field,
                self._dtype,
                sources=sources,
                skipped=len(skipped),
            )
            for field in self._options.fields
        ]
        finished = writer.finish(cards)
        write_skipped(self._prefix, skipped)
        return finished
