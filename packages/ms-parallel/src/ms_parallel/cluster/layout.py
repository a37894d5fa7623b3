"""How many processes split what: the axes of a run, and each process's place on them.

Each field of `Layout` is an axis; nothing else lists them. The innermost axis talks most, so its
ranks are neighbours.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from math import prod
from typing import Any, Literal

from attrs import Attribute, field, fields, frozen

from ms_parallel.errors import LayoutError

MOST_RANKS = 1 << 20
Splits = Literal["layers", "rows", "sequence", "matrices", "experts", "copies"]


@frozen(kw_only=True)
class Axis:
    """One way of splitting a run over processes."""

    splits: Splits
    """What its ranks share out. Ranks that split `rows` read different rows of a batch, and those
    that split the `sequence` have different positions of the same rows. Both hold different tokens:
    they shard the weights among them and add up gradients. Ranks that split `experts` are
    neighbours among those, and hold different experts: each shards and adds up its experts with
    what is left of those that hold different tokens. Ranks that split `copies` hold different
    tokens and the same parts of all weights, and add up gradients without sharding anything."""
    outermost: int | None
    """Its place among the axes, 0 for the one whose ranks lie farthest apart; None for an axis that
    has no ranks of its own."""


def _axis(splits: Splits, outermost: int | None) -> Any:
    """Make a field of `Layout` that says how many ranks an axis has."""
    axis = Axis(splits=splits, outermost=outermost)
    return field(default=1, validator=_check_size, metadata={"axis": axis})


def _check_size(instance: object, attribute: "Attribute[int]", value: object) -> None:
    name = attribute.name
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise LayoutError(f"layout axis {name!r} is {value!r}; give a whole number of at least 1")
    if value > MOST_RANKS:
        raise LayoutError(f"layout axis {name!r} is above {MOST_RANKS}; give a smaller number")


class Place:
    """One process's coordinate on each axis, as attributes; each counts from 0.

    Args:
        rank: which of the `count` readers of rows this process is; a stream asks for both.
        count: how many readers share out a batch.
        coordinates: by the names of axes; 0 where none is given.
    """

    def __init__(self, *, rank: int = 0, count: int = 1, **coordinates: int) -> None:
        self.rank, self.count = rank, count
        self.coordinates = {axis: coordinates.pop(axis, 0) for axis in AXES}
        if coordinates:
            raise LayoutError(_unknown_axis(next(iter(coordinates)), list(AXES)))

    def __getattr__(self, axis: str) -> int:
        if axis in AXES:
            return self.coordinates[axis]
        raise AttributeError(axis)

    @property
    def speaks_for_rows(self) -> bool:
        """Whether its loss counts, among those of processes that compute it of the same rows."""
        return self.tensor == 0 and self.context == 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and self.coordinates == other.coordinates

    def __hash__(self) -> int:
        return hash(tuple(self.coordinates.values()))


@frozen(kw_only=True)
class ModelShape:
    """The sizes of a model that a layout has to divide."""

    layers: int
    """Blocks that pipeline stages share out."""
    attention_heads: int
    key_value_heads: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int


@frozen(kw_only=True)
class Layout:
    """Number of ranks along each axis; those with ranks of their own make up the world size.

    Raises:
        LayoutError: a value is not a whole number of at least 1, or `expert` and `replicate` do not
            divide the ranks that hold different tokens.
    """

    data: int = _axis("rows", 1)
    """Ranks that read different rows of a batch and shard the weights among them."""
    tensor: int = _axis("matrices", 3)
    """Ranks that split each matrix, and the sequence between matrices."""
    pipeline: int = _axis("layers", 0)
    """Stages that share out the blocks."""
    context: int = _axis("sequence", 2)
    """Ranks that share out the positions of each row, which attention sees all of, and shard the
    weights among them as data ranks do."""
    expert: int = _axis("experts", None)
    """Ranks that share out the experts of a layer: neighbours among the data and context ranks,
    whose product it divides. It needs no ranks of its own."""
    replicate: int = _axis("copies", None)
    """Groups of data and context ranks that hold the same weights; each shards them within itself.
    It needs no ranks of its own, and divides their product; all of them is plain data parallel."""

    def __attrs_post_init__(self) -> None:
        axes = " and ".join(token_axes())
        if self.token_ranks % self.replicate:
            raise LayoutError(
                f"replicate={self.replicate} does not divide the {self.token_ranks} ranks of {axes}"
                f" that it groups; set data={self.replicate}, or replicate to a divisor of"
                f" {self.token_ranks}"
            )
        if self.shards % self.expert:
            raise LayoutError(
                f"expert={self.expert} does not divide the {self.shards} ranks of {axes} that it"
                f" shares experts out over; set data={self.expert * self.replicate}, or expert to a"
                f" divisor of {self.shards}"
            )

    @property
    def world_size(self) -> int:
        """Processes that the layout needs."""
        return prod(getattr(self, axis) for axis in AXES)

    @property
    def readers(self) -> int:
        """Number of groups of processes that read different rows of a batch."""
        return prod(getattr(self, axis) for axis in row_axes())

    @property
    def token_ranks(self) -> int:
        """Number of groups of processes that hold different tokens of a batch."""
        return prod(getattr(self, axis) for axis in token_axes())

    @property
    def shards(self) -> int:
        """Number of groups of processes, with different tokens each, that share weights out."""
        return self.token_ranks // self.replicate

    @property
    def expert_shards(self) -> int:
        """Number of those groups that have the same experts, which are sharded over them."""
        return self.shards // self.expert

    @property
    def row_parts(self) -> int:
        """Number of parts that a row is cut into for the processes of one reader."""
        return self.context * self.tensor

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Read `"data=2,tensor=2"`; an empty text is one process.

        Raises:
            LayoutError: a part is not `axis=number`, or an axis is unknown or given twice.
        """
        values: dict[str, object] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, equals, number = (piece.strip() for piece in part.partition("="))
            if not equals or not number.lstrip("-").isdecimal():
                raise LayoutError(f"layout part {part!r} is not axis=number; write data=2,tensor=2")
            if name in values:
                raise LayoutError(f"layout {text!r} gives {name!r} twice; give it once")
            values[name] = int(number)
        return cls.from_config(values)

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> "Layout":
        """Read `{"tensor_parallel": 2, "data": 2}`; both forms of a name are known.

        Raises:
            LayoutError: a key is unknown (the nearest known one is named) or given twice.
        """
        known = [each.name for each in fields(cls)]
        values: dict[str, object] = {}
        for key, value in config.items():
            axis = key.removesuffix("_parallel")
            if axis not in known:
                raise LayoutError(_unknown_axis(key, known))
            if axis in values:
                raise LayoutError(f"layout gives axis {axis!r} twice; give it once")
            values[axis] = value
        return cls(**values)  # type: ignore[arg-type]  # the validators check each value

    def place(self, rank: int) -> Place:
        """Return the coordinates of a rank.

        Raises:
            LayoutError: the rank is outside the world.
        """
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is outside 0..{self.world_size - 1} of {self}")
        coordinates: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, coordinates[axis] = divmod(rank, getattr(self, axis))
        reader = 0
        for axis in row_axes():
            reader = reader * getattr(self, axis) + coordinates[axis]
        return Place(rank=reader, count=self.readers, **coordinates)

    def rank(self, place: Place) -> int:
        """Return the rank that stands at a place: the inverse of `place`.

        Raises:
            LayoutError: the place is outside the layout.
        """
        rank = 0
        for axis in AXES:
            size, coordinate = getattr(self, axis), getattr(place, axis)
            if not 0 <= coordinate < size:
                raise LayoutError(f"{axis} coordinate {coordinate} is outside 0..{size - 1}")
            rank = rank * size + coordinate
        return rank

    def check_world(self, world_size: int) -> None:
        """Check that the layout uses exactly `world_size` processes.

        Raises:
            LayoutError: it does not; says which `data` would fit, or how many processes to start.
        """
        if self.world_size == world_size:
            return
        others = self.world_size // self.data
        if world_size % others == 0:
            remedy = f"set data={world_size // others} or start {self.world_size} processes"
        else:
            remedy = f"start {self.world_size} processes"
        raise LayoutError(
            f"layout {self} needs {self.world_size} processes, but {world_size} run; {remedy}"
        )

    def check_model(self, shape: ModelShape) -> None:
        """Check that the model's sizes divide as the layout asks.

        Raises:
            LayoutError: names what does not divide, and the values that fit.
        """
        divided = {
            "attention heads": shape.attention_heads,
            "key-value heads": shape.key_value_heads,
            "hidden size": shape.hidden_size,
            "intermediate size": shape.intermediate_size,
            "vocabulary": shape.vocab_size,
        }
        for what, size in divided.items():
            if size % self.tensor:
                fits = _divisors_of_all(divided.values())
                raise LayoutError(
                    f"tensor={self.tensor} does not divide the model's {size} {what};"
                    f" values that fit: {fits}"
                )
        if self.pipeline > shape.layers:
            raise LayoutError(
                f"pipeline={self.pipeline} has more stages than the model's {shape.layers} layers;"
                f" values that fit: 1 to {shape.layers}"
            )

    def __str__(self) -> str:
        parts = [f"{a.name}={n}" for a in fields(type(self)) if (n := getattr(self, a.name)) > 1]
        return ",".join(parts) or "data=1"


