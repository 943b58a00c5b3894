"""What can be chosen about preprocessing, and the checks that need no file."""

import dataclasses
from typing import Any, Literal, get_args

Sentences = Literal["whole", "regex", "nltk"]
OnBadLine = Literal["fail", "skip"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreprocessOptions:
    """How texts become a corpus. The defaults are those of Megatron's `preprocess_data.py`."""

    fields: tuple[str, ...] = ("text",)
    """Names of the texts in a record. A dot leads into a nested object, unless the record has a key
    with the dot in it. Several fields make a corpus each."""
    append_eod: bool = False
    """End each document that is not empty with the end-of-document token."""
    sentences: Sentences = "whole"
    """A document is one sequence ("whole"), or is split into a sequence a sentence by this
    package's rules ("regex") or by NLTK's Punkt model ("nltk")."""
    language: str = "english"
    """Language of the Punkt model."""
    keep_newlines: bool = False
    """Leave the line breaks at the end of a sentence in it."""
    on_bad_line: OnBadLine = "fail"
    """Stop at a line without readable text, or leave it out and count it."""
    workers: int = 1
    """Processes that tokenize; with 1 it is done in the calling process."""
    partitions: int | None = None
    """Parts in which the inputs are processed one after the other and then merged; None makes one
    for every 2 GiB of input."""
    partition: int | None = None
    """Process only this part, counted from 0, of `partitions`; for several machines."""
    merge: bool = False
    """Process nothing: merge the `partitions` that are there."""
    resume: bool = False
    """Use the finished parts of an earlier run."""

    def problems(self) -> list[str]:
        """Returns what is wrong with the values; an empty list when nothing is."""
        found = [
            f"{name}={value} must be at least 1"
            for name, value in (("workers", self.workers), ("partitions", self.partitions))
            if value is not None and value < 1
        ]
        for name, value, known in (
            ("sentences", self.sentences, Sentences),
            ("on_bad_line", self.on_bad_line, OnBadLine),
        ):
            if value not in get_args(known):
                names = " or ".join(f'"{choice}"' for choice in get_args(known))
                found.append(f'{name}="{value}" must be {names}')
        if not self.fields or not all(self.fields):
            found.append(f"fields={self.fields} must name at least one field of the records")
        if len(set(self.fields)) < len(self.fields):
            found.append(f"fields={self.fields} names a field twice")
        if len(self.fields) > 1 and any("/" in field for field in self.fields):
            found.append(f"fields={self.fields}: a name with / cannot be part of a file name")
        if self.keep_newlines and self.sentences == "whole":
            found.append("keep_newlines belongs to splitting into sentences: choose sentences too")
        return found + self._partition_problems()

    def _partition_problems(self) -> list[str]:
        found = []
        if self.partition is not None:
            if self.partitions is None:
                found.append(f"partition={self.partition} needs the number of partitions")
            elif not 0 <= self.partition < self.partitions:
                found.append(
                    f"partition={self.partition} of {self.partitions} must be between 0 and "
                    f"{self.partitions - 1}"
                )
            if self.merge:
                found.append("partition, merge: give one of them")
        if self.merge and self.partitions is None:
            found.append("merge needs the number of partitions")
        return found

    def record(self) -> dict[str, Any]:
        """Returns what determines the result, for data cards and for finished parts."""
        return {
            "fields": list(self.fields),
            "append_eod": self.append_eod,
            "sentences": self.sentences,
            "language": self.language if self.sentences == "nltk" else None,
            "keep_newlines": self.keep_newlines,
            "on_bad_line": self.on_bad_line,
        }
