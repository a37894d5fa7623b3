"""`SegmentCosts`: what each part of a model costs that a stage can only take whole.

A segment lies between two neighbouring places at which the model can be cut: mostly one layer, with
the embedding in the first segment and the head in the last.
"""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import ClassVar, TypeVar

from attrs import field, frozen

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.table.costs import Costs, Number, PassCosts, as_fraction
from ms_parallel.schedules.table.placements import integers

_Value = TypeVar("_Value")


def _each(values: Iterable[Number]) -> tuple[Fraction, ...]:
    return tuple(map(as_fraction, values))


@frozen(kw_only=True)
class SegmentCosts(PassCosts):
    """Measured costs of one microbatch in each segment, in the order of the model."""

    part: ClassVar[str] = "segment"
    layers: tuple[int, ...] = field(converter=integers)
    """Layers of the model in each segment; default one."""
    transfer: Fraction = field(default=Fraction(0), converter=as_fraction)
    """Time for which a message between stages occupies the link; the same wherever it is cut."""

    slowness: tuple[Fraction, ...] = field(default=(), converter=_each)
    """How many times as long each rank takes as one that these times are of; none: all alike."""

    @layers.default
    def _layers(self) -> Sequence[int]:
        return [1] * len(self.forward)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.check_length("layers", self.layers)
        if not all(self.slowness):
            raise ScheduleError("a rank of slowness 0 takes no time; give 1 to the fastest")

    @property
    def count(self) -> int:
        """How many segments have an entry."""
        return len(self.forward)

    def work(self, segment: int) -> Fraction:
        """Add up the time of a segment for one microbatch, forward and backward."""
        passes = (self.forward, self.backward_input, self.backward_weight)
        return sum((each[segment] for each in passes), Fraction(0))

    def slowness_of(self, placement: Sequence[int]) -> list[Fraction]:
        """Return how many times as long each stage takes, by the rank that it is on.

        Raises:
            ScheduleError: a stage is on a rank whose slowness is not known.
        """
        if not self.slowness or not placement:
            return [Fraction(1)] * len(placement)
        if max(placement) >= len(self.slowness):
            raise ScheduleError(
                f"slowness has {len(self.slowness)} entries and a stage is on rank"
                f" {max(placement)}; give one entry a rank"
            )
        return [self.slowness[rank] for rank in placement]

    def stages(self, split: Sequence[int], placement: Sequence[int] | None = None) -> Costs:
        """Compute the costs of the stages that have so many segments each.

        Args:
            split: segments of each stage.
            placement: rank of each stage; None for ranks that are all alike.
        """
        slowness = self.slowness_of(placement or ()) or [Fraction(1)] * len(split)

        def sums(values: Sequence[Fraction]) -> list[Fraction]:
            return [sum(each, Fraction(0)) for each in _cut(values, split)]

        def times(values: Sequence[Fraction]) -> list[Fraction]:
            return [time * slow for time, slow in zip(sums(values), slowness, strict=True)]

        return Costs(
            forward=times(self.forward),
            backward_input=times(self.backward_input),
            backward_weight=times(self.backward_weight),
            activation=sums(self.activation),
            retained=sums(self.retained),
            latency=self.latency,
            bandwidth=1 if self.transfer else None,
            message_bytes=[self.transfer] * len(split) if self.transfer else None,
        )

    def layers_of(self, split: Sequence[int]) -> tuple[int, ...]:
        """Count the layers of the stages that have so many segments each."""
        return tuple(map(sum, _cut(self.layers, split)))


def _cut(values: Sequence[_Value], split: Sequence[int]) -> list[Sequence[_Value]]:
    """Cut values into runs of so many each."""
    ends = [sum(split[: stage + 1]) for stage in range(len(split))]
    return [values[end - size : end] for size, end in zip(split, ends, strict=True)]
