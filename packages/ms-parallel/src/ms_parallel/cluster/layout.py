"""Layouts: the axes of parallelism, and the coordinates of each process.

The fields of `Layout` are the axes. Ranks of the innermost axis communicate most, so they are
neighbors.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from math import prod
from typing import Any, Literal

from attrs import Attribute, field, fields, frozen

from ms_parallel.arguments import shown
from ms_parallel.errors import LayoutError

MAX_RANKS = 1 << 20
SplitDimension = Literal["layers", "rows", "sequence", "matrices", "experts", "copies"]


@frozen(kw_only=True)
class Axis:
    """An axis of parallelism."""

    splits: SplitDimension
    """Dimension that the axis splits.

    Ranks that split `rows` read different rows of a batch; ranks that split the `sequence` have
    different positions of the same rows. Both have different tokens: they shard the weights and
    reduce gradients. Ranks that split `experts` are neighbors among these ranks; each expert is
    sharded and reduced over the ranks that have it. Ranks that split `copies` have different tokens
    and the same weights, and reduce gradients without sharding.
    """
    outermost: int | None
    """Position of the axis in the mesh, 0 for the outermost; None for an axis that only groups the
    ranks of other axes."""


def _axis(splits: SplitDimension, outermost: int | None) -> Any:
    """Declare a field of `Layout` with the number of ranks along an axis."""
    axis = Axis(splits=splits, outermost=outermost)
    return field(default=1, validator=_check_size, metadata={"axis": axis})


def _check_size(instance: object, attribute: "Attribute[int]", value: object) -> None:
    name = attribute.name
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise LayoutError(
            f"layout axis {name!r} must be a whole number of at least 1, got {shown(value)}"
        )
    if value > MAX_RANKS:
        raise LayoutError(f"layout axis {name!r} must be at most {MAX_RANKS}, got {value}")


class Place:
    """Coordinates of a process on each axis, as attributes counted from 0.

    Args:
        rank: index of this process among the `count` readers of different rows; used by streams.
        count: number of readers of different rows.
        coordinates: coordinates by axis; 0 by default.
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
    def is_loss_rank(self) -> bool:
        """Whether this process's loss counts, among those that compute it for the same rows."""
        return self.tensor == 0 and self.context == 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and self.coordinates == other.coordinates

    def __hash__(self) -> int:
        return hash(tuple(self.coordinates.values()))


@frozen(kw_only=True)
class ModelShape:
    """Sizes of a model that a layout must divide."""

    layers: int
    """Number of blocks to be split into pipeline stages."""
    attention_heads: int
    key_value_heads: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int


