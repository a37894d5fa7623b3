"""`SegmentCosts`: what each part of a model costs that a stage can only take whole.

A segment lies between two neighbouring places at which the model can be cut: mostly one layer, with
the embedding in the first segment and the head in the last.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import ClassVar, TypeVar

from attrs import field, frozen

from ms_parallel.schedules.table.costs import Costs, PassCosts, as_fraction
from ms_parallel.schedules.table.placements import integers

_Value = TypeVar("_Value")


@frozen(kw_only=True)
class SegmentCosts(PassCosts):
    """Measured costs of one microbatch in each segment, in the order of the model."""

    part: ClassVar[str] = "segment"
    layers: tuple[int, ...] = field(converter=integers)
    """Layers of the model in each segment; default one."""
    transfer: Fraction = field(default=Fraction(0), converter=as_fraction)
    """Time for which a message between stages occupies the link; the same wherever it is cut."""

    @layers.default
    def _layers(self) -> Sequence[int]:
        return [1] * len(self.forward)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.check_length("layers", self.layers)

    @property
    def count(self) -> int:
        """How many segments have an entry."""
        return len(self.forward)

    def work(self, segment: int) -> Fraction:
        """Time of a segment for one microbatch, forward and backward."""
        passes = (self.forward, self.backward_input, self.backward_weight)
        return sum((each[segment] for each in passes), Fraction(0))

    def stages(self, split: Sequence[int]) -> Costs:
        """Costs of the stages that have so many segments each."""

        def sums(values: Sequence[Fraction]) -> list[Fraction]:
            return [sum(each, Fraction(0)) for each in _cut(values, split)]

        return Costs(
            forward=sums(self.forward),
            backward_input=sums(self.backward_input),
            backward_weight=sums(self.backward_weight),
            activation=sums(self.activation),
            retained=sums(self.retained),
            latency=self.latency,
            bandwidth=1 if self.transfer else None,
            message_bytes=[self.transfer] * len(split) if self.transfer else None,
        )

    def layers_of(self, split: Sequence[int]) -> tuple[int, ...]:
        """Layers of the stages that have so many segments each."""
        return tuple(map(sum, _cut(self.layers, split)))


def _cut(values: Sequence[_Value], split: Sequence[int]) -> list[Sequence[_Value]]:
    """Runs of so many values each."""
    ends = [sum(split[: stage + 1]) for stage in range(len(split))]
    return [values[end - size : end] for size, end in zip(split, ends, strict=True)]
