"""Which layers each pipeline stage holds.

A model is a row of units: embedding, decoder layers, head (final norm, output layer, loss). A
``StageLayout`` cuts the row into ``pipeline_size * virtual_size`` stages, each of at least one
unit; which rank holds which stage is its ``placement``: looped, or V-shaped for ZB-V. The cut is
balanced (by cost), written out as a string in Megatron's notation, or a list. Whatever the cut, the
layers sum to the number asked for, or there is an error.

The string's grammar follows Megatron-Core's ``pipeline_model_parallel_layout``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_lightning.parallel.balance import cut_evenly
from megatron_lightning.parallel.schedules.actions import Placement

EMBEDDING, LAYER, HEAD = "E", "t", "L"
_LONG_NAMES = {"embedding": EMBEDDING, "decoder": LAYER, "loss": HEAD}

Layout = str | Sequence[int] | Sequence[Sequence[str]]
"""A string such as ``"Et*3|t*4|t*2L"``, layers of each stage, or the unit names of each stage."""


@dataclass(frozen=True, kw_only=True)
class ChunkUnits:
    """What one chunk of one pipeline rank holds."""

    stage: int
    """Virtual stage index, in the order of the forward."""
    has_embedding: bool
    """Holds the embedding: takes the batch's tokens, not a received activation."""
    layers: tuple[int, ...]
    """Global indices of its decoder layers, contiguous."""
    has_head: bool
    """Holds the final norm, the output layer and the loss."""


@dataclass(frozen=True, kw_only=True)
class StageLayout:
    """The cut of a whole model, for every pipeline rank and chunk."""

    pipeline_size: int
    """Ranks of the pipeline axis."""
    virtual_size: int
    """Chunks of each rank."""
    stages: tuple[ChunkUnits, ...]
    """In the order of the forward."""
    v_shaped: bool = False
    """Whether the second chunks run through the ranks backwards (see ``Placement``)."""

    @property
    def num_layers(self) -> int:
        """Decoder layers of the whole model."""
        return sum(len(stage.layers) for stage in self.stages)

    @property
    def placement(self) -> Placement:
        """Which rank and chunk holds which stage, for the schedules."""
        return Placement(self.pipeline_size, self.virtual_size, self.v_shaped)

    def chunk(self, rank: int, chunk: int) -> ChunkUnits:
        """The units of one chunk of one pipeline rank."""
        return self.stages[self.placement.stage(rank, chunk)]

    def chunks(self, rank: int) -> tuple[ChunkUnits, ...]:
        """All chunks of one pipeline rank."""
        return tuple(self.chunk(rank, c) for c in range(self.virtual_size))

    def describe(self) -> str:
        """The layout in the notation that ``parse_layout`` reads."""
        return "|".join(
            EMBEDDING * s.has_embedding + LAYER * len(s.layers) + HEAD * s.has_head
            for s in self.stages
        )


def build_layout(
    num_layers: int,
    pipeline_size: int,
    virtual_size: int = 1,
    layout: Layout | None = None,
    *,
    embedding_cost: float = 0.0,
    head_cost: float = 0.0,
    layer_costs: Sequence[float] | None = None,
    v_shaped: bool = False,
) -> StageLayout:
    """The explicit layout if one is given, else a balanced one; ``ValueError`` if impossible.

    ``v_shaped`` changes who holds the stages, not how the row of units is cut.
    """
    if layout is None:
        cut = balanced_layout(
            num_layers,
            pipeline_size,
            virtual_size,
            embedding_cost=embedding_cost,
            head_cost=head_cost,
            layer_costs=layer_costs,
        )
    else:
        cut = parse_layout(layout, num_layers, pipeline_size, virtual_size)
    return replace(cut, v_shaped=v_shaped)