@frozen(kw_only=True)
class Layout:
    """Number of ranks along each axis; their product is the world size.

    Raises:
        LayoutError: a value is not a whole number of at least 1, or `expert` or `replicate` does
            not divide the ranks with different tokens.
    """

    # Order in the mesh, from the outermost axis: pipeline, data, context, tensor.
    data: int = _axis("rows", 1)
    """Data parallelism: ranks that read different rows of a batch and shard the weights."""
    tensor: int = _axis("matrices", 3)
    """Tensor parallelism: ranks that split each matrix, and the sequence between matrices."""
    pipeline: int = _axis("layers", 0)
    """Pipeline parallelism: stages that split the blocks."""
    context: int = _axis("sequence", 2)
    """Context parallelism: ranks that split the positions of each row, with attention over all
    positions, and shard the weights like data ranks."""
    expert: int = _axis("experts", None)
    """Expert parallelism: ranks that split the experts of a layer. It groups neighbors
    among the data and context ranks, whose product it must divide, and adds no ranks."""
    replicate: int = _axis("copies", None)
    """Replication: groups of data and context ranks with a full copy of the weights, sharded within
    the group. It must divide their product and adds no ranks; the full product is plain data
    parallelism."""

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
                f" splits experts over; set data={self.expert * self.replicate}, or expert to a"
                f" divisor of {self.shards}"
            )

    @property
    def world_size(self) -> int:
        """Number of processes of the layout."""
        return prod(getattr(self, axis) for axis in AXES)

    @property
    def data_ranks(self) -> int:
        """Number of data ranks, which read different rows of a batch."""
        return prod(getattr(self, axis) for axis in row_axes())

    @property
    def token_ranks(self) -> int:
        """Number of ranks with different tokens of a batch."""
        return prod(getattr(self, axis) for axis in token_axes())

    @property
    def shards(self) -> int:
        """Number of ranks, with different tokens each, over which weights are sharded."""
        return self.token_ranks // self.replicate

    @property
    def expert_shards(self) -> int:
        """Number of ranks with the same experts, over which each expert is sharded."""
        return self.shards // self.expert

    @property
    def row_parts(self) -> int:
        """Number of parts into which the ranks of one data rank split a row."""
        return self.context * self.tensor

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Parse text such as `"data=2,tensor=2"`; an empty text is one process.

        Raises:
            LayoutError: a part is not `axis=number`, or an axis is unknown or repeated.
        """
        values: dict[str, object] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, equals, number = (text_part.strip() for text_part in part.partition("="))
            if not equals or not number.lstrip("-").isdecimal():
                raise LayoutError(f"layout part {part!r} is not axis=number; write data=2,tensor=2")
            if name in values:
                raise LayoutError(f"layout {text!r} sets {name!r} twice; set it once")
            values[name] = int(number)
        return cls.from_config(values)

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> "Layout":
        """Create a layout from a table such as `{"tensor_parallel": 2, "data": 2}`.

        Raises:
            LayoutError: a key is unknown (the nearest one is suggested) or repeated.
        """
        names = [axis_field.name for axis_field in fields(cls)]
        values: dict[str, object] = {}
        for key, value in config.items():
            axis = key.removesuffix("_parallel")
            if axis not in names:
                raise LayoutError(_unknown_axis(key, names))
            if axis in values:
                raise LayoutError(f"layout sets axis {axis!r} twice; set it once")
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
        # The innermost axis varies fastest.
        for axis in reversed(AXES):
            rank, coordinates[axis] = divmod(rank, getattr(self, axis))
        # Index among the data ranks, with the outermost axis varying slowest.
        data_rank = 0
        for axis in row_axes():
            data_rank = data_rank * getattr(self, axis) + coordinates[axis]
        return Place(rank=data_rank, count=self.data_ranks, **coordinates)

    def rank(self, coordinates: Place) -> int:
        """Rank at the given coordinates; the inverse of `place`.

        Raises:
            LayoutError: a coordinate is outside the layout.
        """
        rank = 0
        for axis in AXES:
            size, coordinate = getattr(self, axis), getattr(coordinates, axis)
            if not 0 <= coordinate < size:
                raise LayoutError(f"{axis} coordinate {coordinate} is outside 0..{size - 1}")
            # Horner's rule, from the outermost axis.
            rank = rank * size + coordinate
        return rank

    def check_world(self, world_size: int) -> None:
        """Check that the layout has exactly `world_size` processes.

        Raises:
            LayoutError: it has not; suggests a value of `data` or the number of processes to start.
        """
        if self.world_size == world_size:
            return
        other_ranks = self.world_size // self.data
        if world_size % other_ranks == 0:
            remedy = f"set data={world_size // other_ranks} or start {self.world_size} processes"
        else:
            remedy = f"start {self.world_size} processes"
        raise LayoutError(
            f"layout {self} needs {self.world_size} processes, but {world_size} run; {remedy}"
        )

    def check_model(self, shape: ModelShape) -> None:
        """Check that the model's sizes are divisible as the layout requires.

        Raises:
            LayoutError: names the size that is not, and values that fit.
        """
        divided = {
            "attention heads": shape.attention_heads,
            "key-value heads": shape.key_value_heads,
            "hidden size": shape.hidden_size,
            "intermediate size": shape.intermediate_size,
            "vocabulary": shape.vocab_size,
        }
        for noun, size in divided.items():
            if size % self.tensor:
                fits = _divisors_of_all(divided.values())
                raise LayoutError(
                    f"tensor={self.tensor} does not divide the model's {size} {noun};"
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
    axis_field.name
    for axis_field in sorted(
        fields(Layout), key=lambda axis_field: axis_field.metadata["axis"].outermost or 0
    )
    if axis_field.metadata["axis"].outermost is not None
)
"""Axes that multiply to the world size, outermost first."""


def row_axes() -> tuple[str, ...]:
    """Axes whose ranks read different rows of a batch, outermost first."""
    return _axes_that_split("rows")


def token_axes() -> tuple[str, ...]:
    """Axes whose ranks have different tokens of a batch, outermost first."""
    return _axes_that_split("rows", "sequence")


def _axes_that_split(*splits: SplitDimension) -> tuple[str, ...]:
    axes = {axis_field.name: axis_field.metadata["axis"] for axis_field in fields(Layout)}
    return tuple(name for name in AXES if axes[name].splits in splits)


def _unknown_axis(key: str, names: list[str]) -> str:
    # Both `tensor` and `tensor_parallel` are accepted.
    spellings = [*names, *(f"{axis}_parallel" for axis in names)]
    close_matches = get_close_matches(key, spellings, n=1, cutoff=0.5)
    remedy = (
        f"did you mean {close_matches[0]!r}?"
        if close_matches
        else f"known axes: {', '.join(names)}"
    )
    return f"unknown layout axis {key!r}; {remedy}"


def _divisors_of_all(sizes: Iterable[int]) -> str:
    sizes = tuple(sizes)
    fitting = [n for n in range(1, min(sizes) + 1) if all(size % n == 0 for size in sizes)]
    return ", ".join(map(str, fitting))
