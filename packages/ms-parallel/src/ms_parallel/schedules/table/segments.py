"""`SegmentCosts`: costs of the parts of a model that cannot be divided between stages.

A segment is between two neighboring cut points of the model: usually one layer, with the embedding
in the first segment and the head in the last.
"""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import ClassVar, TypeVar

from attrs import field, frozen

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.table.costs import Costs, Number, PassCosts, as_fraction
from ms_parallel.schedules.table.placements import integers

_Value = TypeVar("_Value")


def _fractions(values: Iterable[Number]) -> tuple[Fraction, ...]:
    return tuple(map(as_fraction, values))


@frozen(kw_only=True)
class SegmentCosts(PassCosts):
    """Measured costs of one microbatch in each segment, in the order of the model."""

    part: ClassVar[str] = "segment"
    layers: tuple[int, ...] = field(converter=integers)
    """Model layers in each segment, by default one."""
    transfer: Fraction = field(default=Fraction(0), converter=as_fraction)
    """Time for which a message between stages occupies the link, for any cut."""
    slowness: tuple[Fraction, ...] = field(default=(), converter=_fractions)
    """Factor on the times of each rank, relative to the measured one; empty if all are equal."""

    @layers.default
    def _layers(self) -> Sequence[int]:
        return [1] * len(self.forward)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.check_length("layers", self.layers)
        if not all(self.slowness):
            raise ScheduleError("slowness must be above 0; use 1 for the fastest rank")

    @property
    def count(self) -> int:
        """Number of segments."""
        return len(self.forward)

    def work(self, segment: int) -> Fraction:
        """Forward and backward time of a segment per microbatch."""
        passes = (self.forward, self.backward_input, self.backward_weight)
        return sum((values[segment] for values in passes), Fraction(0))

    def slowness_of(self, placement: Sequence[int]) -> list[Fraction]:
        """Slowness of each stage by its rank.

        Raises:
            ScheduleError: a stage is on a rank without an entry.
        """
        if not self.slowness or not placement:
            return [Fraction(1)] * len(placement)
        if max(placement) >= len(self.slowness):
            raise ScheduleError(
                f"slowness has {len(self.slowness)} entries but a stage is on rank"
                f" {max(placement)}; use one entry per rank"
            )
        return [self.slowness[rank] for rank in placement]

    def stages(self, split: Sequence[int], placement: Sequence[int] | None = None) -> Costs:
        """Costs of stages with these numbers of segments.

        Args:
            split: number of segments of each stage.
            placement: rank of each stage; None if all ranks are equal.
        """
        slowness = self.slowness_of(placement or ()) or [Fraction(1)] * len(split)

        def sums(values: Sequence[Fraction]) -> list[Fraction]:
            return [sum(values, Fraction(0)) for values in _cut(values, split)]

        # Times scale with the speed of the rank; memory and messages do not.
        def times(values: Sequence[Fraction]) -> list[Fraction]:
            return [time * factor for time, factor in zip(sums(values), slowness, strict=True)]

        return Costs(
            forward=times(self.forward),
            backward_input=times(self.backward_input),
            backward_weight=times(self.backward_weight),
            activation=sums(self.activation),
            retained=sums(self.retained),
            latency=self.latency,
            # A message of `transfer` bytes at 1 byte per unit of time occupies the link for
            # `transfer`.
            bandwidth=1 if self.transfer else None,
            message_bytes=[self.transfer] * len(split) if self.transfer else None,
        )

    def layers_of(self, split: Sequence[int]) -> tuple[int, ...]:
        """Layers of stages with these numbers of segments."""
        return tuple(map(sum, _cut(self.layers, split)))


def _cut(values: Sequence[_Value], split: Sequence[int]) -> list[Sequence[_Value]]:
    """Cut values into consecutive runs of these lengths."""
    ends = [sum(split[: stage + 1]) for stage in range(len(split))]
    return [values[end - size : end] for size, end in zip(split, ends, strict=True)]
