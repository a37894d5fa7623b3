"""How many processes split what: the axes of a run, and each process's place on them.

Axes from outermost to innermost: pipeline, data, context, tensor. The innermost talks most,
so its ranks are neighbours.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from attrs import field, fields, frozen

from ms_parallel.errors import LayoutError

__all__ = ["Layout", "ModelShape", "Place"]

AXES = ("pipeline", "data", "context", "tensor")
MOST_RANKS = 1 << 20
_NOT_YET = ("context", "expert")


def _positive(instance: object, attribute: object, value: object) -> None:
    name = getattr(attribute, "name", "?")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise LayoutError(f"layout axis {name!r} is {value!r}; give a whole number of at least 1")
    if value > MOST_RANKS:
        raise LayoutError(f"layout axis {name!r} is above {MOST_RANKS}; give a smaller number")
    if name in _NOT_YET and value > 1:
        raise LayoutError(f"layout axis {name}={value} is not supported yet; leave it at 1")


@frozen(kw_only=True)
class Place:
    """One process's coordinates; each counts from 0."""

    pipeline: int = 0
    data: int = 0
    context: int = 0
    tensor: int = 0
    count: int = field(default=1, eq=False)
    """Ranks on the data axis: how many readers share out a batch."""

    @property
    def rank(self) -> int:
        """Which of the `count` readers this process is; a stream asks its place for both."""
        return self.data


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
    """How many ranks stand on each axis; their product is the world size.

    Raises:
        LayoutError: a value is not a whole number of at least 1, or an axis is not supported yet.
    """

    data: int = field(default=1, validator=_positive)
    """Ranks that read different rows of a batch and shard the weights among them."""
    tensor: int = field(default=1, validator=_positive)
    """Ranks that split each matrix, and the sequence between matrices."""
    pipeline: int = field(default=1, validator=_positive)
    """Stages that share out the blocks."""
    context: int = field(default=1, validator=_positive)
    """Ranks that split the sequence in attention; not supported yet."""
    expert: int = field(default=1, validator=_positive)
    """Ranks that share out experts; not supported yet."""

    @property
    def world_size(self) -> int:
        """Processes that the layout needs."""
        return self.pipeline * self.data * self.context * self.tensor

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
        known = [axis.name for axis in fields(cls)]
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
        """The coordinates of a rank.

        Raises:
            LayoutError: the rank is outside the world.
        """
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is outside 0..{self.world_size - 1} of {self}")
        coordinates = {}
        for axis in reversed(AXES):
            rank, coordinates[axis] = divmod(rank, getattr(self, axis))
        return Place(**coordinates, count=self.data)

    def rank(self, place: Place) -> int:
        """The rank that stands at a place: the inverse of `place`.

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


def _unknown_axis(key: str, known: list[str]) -> str:
    spellings = [*known, *(f"{axis}_parallel" for axis in known)]
    near = get_close_matches(key, spellings, n=1, cutoff=0.5)
    remedy = f"did you mean {near[0]!r}?" if near else f"known axes: {', '.join(known)}"
    return f"unknown layout axis {key!r}; {remedy}"


def _divisors_of_all(sizes: Iterable[int]) -> str:
    sizes = tuple(sizes)
    fitting = [n for n in range(1, min(sizes) + 1) if all(size % n == 0 for size in sizes)]
    return ", ".join(map(str, fitting))
