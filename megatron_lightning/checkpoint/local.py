"""A folder of a node with copies of what its ranks hold, and of what ranks of another node hold.

    FOLDER/rank_00003/step_0000000300               what rank 3 held after step 300
    FOLDER/rank_00003/of_rank_00002/step_0000000300 what rank 2 held, kept by rank 3

Each copy is a checkpoint of one rank's part (`parts.py`), so a torn one is not seen. A step can be
taken up if every rank's part of it is on some node.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_lightning.checkpoint.checks import open_checkpoint
from megatron_lightning.checkpoint.commit import recover, remove
from megatron_lightning.checkpoint.errors import CheckpointError
from megatron_lightning.checkpoint.parts import PART

_STEP = re.compile(r"step_(\d{10})")
_RANK = re.compile(r"rank_(\d{5})")
_OF_RANK = re.compile(r"of_rank_(\d{5})")


@dataclass(frozen=True, kw_only=True)
class Copy:
    """One rank's part of one step, on this node."""

    rank: int
    """Whose part it is."""
    step: int
    path: Path
    layout: str
    """Of the run that wrote it; parts fit into the same layout only."""


def own_path(folder: Path, rank: int, step: int) -> Path:
    """Where a rank keeps its own part."""
    return folder / f"rank_{rank:05d}" / f"step_{step:010d}"


def peer_path(folder: Path, keeper: int, rank: int, step: int) -> Path:
    """Where `keeper` keeps the part of `rank`."""
    return folder / f"rank_{keeper:05d}" / f"of_rank_{rank:05d}" / f"step_{step:010d}"


def partner_of(rank: int, world_size: int, ranks_per_node: int) -> int:
    """Who keeps a second copy for `rank`: the rank of the same place on the next node, or, on one
    node, the next rank. Each rank keeps one.
    """
    shift = ranks_per_node if world_size > ranks_per_node else 1
    return (rank + shift) % world_size


def copies_in(folder: Path) -> list[Copy]:
    """Every complete copy on this node."""
    found = []
    for holder in _folders(folder, _RANK):
        own = int(holder.name.removeprefix("rank_"))
        for path in _folders(holder, _STEP):
            found += _copy_at(path, own)
        for kept in _folders(holder, _OF_RANK):
            for path in _folders(kept, _STEP):
                found += _copy_at(path, int(kept.name.removeprefix("of_rank_")))
    return found


def _copy_at(path: Path, rank: int) -> Iterator[Copy]:
    try:
        metadata = open_checkpoint(path).metadata
        if metadata[PART] == rank and metadata["global_step"] == _step_of(path):
            yield Copy(
                rank=rank, step=_step_of(path), path=path, layout=str(metadata["local_layout"])
            )
    except (CheckpointError, OSError, KeyError, TypeError):
        return  # torn, or of something else


def _folders(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


# ------------------------------------------------------------------------ which step


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A step that can be taken up, and from whom each rank gets its part."""

    step: int
    providers: Mapping[int, int]
    """By rank whose part it is: the rank on whose node it lies, itself where it can be."""


def newest_whole(views: Sequence[Iterable[tuple[int, int]]]) -> Choice | None:
    """The newest step of which every rank's part is somewhere. `views` has for each rank the
    (rank, step) of all copies that it sees; None when there is no such step.
    """
    seen = [set(view) for view in views]
    ranks = range(len(seen))
    for step in sorted({step for view in seen for _, step in view}, reverse=True):
        providers = {}
        for rank in ranks:
            holders = [other for other in (rank, *ranks) if (rank, step) in seen[other]]
            if holders:
                providers[rank] = holders[0]
        if len(providers) == len(seen):
            return Choice(step=step, providers=providers)
    return None


# ------------------------------------------------------------------------ what is kept


def prune(folder: Path, rank: int, keep: int, complete: int) -> None:
    """Delete copies that `rank` keeps and nobody needs: those older than the newest `keep` that all
    ranks have. `complete` is the newest step that all have; newer ones are left.
    """
    for place in _places(folder, rank):
        steps = sorted(_step_of(path) for path in _folders(place, _STEP))
        for step in [step for step in steps if step <= complete][:-keep]:
            remove(place / f"step_{step:010d}")


def clean(folder: Path, rank: int, keep_step: int) -> None:
    """Delete what `rank` keeps of other steps, other ranks' parts of other layouts among them, and
    what interrupted copies have left.
    """
    for place in _places(folder, rank):
        recover(place)
        for path in _folders(place, _STEP):
            if _step_of(path) != keep_step:
                remove(path)


def _places(folder: Path, rank: int) -> list[Path]:
    own = folder / f"rank_{rank:05d}"
    return [own, *_folders(own, _OF_RANK)]
