"""Finished parts of a corpus, for runs in several parts, on several machines, or resumed.

A part is a pair for each field in the folder `PREFIX.parts`, and a record (JSON) that says from
what and how it was made. The record is written last: without it there is no part.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_lightning import __version__
from megatron_lightning.data.indexed import bin_path, idx_path
from megatron_lightning.data.preprocessing.files import Source
from megatron_lightning.data.preprocessing.options import PreprocessOptions
from megatron_lightning.data.preprocessing.sources import Stretch
from megatron_lightning.data.preprocessing.writer import Counts
from megatron_lightning.data.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartRecord:
    """What is known of a finished part."""

    arguments: dict[str, Any]
    """What all parts of a corpus must have in common, see `common_arguments`."""
    stretches: list[list[Any]]
    """Of the input: source, begin, end and fingerprint of each."""
    counts: list[dict[str, Any]]
    """Of the pair of each field, see `Counts`."""
    skipped: list[str]
    """Bad records that were left out, by place."""


def common_arguments(
    tokenizer: Tokenizer,
    options: PreprocessOptions,
    sources: Sequence[Source],
    dtype: str,
) -> dict[str, Any]:
    """Returns what determines the corpus apart from the content of the sources."""
    return options.record() | {
        "tokenizer_digest": tokenizer.digest,
        "eod_id": tokenizer.eod_id,
        "dtype": dtype,
        "sources": [source.name for source in sources],
        "package_version": __version__,
    }


class Parts:
    """The folder of parts of one corpus.

    Args:
        prefix: path of the corpus without suffix.
        count: number of parts.
        sources: the inputs.
        arguments: what the parts have in common.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        count: int,
        sources: Sequence[Source],
        arguments: dict[str, Any],
    ) -> None:
        self.folder = Path(f"{os.fspath(prefix)}.parts")
        self._count, self._sources, self._arguments = count, sources, arguments

    def prefix(self, part: int) -> Path:
        """Returns the path of a part without field and suffix."""
        return self.folder / f"{part:05d}-of-{self._count:05d}"

    def remove(self) -> None:
        """Removes the folder with all parts."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def refuse_others(self) -> None:
        """Refuses to begin anew where there are finished parts, which may have taken days.

        Raises:
            ValueError: there are some.
        """
        if any(self.folder.glob("*.json")):
            raise ValueError(
                f"{self.folder} holds finished parts of an earlier run: use them with resume or "
                "merge, or delete the folder"
            )
        self.remove()

    def discard(self, part: int) -> None:
        """Removes the record of a part, which is made anew."""
        self._record_path(part).unlink(missing_ok=True)

    def write(
        self, part: int, stretches: Sequence[Stretch], counts: Sequence[Counts], skipped: list[str]
    ) -> None:
        """Records a finished part."""
        record = PartRecord(
            arguments=self._arguments,
            stretches=[self._identify(stretch) for stretch in stretches],
            counts=[dataclasses.asdict(entry) for entry in counts],
            skipped=skipped,
        )
        path = self._record_path(part)
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        partial.write_text(json.dumps(dataclasses.asdict(record)) + "\n", encoding="utf-8")
        partial.replace(path)

    def read(self, part: int) -> PartRecord | None:
        """Returns the record of a part, None when it is not finished.

        Raises:
            ValueError: it is no record, or says that the part was made with other arguments.
        """
        path = self._record_path(part)
        if not path.is_file():
            return None
        try:
            record = PartRecord(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is no record of a part ({error}): delete it") from error
        for name, value in self._arguments.items():
            made = record.arguments.get(name)
            if made != value:
                raise ValueError(
                    f"{path}: this part was made with {name}={made!r}, now it is {value!r}: give "
                    f"the same, or delete {self.folder} to begin anew"
                )
        return record

    def whats_wrong(
        self, part: int, record: PartRecord, stretches: Sequence[Stretch], pairs: Sequence[str]
    ) -> str | None:
        """Returns why a finished part cannot be used: its input or its files have changed; None
        when it can.
        """
        if [entry[:3] for entry in record.stretches] != [
            [self._sources[s.source].name, s.begin, s.end] for s in stretches
        ]:
            return "the inputs have other sizes"
        for stretch, entry in zip(stretches, record.stretches, strict=True):
            if self._identify(stretch) != entry:
                return f"{self._sources[stretch.source].name} has changed"
        for pair, counts in zip(pairs, record.counts, strict=True):
            for path, size in (
                (bin_path(pair), counts["bin_bytes"]),
                (idx_path(pair), counts["idx_bytes"]),
            ):
                if not path.is_file() or path.stat().st_size != size:
                    return f"{path} is missing or incomplete"
        return None

    def missing(self) -> list[int]:
        """Returns the parts that are not finished."""
        return [part for part in range(self._count) if not self._record_path(part).is_file()]

    def _record_path(self, part: int) -> Path:
        return Path(f"{self.prefix(part)}.json")

    def _identify(self, stretch: Stretch) -> list[Any]:
        source = self._sources[stretch.source]
        fingerprint = source.fingerprint(stretch.begin, stretch.end)
        return [source.name, stretch.begin, stretch.end, fingerprint]