def balanced_layout(
    num_layers: int,
    pipeline_size: int,
    virtual_size: int = 1,
    *,
    embedding_cost: float = 0.0,
    head_cost: float = 0.0,
    layer_costs: Sequence[float] | None = None,
) -> StageLayout:
    """The contiguous cut whose dearest stage is cheapest; ``num_layers`` need not divide.

    Costs are in units of one decoder layer (or of ``layer_costs``, one for each layer). Among
    equally good cuts the stages' numbers of layers are as equal as possible, and what is left over
    goes to the first stages: 61 layers on 4 stages give 16, 15, 15, 15, with a head that costs as
    much as a layer too. Raises ``ValueError`` if there are more stages than units.
    """
    problems = stage_count_problems(num_layers, pipeline_size, virtual_size)
    costs = [1.0] * num_layers if layer_costs is None else list(layer_costs)
    if len(costs) != num_layers:
        problems.append(
            f"layer_costs has {len(costs)} entries for num_layers={num_layers}: give one a layer."
        )
    if min([embedding_cost, head_cost, *costs]) < 0:
        problems.append("embedding_cost, head_cost and layer_costs must not be negative.")
    if problems:
        raise ValueError(" ".join(problems))
    counts = [0, *[1] * num_layers, 0]
    sizes = cut_evenly([embedding_cost, *costs, head_cost], pipeline_size * virtual_size, counts)
    units = EMBEDDING + LAYER * num_layers + HEAD
    ends = [sum(sizes[: s + 1]) for s in range(len(sizes))]
    cut = [units[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    return _from_units(cut, pipeline_size, virtual_size)


def parse_layout(
    layout: Layout, num_layers: int, pipeline_size: int, virtual_size: int = 1
) -> StageLayout:
    """An explicit layout, stages in the order of the forward.

    As a string: ``E`` embedding, ``t`` decoder layer, ``L`` head and loss, ``|`` cut, ``*n``
    repeats the unit, cut or parenthesis before it; blanks and commas are ignored: ``"Et*3|(tt|)*2
    t*2L"``. As a list: the number of decoder layers of each stage, or the names ``embedding``,
    ``decoder``, ``loss`` of each stage's units. Raises ``ValueError`` that says all that is wrong
    with it.
    """
    problems, cut = _explicit_units(layout)
    if not problems:
        problems = _cut_problems(cut, num_layers, pipeline_size, virtual_size)
    if problems:
        raise ValueError(f"pipeline layout {layout!r}: " + " ".join(problems))
    return _from_units(cut, pipeline_size, virtual_size)


def stage_count_problems(num_layers: int, pipeline_size: int, virtual_size: int) -> list[str]:
    """Explained errors if so many layers cannot fill so many stages; empty if they can."""
    stages = pipeline_size * virtual_size
    if num_layers < 1:
        return [f"num_layers={num_layers}: give at least 1."]
    if stages > num_layers + 2:
        return [
            f"num_layers={num_layers} gives {num_layers + 2} units (embedding, layers, head), but "
            f"pipeline_parallel_size={pipeline_size} x virtual_pipeline_size={virtual_size} is "
            f"{stages} stages, each of which needs one: "
            f"use at most {num_layers + 2} stages or at least {stages - 2} layers."
        ]
    return []


def _explicit_units(layout: Layout) -> tuple[list[str], list[str]]:
    """``(problems, unit string of each stage)`` of a layout in any notation."""
    if isinstance(layout, str):
        try:
            return [], "".join(_expand(layout)).split("|")
        except ValueError as error:
            return [str(error)], []
    cut: list[str] = []
    for index, stage in enumerate(layout):
        if isinstance(stage, int):
            if stage < 0:
                return [f"stage {index} has a negative number of layers, {stage}."], []
            cut.append(EMBEDDING * (index == 0) + LAYER * stage + HEAD * (index == len(layout) - 1))
            continue
        names = [_LONG_NAMES.get(name, name) for name in stage]
        unknown = [name for name in names if name not in (EMBEDDING, LAYER, HEAD)]
        if unknown:
            return [f"stage {index} names {unknown}: use 'embedding', 'decoder' or 'loss'."], []
        cut.append("".join(names))
    return [], cut


def _expand(text: str) -> Iterator[str]:
    """Unit letters and cuts of a layout string, repeats written out."""
    yield from _expand_group([c for c in text if not c.isspace() and c != ","], depth=0)


def _expand_group(letters: list[str], depth: int) -> list[str]:
    """Consume ``letters`` up to this depth's closing parenthesis; the items are to be joined."""
    items: list[str] = []
    while letters:
        letter = letters.pop(0)
        if letter in (EMBEDDING, LAYER, HEAD, "|"):
            items.append(letter)
        elif letter == "(":
            items.append("".join(_expand_group(letters, depth + 1)))
        elif letter == ")" and depth > 0:
            return items
        elif letter == "*" and items:
            items[-1] *= _number(letters)
        elif letter in "*()":
            raise ValueError(f"{letter!r} stands where nothing precedes it.")
        elif letter == "m":
            raise ValueError("'m' (multi-token prediction) is not a unit here: leave it out.")
        else:
            raise ValueError(
                f"{letter!r} is not a unit: use E, t, L, the cut |, parentheses and *n."
            )
    if depth > 0:
        raise ValueError("a parenthesis is not closed.")
    return items


def _number(letters: list[str]) -> int:
    digits = ""
    while letters and letters[0].isdigit():
        digits += letters.pop(0)
    if not digits or int(digits) < 1:
        raise ValueError("'*' needs a number of at least 1 behind it.")
    return int(digits)


def _cut_problems(
    cut: Sequence[str], num_layers: int, pipeline_size: int, virtual_size: int
) -> list[str]:
    problems: list[str] = []
    stages = pipeline_size * virtual_size
    if len(cut) != stages:
        problems.append(
            f"it has {len(cut)} stages, but pipeline_parallel_size={pipeline_size} x "
            f"virtual_pipeline_size={virtual_size} needs {stages}."
        )
    empty = [index for index, units in enumerate(cut) if not units]
    if empty:
        problems.append(f"stages {empty} are empty: each needs at least one unit.")
    units = "".join(cut)
    if units.count(LAYER) != num_layers:
        problems.append(f"it has {units.count(LAYER)} decoder layers, but num_layers={num_layers}.")
    if units != EMBEDDING + LAYER * units.count(LAYER) + HEAD:
        problems.append("the embedding must come first, once, and the head last, once.")
    return problems


def _from_units(cut: Sequence[str], pipeline_size: int, virtual_size: int) -> StageLayout:
    stages: list[ChunkUnits] = []
    first = 0
    for index, units in enumerate(cut):
        count = units.count(LAYER)
        stages.append(
            ChunkUnits(
                stage=index,
                has_embedding=EMBEDDING in units,
                layers=tuple(range(first, first + count)),
                has_head=HEAD in units,
            )
        )
        first += count
    return StageLayout(pipeline_size=pipeline_size, virtual_size=virtual_size, stages=tuple(stages))