AXES = tuple(
    each.name
    for each in sorted(fields(Layout), key=lambda each: each.metadata["axis"].outermost or 0)
    if each.metadata["axis"].outermost is not None
)
"""The axes that have ranks of their own, outermost first."""


def row_axes() -> tuple[str, ...]:
    """List the axes whose ranks read different rows of a batch, outermost first."""
    return _axes_that_split("rows")


def token_axes() -> tuple[str, ...]:
    """List the axes whose ranks hold different tokens of a batch, outermost first."""
    return _axes_that_split("rows", "sequence")


def _axes_that_split(*what: Splits) -> tuple[str, ...]:
    axes = {each.name: each.metadata["axis"] for each in fields(Layout)}
    return tuple(name for name in AXES if axes[name].splits in what)


def _unknown_axis(key: str, known: list[str]) -> str:
    spellings = [*known, *(f"{axis}_parallel" for axis in known)]
    near = get_close_matches(key, spellings, n=1, cutoff=0.5)
    remedy = f"did you mean {near[0]!r}?" if near else f"known axes: {', '.join(known)}"
    return f"unknown layout axis {key!r}; {remedy}"


def _divisors_of_all(sizes: Iterable[int]) -> str:
    sizes = tuple(sizes)
    fitting = [n for n in range(1, min(sizes) + 1) if all(size % n == 0 for size in sizes)]
    return ", ".join(map(str, fitting))
